"""Roofline: how long a step should take on a device, from what it computes and what it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paged_backend.checks import describe
from paged_backend.errors import ConfigError
from paged_backend.lab.compute import TokenCost
from paged_backend.lab.trace import TraceRequest

if TYPE_CHECKING:
    from paged_backend.engine.scheduler import ScheduledStep

# What products reach of a device's peak, what reading reaches of its bandwidth, and seconds that a step takes on top.
COMPUTE_SHARE, BANDWIDTH_SHARE, OVERHEAD_S = 0.5, 0.8, 0.002
# Of a device's memory, this share holds weights, keys and values.
MEMORY_SHARE = 0.9
# Of weights, keys and values.
_BYTES = 2


@dataclass(frozen=True)
class Device:
    """flops: 16-bit operations a second, dense. bandwidth: bytes a second. memory: bytes; as data sheets have them."""

    flops: float
    bandwidth: float
    memory: float


@dataclass(frozen=True)
class ModelSize:
    """num_weights: parameters. num_layers, num_heads, num_kv_heads, dim: of attention."""

    num_weights: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    dim: int

    @property
    def bytes_per_token(self) -> int:
        """Of keys and values."""
        return 2 * self.num_layers * self.num_kv_heads * self.dim * _BYTES

    @property
    def cost(self) -> TokenCost:
        """Operations of a token."""
        return TokenCost(2 * self.num_weights, 4.0 * self.num_layers * self.num_heads * self.dim)


DEVICES = {
    "a100": Device(312e12, 2.0e12, 80e9),
    "h100": Device(989e12, 3.35e12, 80e9),
    "h200": Device(989e12, 4.8e12, 141e9),
    "l4": Device(121e12, 0.3e12, 24e9),
    "mi300x": Device(1307e12, 5.3e12, 192e9),
}
MODELS = {
    "llama-7b": ModelSize(6.7e9, 32, 32, 32, 128),
    "llama-3-8b": ModelSize(8.0e9, 32, 32, 8, 128),
    "llama-13b": ModelSize(13.0e9, 40, 40, 40, 128),
}


@dataclass(frozen=True)
class Roofline:
    """A model on a device: a step takes the longer of computing and reading, and a little on top."""

    device: Device
    model: ModelSize

    @classmethod
    def of_name(cls, name: str) -> Roofline:
        """The one called ``device:model``. Raises ConfigError for what is not known."""
        device, _, model = name.partition(":")
        if device not in DEVICES or model not in MODELS:
            raise ConfigError(
                f"simulate={describe(name)} is unknown; give DEVICE:MODEL with a device of {', '.join(DEVICES)} and a "
                f"model of {', '.join(MODELS)}"
            )
        return cls(DEVICES[device], MODELS[model])

    def seconds(self, num_tokens: int, num_read: int, num_attended: int) -> float:
        """Of a step that feeds ``num_tokens``, which attend to ``num_attended`` in all, keys and values of ``num_read``
        tokens being read."""
        cost = self.model.cost
        computing = (cost.flops * num_tokens + cost.flops_per_context * num_attended) / self.device.flops
        reading = (self.model.num_weights * _BYTES + self.model.bytes_per_token * num_read) / self.device.bandwidth
        return max(computing / COMPUTE_SHARE, reading / BANDWIDTH_SHARE) + OVERHEAD_S

    def of(self, step: ScheduledStep) -> float:
        """Of a step that is planned and not committed."""
        num_tokens = num_read = num_attended = 0
        for request in step.requests:
            count = request.num_scheduled_tokens
            num_tokens += count
            num_read += request.num_computed_tokens + count
            num_attended += count * (2 * request.num_computed_tokens + count + 1) // 2
        return self.seconds(num_tokens, num_read, num_attended)

    def of_batch(self, batch: Sequence[TraceRequest]) -> list[float]:
        """Of each step of a padded batch: its prompts together, then a token of each row until the longest is done."""
        height, width = len(batch), max(len(request.prompt) for request in batch)
        longest = max(request.output_length for request in batch)
        steps = [self.seconds(height * width, height * width, height * width * (width + 1) // 2)]
        for step in range(1, longest):
            steps.append(self.seconds(height, height * (width + step), height * (width + step)))
        return steps

    def num_blocks(self, block_size: int) -> int:
        """Blocks for keys and values beside the weights."""
        room = MEMORY_SHARE * self.device.memory - self.model.num_weights * _BYTES
        if room <= 0:
            raise ConfigError("the model's weights do not fit on the device; choose a larger device")
        return int(room / (self.model.bytes_per_token * block_size))

    def least_seconds(self, num_output_tokens: float) -> float:
        """What so many tokens of a request take at least, for each reads all weights after the one before it."""
        return num_output_tokens * self.model.num_weights * _BYTES / self.device.bandwidth

    def assumptions(self) -> str:
        """In words."""
        device, model = self.device, self.model
        return (
            f"Assumed: {device.flops / 1e12:,.0f} TFLOP/s, of which products reach {COMPUTE_SHARE:.0%}; "
            f"{device.bandwidth / 1e12:.2f} TB/s, of which reading reaches {BANDWIDTH_SHARE:.0%}; "
            f"{model.num_weights / 1e9:.1f} billion weights and {model.bytes_per_token / 1024:.0f} KiB of keys and "
            f"values a token, in 16 bits; a step takes the longer of computing and reading, and "
            f"{OVERHEAD_S * 1000:g} ms on top."
        )
