"""The load probe's proof: packed, chunked and decoded logits of the twin against the model's own lone forwards."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from paged_backend.errors import PluginError
from paged_backend.kernels import AUTO, FULL, Backend
from paged_backend.memory.kv_cache import KVCache, group_layers
from paged_backend.model.batch import build_batch
from paged_backend.model.layer_probe import Unprovable
from paged_backend.model.mixer import NATIVE, STEPPED
from paged_backend.model.model_copy import plain_model
from paged_backend.model.runner import ModelRunner
from paged_backend.model.state_probe import cache_of, run_with_cache
from paged_backend.model.state_spans import LoneSlots
from paged_backend.model.twin import Twin, logits_of, unsupported

_BLOCK_SIZE = 5
_LENGTHS = (23, 15)
_SHORTEST = 9
# A window or chunk up to this size is crossed by the proof; a longer one is only read from its mask.
_SMALL = 64
_RULED_OUT = 1e30
# The relative error that is rounding in float32.
_FINE = 1e-4
_CHUNKED = "chunked prefill"
# Measured on 18 families in half precision: chunks that read their state are at most 1.1 times as far from the model in
# one call as token by token, those that ignore it 7 times and more.
_MUCH_NEARER = 2
_NUM_PADDING = 5


def prove(model: PreTrainedModel, twin: Twin, backend: Backend = AUTO) -> None:
    """Check that ``twin`` gives the logits that ``model`` gives for each of two sequences alone.

    The sequences run packed in one prefill, then again in chunks and decodes that share passes, through shuffled
    blocks that hold NaN where nothing was stored; every token's logits are compared. ``model`` itself runs with its
    own attention, in eval mode, and is left as it was. A model that keeps recurrent state, and goes on from it wrongly
    with several tokens at once, is tried again with chunks that go on token by token; ``twin.state_mode`` says which.

    Raises UnsupportedModel with the numbers when they differ by more than rounding, and PluginError when functions of
    ``backend`` that a plugin brings fail.
    """
    try:
        _prove_in_some_mode(model, twin, backend)
    except Unprovable as reason:
        raise unsupported(plain_model(model), str(reason)) from None
    except PluginError:
        raise
    except Exception as error:
        raise unsupported(plain_model(model), f"the proof failed with {type(error).__name__}: {error}") from error


def _prove_in_some_mode(model: PreTrainedModel, twin: Twin, backend: Backend) -> None:
    sequences = _sequences(twin)
    expected = _lone_logits(model, twin, sequences)
    try:
        error = _prove(model, twin, backend, sequences, expected)
    except Exception:
        if twin.state_mode != NATIVE:
            raise
        twin.state_mode = STEPPED
        _prove(model, twin, backend, sequences, expected)
    else:
        if twin.state_mode == NATIVE and _tolerances(twin)[0] > 2 * _FINE:
            _step_where_nearer(model, twin, backend, sequences, expected, error)
    if twin.mixers:
        twin.masks_padding = _masks_padding(model, twin, sequences[-1], expected[-1])


def _step_where_nearer(
    model: PreTrainedModel,
    twin: Twin,
    backend: Backend,
    sequences: list[list[int]],
    expected: list[torch.Tensor],
    error: float,
) -> None:
    """Let chunks go on token by token where that is much nearer to the model than ``error``, in one call.

    What counts as rounding in half precision is more than a state that was ignored may make.
    """
    twin.state_mode = STEPPED
    try:
        stepped = _prove(model, twin, backend, sequences, expected)
    except Unprovable:
        stepped = math.inf
    if error <= _MUCH_NEARER * stepped + _tolerances(twin)[0] / 100:
        twin.state_mode = NATIVE


def _prove(
    model: PreTrainedModel, twin: Twin, backend: Backend, sequences: list[list[int]], expected: list[torch.Tensor]
) -> float:
    """The error of a typical token of a chunk that goes on; raises Unprovable unless all is as the model alone."""
    pool = _Pool(twin, [len(tokens) for tokens in sequences])
    runner = ModelRunner(twin, pool.kv_cache, backend)
    slots = LoneSlots(len(sequences))
    runner.states.grow(slots.num_slots)
    errors: dict[str, list[torch.Tensor]] = {}
    for blocks, steps in zip(pool.block_tables, (_packed(sequences), _chunked(sequences)), strict=True):
        slots.restart()
        for spans in steps:
            for index, logits in _run(runner, sequences, spans, blocks, slots):
                first, end = spans[index]
                stage = "decode" if end - first == 1 else _CHUNKED if first else "packed prefill"
                rows = _row_errors(logits, expected[index][first:end])
                # The model decoded the last token of each sequence with its own cache.
                known = len(sequences[index]) - 1 - first
                errors.setdefault(stage, []).append(rows[:known])
                errors.setdefault("decode as with the model's own cache", []).append(rows[known:])
    hint = "" if backend is AUTO else f"; its attention ran on attention_backend={backend.name!r}"
    if "position_ids" not in inspect.signature(plain_model(model).forward).parameters:
        hint += "; its forward takes no position_ids"
    if twin.foreign_code is not None:
        hint += f"; {twin.foreign_code} takes part, which sees packed tokens of several requests, [1, num_tokens, ...]"
        shortest = min(map(len, sequences))
        together = _logits_of_rows(model, twin, [tokens[:shortest] for tokens in sequences])
        errors["a batch of rows"] = [_row_errors(a, b[:shortest]) for a, b in zip(together, expected, strict=True)]
    for stage, parts in errors.items():
        _judge(stage, torch.cat(parts), _tolerances(twin), hint)
    return torch.cat(errors[_CHUNKED]).median().item()


def _sequences(twin: Twin) -> list[list[int]]:
    small = max((layer.rule.size for layer in twin.layers if layer.rule.size <= _SMALL), default=0)
    lengths = [length + 2 * small for length in _LENGTHS]
    if twin.max_positions is not None:
        lengths = [min(length, twin.max_positions) for length in lengths]
        if min(lengths) < _SHORTEST:
            raise Unprovable(f"its positions end at {twin.max_positions}, too few for a proof")
    return [twin.sample_token_ids(length, seed) for seed, length in enumerate(lengths)]


def _packed(sequences: list[list[int]]) -> list[list[tuple[int, int]]]:
    return [[(0, len(tokens)) for tokens in sequences]]


def _chunked(sequences: list[list[int]]) -> list[list[tuple[int, int]]]:
    """Steps in which chunks of either sequence meet chunks and single tokens of the other; the last two decode both."""
    a, b = map(len, sequences)
    cuts = (
        np.cumsum([0, a - 3 - a // 3 - a // 4, a // 3, 1, a // 4, 1, 1]).tolist(),
        np.cumsum([0, b // 3, 1, b - 4 - b // 3, 1, 1, 1]).tolist(),
    )
    return [[(cut[step], cut[step + 1]) for cut in cuts] for step in range(6)]


class _Pool:
    """A small private block pool, and for each of two passes over the sequences the block table of each group."""

    def __init__(self, twin: Twin, lengths: list[int]) -> None:
        groups = group_layers(twin.layers)
        counts = [-(-length // _BLOCK_SIZE) for length in lengths]
        num_blocks = 2 * sum(counts) + 1
        self.kv_cache = KVCache(twin.layers, groups, [num_blocks] * len(groups), _BLOCK_SIZE)
        for layer in self.kv_cache.layers:
            for tensor in layer.tensors():
                tensor.fill_(torch.nan)
        rng = np.random.default_rng(0)
        self.block_tables: list[list[np.ndarray]] = [[], []]
        for _ in groups:
            shuffled = iter(rng.permutation(num_blocks))
            for tables in self.block_tables:
                table = np.full((len(counts), max(counts)), -1, np.int32)
                for row, count in zip(table, counts, strict=True):
                    row[:count] = [next(shuffled) for _ in range(count)]
                tables.append(table)


def _run(
    runner: ModelRunner,
    sequences: list[list[int]],
    spans: list[tuple[int, int]],
    tables: list[np.ndarray],
    slots: LoneSlots,
) -> Iterator[tuple[int, torch.Tensor]]:
    """One forward pass over a span of each sequence; yields each sequence's logits ``[num_tokens, vocab_size]``."""
    decodes = [index for index, (first, end) in enumerate(spans) if first and end - first == 1]
    chunks = [index for index in range(len(spans)) if index not in decodes]
    order = decodes + chunks
    batch = build_batch(
        [sequences[index][spans[index][0]] for index in decodes],
        [spans[index][0] for index in decodes],
        [sequences[index][slice(*spans[index])] for index in chunks],
        [spans[index][0] for index in chunks],
        [True] * len(chunks),
        [table[order] for table in tables],
        runner.kv_cache.block_size,
        runner.twin.device,
        spans=slots.spans(decodes, chunks, [spans[index][1] - spans[index][0] for index in chunks]),
    )
    every_row = torch.arange(batch.num_tokens, device=runner.twin.device)
    logits = runner.forward(dataclasses.replace(batch, logits_rows=every_row))
    sizes = [spans[index][1] - spans[index][0] for index in order]
    yield from zip(order, logits.split(sizes), strict=True)


