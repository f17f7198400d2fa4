"""The examination: every probe in turn, what it finds, and nothing personal in it."""

from __future__ import annotations

import getpass
import os
import pwd
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from paged_backend.doctor import backends, installation, machine
from paged_backend.doctor.finding import Finding
from paged_backend.doctor.self_test import self_test
from paged_backend.errors import PagedBackendError

Probe = Callable[[], Iterable[Finding]]

# By topic, in the order in which they are told.
PROBES: dict[str, tuple[Probe, ...]] = {
    "installation": (installation.versions, installation.plugins, installation.sample_model),
    "machine": (machine.system, machine.processor, machine.threads, machine.memory, machine.gpus),
    "backends": (
        backends.compiler,
        backends.cpu_operations,
        backends.speed,
        backends.triton_kernels,
        backends.attention_backend,
        backends.swaps,
    ),
}


def examine(seconds: float) -> Iterator[tuple[str, Iterator[Finding]]]:
    """Yields each topic with what is found, as it is found; a probe that fails is a problem among the others.

    seconds: how long the kernels may be tried, at most. To compile them first takes longer, once.
    """
    for topic, probes in PROBES.items():
        yield topic, _all(probes)

    def kernels() -> Iterable[Finding]:
        return self_test(seconds)

    yield "kernels against the reference", _all((kernels,))


def _all(probes: Iterable[Probe]) -> Iterator[Finding]:
    for probe in probes:
        try:
            # What is wrong is told once, among the findings.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = list(probe())
        except Exception as error:
            reason = f"{error}" if isinstance(error, PagedBackendError) else f"{type(error).__name__}: {error}"
            found = [Finding(probe.__name__.replace("_", " "), "problem", f"could not be found out: {reason}")]
        for finding in found:
            yield replace(finding, words=impersonal(finding.words))


def impersonal(text: str) -> str:
    """A text with ~ in place of the user's home, and USER for the user's name where it is part of another path."""
    homes = {os.path.expanduser("~")}
    try:
        homes.add(pwd.getpwuid(os.getuid()).pw_dir)
        user = getpass.getuser()
    except (KeyError, OSError):
        # A user without an entry in the system's list, as in a container.
        user = Path(os.path.expanduser("~")).name
    for home in sorted(homes - {"/", "", "~"}, key=len, reverse=True):
        text = re.sub(rf"(?<![\w.-]){re.escape(home.rstrip('/'))}(?![\w.-])", "~", text)
    return re.sub(rf"/{re.escape(user)}(?![\w.-])", "/USER", text) if user else text
