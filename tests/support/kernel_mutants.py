"""Copies of the kernels package with one thing wrong, to see that the comparison with the oracle would notice."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from kernel_cases import assert_attention_close, make_case, oracle
from state_cases import check_update, expect_gated_delta, expect_selective, make_gated_delta, make_selective

from paged_backend.kernels import dispatch

_SOURCE = Path(dispatch.__file__).parent
_numbers = itertools.count()


class Mutant(NamedTuple):
    """One edit: in `module`, a path such as "triton/cache", the only occurrence of `right` becomes `wrong`."""

    module: str
    right: str
    wrong: str


@contextmanager
def mutated(folder: Path, mutant: Mutant | None) -> Iterator[Callable[[str], Any]]:
    """Yields a function that imports a module of the mutated copy, which is made in `folder`."""
    name = f"mutant_kernels_{next(_numbers)}"
    package = folder / name
    for path in (*_SOURCE.glob("*.py"), *_SOURCE.glob("triton/*.py")):
        text, place = path.read_text(), path.relative_to(_SOURCE)
        if mutant is not None and place == Path(f"{mutant.module}.py"):
            assert text.count(mutant.right) == 1, f"{mutant.right!r} occurs {text.count(mutant.right)} times in {path}"
            text = text.replace(mutant.right, mutant.wrong)
        # Operations of its own too: torch knows each name once.
        text = text.replace("paged_backend.kernels", name).replace("paged_backend::", f"{name}::")
        (package / place).parent.mkdir(parents=True, exist_ok=True)
        (package / place).write_text("" if place == Path("__init__.py") else text)
    sys.path.insert(0, str(folder))
    try:
        yield lambda module: importlib.import_module(f"{name}.{module}")
    finally:
        sys.path.remove(str(folder))
        for module in [module for module in sys.modules if module.split(".")[0] == name]:
            del sys.modules[module]


def _backend(load: Callable[[str], Any], name: str) -> Any:
    """The copy's own backend of this name."""
    return load("triton").BACKEND if name == "triton" else load("dispatch").REFERENCE


def _classes(load: Callable[[str], Any]) -> SimpleNamespace:
    """The copy's own values."""
    return SimpleNamespace(
        AttentionVariant=load("attention_variant").AttentionVariant,
        LayerCache=load("kv_layout").LayerCache,
        MaskRule=load("mask_rule").MaskRule,
        Sequences=load("sequences").Sequences,
    )


def check_decode(load: Callable[[str], Any], backend: str) -> None:
    """Raises AssertionError unless decode_attention equals the oracle on cases that use every feature."""
    run = load("decode_attention").decode_attention
    # Two are long enough to be split, one of them without sinks; what takes less comes first.
    for longest, options in (
        (90, {"group": 3, "window": 20, "softcap": 3.0, "sinks": True}),
        (90, {"group": 2, "chunk": 24, "cache_dtype": torch.int8}),
        (301, {"group": 1, "value_dim": 16, "cache_dtype": torch.float8_e4m3fn, "num_kv_heads": 1}),
        (301, {"group": 2, "sinks": True, "num_kv_heads": 1}),
    ):
        case = make_case([37, 0, 16, longest], key_dim=24, scale=0.5, **options)
        output = run(case.query, *case.values(_classes(load)), backend=_backend(load, backend))
        assert_attention_close(output, oracle(case))


def check_prefill(load: Callable[[str], Any], backend: str) -> None:
    """The same for prefill_attention."""
    run = load("prefill_attention").prefill_attention
    for options in (
        {"group": 3, "window": 20, "softcap": 3.0, "sinks": True},
        {"group": 2, "chunk": 24, "cache_dtype": torch.int8},
        {"group": 2, "window": 70},
        {"group": 1, "value_dim": 16},
    ):
        case = make_case([37, 1, 16, 110], [37, 1, 3, 70], num_kv_heads=1, key_dim=24, scale=0.5, **options)
        padding = torch.zeros_like(case.query[:2])
        query = torch.cat((case.query, padding))
        output = run(query, *case.values(_classes(load)), backend=_backend(load, backend))
        assert_attention_close(output, torch.cat((oracle(case), padding[..., :1].expand(-1, -1, output.shape[2]))))


def check_store(load: Callable[[str], Any], backend: str) -> None:
    """The same for store_kv, against one assignment per token."""
    run = load("store_kv").store_kv
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(9, 3, 24, generator=generator), torch.randn(9, 3, 16, generator=generator)
    # Scaled by one: a subnormal of float8, a tie of int8 and one of float8.
    key[:, :, 1], key[:, :, 2], key[:, :, 3] = 0.01, 2.5, 17.0
    slots = torch.randperm(20, generator=generator)[:9]
    slots[4] = -1
    for dtype, largest in ((torch.float32, None), (torch.int8, 127.0), (torch.float8_e4m3fn, 448.0)):
        key[:, :, 0] = largest or 1.0
        # A block before the cache catches what is written to slot -1.
        caches = [torch.zeros(6, 3, 4, dim).to(dtype)[1:] for dim in (24, 16)]
        scales = torch.zeros(2, 5, 3, 4)
        cache = _classes(load).LayerCache(*caches, *(scales if largest else ()))
        run(key, value, cache, slots, backend=_backend(load, backend))
        for tokens, cache, scale in zip((key, value), caches, scales, strict=True):
            expected, expected_scale = torch.zeros_like(cache), torch.zeros_like(scale)
            for token, slot in zip(tokens, slots.tolist(), strict=True):
                if slot >= 0:
                    factor = token.abs().amax(-1) / largest if largest else None
                    scaled = token / factor[:, None] if largest else token
                    scaled = scaled.round() if dtype == torch.int8 else scaled
                    expected[slot // 4, :, slot % 4] = scaled.to(dtype)
                    if largest:
                        expected_scale[slot // 4, :, slot % 4] = factor
            torch.testing.assert_close(cache.float(), expected.float(), rtol=0, atol=0)
            torch.testing.assert_close(scale, expected_scale)


def check_gated_delta(load: Callable[[str], Any], backend: str) -> None:
    """The same for gated_delta_update, against transformers."""
    run = load("gated_delta_update").gated_delta_update
    for normalises in (True, False):
        case = make_gated_delta()
        options = {"normalises": normalises, "backend": _backend(load, backend)}
        check_update(
            lambda case=case, options=options: run(*case, **options), case, expect_gated_delta(case, normalises)
        )


def check_selective(load: Callable[[str], Any], backend: str) -> None:
    """The same for selective_state_update, with steps as they come and with tiny ones of tokens that are large."""
    run = load("selective_state_update").selective_state_update
    for shift, size, softplus in ((-12, 1e5, True), (0, 1, False)):
        case = make_selective()
        dt = case.dt.abs() * (-1 if softplus else 1) + shift
        case = case._replace(x=case.x * size, dt=dt, dt_bias=case.dt_bias.abs())
        options = {"softplus": softplus, "backend": _backend(load, backend)}
        check_update(lambda case=case, options=options: run(*case, **options), case, expect_selective(case, softplus))
