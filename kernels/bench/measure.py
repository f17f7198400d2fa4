"""What the benchmarks share: timing, the two yardsticks of a device, paged inputs, tables."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from paged_backend.kernels import FULL, AttentionVariant, LayerCache, MaskRule, Sequences, store_kv

SECONDS_FOR_NOTHING = 1e-9


@dataclass(frozen=True)
class Shape:
    """A batch of equal sequences; `context` counts the queries too."""

    batch: int
    context: int
    query_len: int = 1
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    window: int | None = None

    def __str__(self) -> str:
        parts = [f"{self.batch} x {self.context}"]
        if self.query_len > 1 and self.query_len != self.context:
            parts.append(f"last {self.query_len}")
        parts.append(f"heads {self.num_heads}/{self.num_kv_heads} x {self.head_dim}")
        parts.append(str(self.cache_dtype or self.dtype).removeprefix("torch."))
        if self.window:
            parts.append(f"window {self.window}")
        if self.block_size != 16:
            parts.append(f"block {self.block_size}")
        return ", ".join(parts)

    def tiny(self) -> Shape:
        """The same features at a size that Triton's interpreter gets through in a second."""
        context = 40 if self.query_len == self.context else 48
        query_len = 1 if self.query_len == 1 else min(self.query_len, 40)
        return replace(
            self,
            batch=2,
            context=context,
            query_len=query_len,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            dtype=torch.float32,
            window=20 if self.window else None,
        )


@dataclass(frozen=True)
class Inputs:
    """A shape's tensors: paged for our kernels and their peers, contiguous for torch's."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cache: LayerCache
    sequences: Sequences
    variant: AttentionVariant


def make_inputs(shape: Shape, device: torch.device) -> Inputs:
    """Draws keys and values, contiguous and in the shuffled blocks of a cache that holds the same."""
    torch.manual_seed(0)
    blocks_each = -(-shape.context // shape.block_size)
    num_blocks = shape.batch * blocks_each
    heads, dim = shape.num_kv_heads, shape.head_dim
    key, value = torch.randn(2, shape.batch, heads, shape.context, dim, device=device, dtype=shape.dtype)
    tables = torch.randperm(num_blocks, device=device).view(shape.batch, blocks_each)
    positions = torch.arange(shape.context, device=device)
    slots = tables[:, positions // shape.block_size] * shape.block_size + positions % shape.block_size
    cache_dtype = shape.cache_dtype or shape.dtype
    caches = [torch.zeros(num_blocks, heads, shape.block_size, dim, device=device).to(cache_dtype) for _ in range(2)]
    scales = []
    if cache_dtype.itemsize == 1:
        scales = [torch.zeros(num_blocks, heads, shape.block_size, device=device) for _ in range(2)]
    cache = LayerCache(*caches, *scales)
    for row in range(shape.batch):
        tokens = (tensor[row].transpose(0, 1) for tensor in (key, value))
        store_kv(*tokens, cache, slots[row], backend="reference")
    query = torch.randn(shape.batch * shape.query_len, shape.num_heads, dim, device=device, dtype=shape.dtype)
    sequences = Sequences(
        tables.int(),
        torch.full((shape.batch,), shape.context, device=device, dtype=torch.int32),
        shape.context,
        torch.arange(shape.batch + 1, device=device, dtype=torch.int32) * shape.query_len,
        shape.query_len,
    )
    mask = MaskRule("window", shape.window) if shape.window else FULL
    return Inputs(query, key, value, cache, sequences, AttentionVariant(dim**-0.5, mask))


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """Median time of a call with the GPU's cache flushed in between; on a CPU of one call, to show that it runs."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return max(do_bench(function, warmup=50, rep=200, return_mode="median") / 1e3, SECONDS_FOR_NOTHING)
    start = time.perf_counter()
    function()
    return max(time.perf_counter() - start, SECONDS_FOR_NOTHING)


def copy_rate(device: torch.device) -> float:
    """Bytes per second, read and written together, of a copy too large for any cache."""
    size = 1 << (30 if device.type == "cuda" else 20)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / statistics.median(seconds(lambda: target.copy_(source), device) for _ in range(3))


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a large square product."""
    n = 8192 if device.type == "cuda" else 128
    left, right = torch.randn(2, n, n, device=device).to(dtype)
    return 2 * n**3 / statistics.median(seconds(lambda: left @ right, device) for _ in range(3))


def tried(make: Callable[[], Callable[[], object]], device: torch.device) -> float | str:
    """Seconds of the call that `make` prepares, or why there are none: not installed, or not for this shape."""
    try:
        return seconds(make(), device)
    except ImportError:
        return "not installed"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:60] if str(error) else ''}".strip()


def against(ours: float, theirs: float | str) -> str:
    """How many times as fast as a peer we are, over one is faster; or why that is not known."""
    return theirs if isinstance(theirs, str) else f"{theirs / ours:.2f}x"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table in markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def describe(device: torch.device) -> str:
    """The device and the versions that a measurement belongs to."""
    import triton

    interpreted = "CPU, Triton's interpreter: times mean nothing"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else interpreted
    return f"{name}; torch {torch.__version__}, triton {triton.__version__}"
