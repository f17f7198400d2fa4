"""prefill_attention: TFLOP/s against a large product, and times against other kernels."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from measure import Shape, against, describe, make_inputs, markdown, product_rate, seconds, tried
from peers import PEERS

from paged_backend.kernels import prefill_attention

SHAPES = [
    Shape(8, 4096, 4096),
    Shape(1, 4096, 4096),
    Shape(1, 32768, 32768),
    Shape(32, 512, 512),
    Shape(4, 16384, 512),
    Shape(8, 4096, 4096, num_heads=32, num_kv_heads=32),
    Shape(8, 4096, 4096, num_heads=14, num_kv_heads=2, head_dim=64),
    Shape(8, 4096, 4096, num_heads=16, num_kv_heads=8, head_dim=256),
    Shape(8, 4096, 4096, window=1024),
    Shape(8, 4096, 4096, cache_dtype=torch.int8),
    Shape(8, 4096, 4096, cache_dtype=torch.float8_e4m3fn),
]
HEADER = ["prefill", "us", "TFLOP/s", "of a product", *(f"against {name}" for name in PEERS)]


def operations(shape: Shape) -> int:
    """Floating-point operations of the two products, for the pairs of query and key that see each other."""
    positions = range(shape.context - shape.query_len, shape.context)
    window = shape.window or shape.context
    pairs = sum(min(position + 1, window) for position in positions)
    return 4 * shape.batch * shape.num_heads * shape.head_dim * pairs


def measure(shape: Shape, device: torch.device, multiplied: float, without: Sequence[str] = ()) -> list[str]:
    """One row of the table, with a dash for the peers named in `without`."""
    inputs = make_inputs(shape, device)
    arguments = (inputs.query, inputs.cache, inputs.sequences, inputs.variant)
    ours = seconds(lambda: prefill_attention(*arguments, backend="triton"), device)
    rate = operations(shape) / ours
    theirs = [
        "-" if name in without else tried(lambda peer=peer: peer(shape, inputs), device) for name, peer in PEERS.items()
    ]
    return [
        str(shape),
        f"{ours * 1e6:.1f}",
        f"{rate / 1e12:.0f}",
        f"{rate / multiplied:.0%}",
        *(against(ours, other) for other in theirs),
    ]


def main() -> None:
    """Print the table of SHAPES."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU, under TRITON_INTERPRET=1")
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.tiny else "cuda")
    multiplied = product_rate(device, torch.bfloat16)
    print(f"{describe(device)}; bfloat16 product {multiplied / 1e12:.3g} TFLOP/s\n")
    shapes = [shape.tiny() for shape in SHAPES] if arguments.tiny else SHAPES
    print(markdown(HEADER, [measure(shape, device, multiplied) for shape in shapes]))


if __name__ == "__main__":
    main()
