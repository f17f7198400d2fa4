"""decode_attention: bytes of keys and values per second against a device copy, and times against other kernels."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from measure import Shape, against, copy_rate, describe, make_inputs, markdown, seconds, tried
from peers import PEERS

from paged_backend.kernels import decode_attention

SHAPES = [
    Shape(64, 4096),
    Shape(1, 4096),
    Shape(1, 131072),
    Shape(8, 32768),
    Shape(256, 1024),
    Shape(64, 4096, num_heads=32, num_kv_heads=32),
    Shape(64, 4096, num_heads=14, num_kv_heads=2, head_dim=64),
    Shape(64, 4096, num_heads=16, num_kv_heads=8, head_dim=256),
    Shape(64, 4096, window=1024),
    Shape(64, 4096, cache_dtype=torch.int8),
    Shape(64, 4096, cache_dtype=torch.float8_e4m3fn),
    Shape(64, 4096, block_size=32),
]
HEADER = ["decode", "us", "GB/s", "of a copy", *(f"against {name}" for name in PEERS)]


def bytes_read(shape: Shape) -> int:
    """Keys and values that the queries see, and the scales of quantised ones."""
    keys = min(shape.context, shape.window or shape.context)
    element = (shape.cache_dtype or shape.dtype).itemsize
    scales = 4 if element == 1 else 0
    return 2 * shape.batch * keys * shape.num_kv_heads * (shape.head_dim * element + scales)


def measure(shape: Shape, device: torch.device, copied: float, without: Sequence[str] = ()) -> list[str]:
    """One row of the table, with a dash for the peers named in `without`."""
    inputs = make_inputs(shape, device)
    arguments = (inputs.query, inputs.cache, inputs.sequences, inputs.variant)
    ours = seconds(lambda: decode_attention(*arguments, backend="triton"), device)
    rate = bytes_read(shape) / ours
    theirs = [
        "-" if name in without else tried(lambda peer=peer: peer(shape, inputs), device) for name, peer in PEERS.items()
    ]
    return [
        str(shape),
        f"{ours * 1e6:.1f}",
        f"{rate / 1e9:.0f}",
        f"{rate / copied:.0%}",
        *(against(ours, other) for other in theirs),
    ]


def main() -> None:
    """Print the table of SHAPES."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU, under TRITON_INTERPRET=1")
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.tiny else "cuda")
    copied = copy_rate(device)
    print(f"{describe(device)}; copy {copied / 1e9:.0f} GB/s\n")
    shapes = [shape.tiny() for shape in SHAPES] if arguments.tiny else SHAPES
    print(markdown(HEADER, [measure(shape, device, copied) for shape in shapes]))


if __name__ == "__main__":
    main()