def _lone_logits(model: PreTrainedModel, twin: Twin, sequences: list[list[int]]) -> list[torch.Tensor]:
    """The model's own logits: of each sequence in one forward pass but for the last token, decoded with its cache."""
    plain = plain_model(model)
    with _untouched(plain, twin), torch.no_grad():
        try:
            return [_own_logits(plain, torch.tensor([tokens], device=twin.device), twin) for tokens in sequences]
        except Unprovable:
            raise
        except Exception as error:
            raise Unprovable(f"it does not run with its own cache: {error}") from error


def _own_logits(plain: torch.nn.Module, ids: torch.Tensor, twin: Twin) -> torch.Tensor:
    output = run_with_cache(plain, ids[:, :-1])
    cache = cache_of(output)
    if cache is None:
        return logits_of(plain(input_ids=ids, use_cache=False))
    _check_cache(cache, twin)
    last = run_with_cache(plain, ids[:, -1:], ids.shape[1] - 1, cache)
    return torch.cat([logits_of(output), logits_of(last)])


def _masks_padding(model: PreTrainedModel, twin: Twin, tokens: list[int], expected: torch.Tensor) -> bool:
    """Whether the model's own states stay as they were while it reads padding on the left, as ``generate`` gives it."""
    plain = plain_model(model)
    ids = torch.tensor([[tokens[0]] * _NUM_PADDING + tokens], device=twin.device)
    mask = torch.ones_like(ids)
    mask[:, :_NUM_PADDING] = 0
    kwargs: dict[str, Any] = {"attention_mask": mask, "use_cache": True}
    if "position_ids" in inspect.signature(plain.forward).parameters:
        kwargs["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
    with _untouched(plain, twin), torch.no_grad():
        errors = _row_errors(logits_of(plain(input_ids=ids, **kwargs))[_NUM_PADDING:], expected)
    typical, largest = _tolerances(twin)
    return bool(errors.median() <= typical and errors.max() <= largest)


def _logits_of_rows(model: PreTrainedModel, twin: Twin, rows: list[list[int]]) -> list[torch.Tensor]:
    """The model's own logits of rows of one length in one forward pass, which code of the user's own may tell apart."""
    plain = plain_model(model)
    with _untouched(plain, twin), torch.no_grad():
        output = plain(input_ids=torch.tensor(rows, device=twin.device), use_cache=False)
        return list(output[0] if isinstance(output, tuple) else output.logits)


def _check_cache(cache: Any, twin: Twin) -> None:
    """Stock ``generate`` must not forget what a layer's mask shows, even where the proof is too short to tell."""
    own = getattr(cache, "layers", ())
    for index, layer in zip(twin.layer_indices, twin.layers, strict=True):
        kept = getattr(own[index], "sliding_window", None) if index is not None and index < len(own) else None
        if kept is not None and (layer.rule == FULL or kept < layer.rule.size):
            raise Unprovable(f"the mask of {layer.name} is {layer.rule}, but the model's own cache keeps {kept} tokens")


@contextmanager
def _untouched(model: torch.nn.Module, twin: Twin) -> Iterator[None]:
    """Eval mode without compilation inside; afterwards flags, attributes, buffers and random state are as before."""
    modules = list(model.modules())
    attributes = [dict(module.__dict__) for module in modules]
    buffers = [
        {
            name: (buffer, buffer.clone())
            for name, buffer in module._buffers.items()
            if buffer is not None and name in module._non_persistent_buffers_set
        }
        for module in modules
    ]
    devices = {layer.device for layer in twin.layers if layer.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        try:
            for module in modules:
                module.training = False
                # Compiling would take far longer than the proof.
                module.__dict__["_compiled_call_impl"] = None
                forward = module.__dict__.get("forward")
                if forward is not None:
                    module.__dict__["forward"] = getattr(forward, "_torchdynamo_orig_callable", forward)
            yield
        finally:
            for module, before, contents in zip(modules, attributes, buffers, strict=True):
                for name in module.__dict__.keys() - before.keys():
                    del module.__dict__[name]
                for name, value in before.items():
                    if module.__dict__.get(name) is not value:
                        module.__dict__[name] = value
                for name, (buffer, content) in contents.items():
                    module._buffers[name] = buffer
                    if not torch.equal(buffer, content):
                        buffer.copy_(content)


def _row_errors(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Per token, the distance between the logits as a share of how far the expected ones spread from their mean.

    Tokens that the model rules out have logits of minus infinity or the like, which must only be the same ones.
    """
    logits, expected = logits.double(), expected.double()
    usual = expected.abs() < _RULED_OUT
    mean = expected.where(usual, 0).sum(-1, keepdim=True) / usual.sum(-1, keepdim=True)
    spread = (expected - mean).where(usual, 0).norm(dim=-1)
    errors = (logits - expected).where(usual, 0).norm(dim=-1) / spread
    sound = (usual == (logits.abs() < _RULED_OUT)).all(-1) & ~logits.isnan().any(-1)
    return errors.where(sound, torch.inf)


def _judge(stage: str, errors: torch.Tensor, tolerances: tuple[float, float], hint: str) -> None:
    typical, largest = tolerances
    median, worst = errors.median().item(), errors.max().item()
    # Written so that NaN fails.
    if not (median <= typical and worst <= largest):
        raise Unprovable(
            f"{stage} gives other logits than the model alone: relative error {median:.1e} in the median of "
            f"{errors.numel()} tokens (at most {typical:.0e} is rounding), {worst:.1e} in the worst "
            f"(at most {largest:.0e}){hint}"
        )


def _tolerances(twin: Twin) -> tuple[float, float]:
    """The relative error of a token's logits that is rounding, in the median token and in the worst.

    Measured: tiny models and SmolLM2-135M stay below 6e-6 and 2e-5 in float32, 1e-2 and 3e-2 in float16, 8e-2 and
    2e-1 in bfloat16; a scale 5 % off gives 2e-4 or more even under initial weights, a wrong window or position 0.2 to
    1.4. Where experts are chosen per token, rounding may tip a choice: that token, and a little those that see it,
    then differ without bound, though 1.4 is the distance of unrelated logits.
    """
    typical = _FINE
    precision = torch.get_float32_matmul_precision()
    if twin.dtype == torch.float16 or (twin.dtype == torch.float32 and precision == "high"):
        typical = 0.03
    elif twin.dtype not in (torch.float32, torch.float64) or precision == "medium":
        typical = 0.25
    config = vars(twin.module.config.get_text_config(decoder=True))
    routed = any("expert" in name and isinstance(value, int) and value > 1 for name, value in config.items())
    return (2 * typical, 1.5) if routed else (typical, 3 * typical)
