"""StepCost: how long a step takes, by what it computes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from paged_backend.checks import checked_amount
from paged_backend.errors import ConfigError
from paged_backend.stats import StepStats

if TYPE_CHECKING:
    from paged_backend.engine.scheduler import ScheduledStep


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step: ``fixed_s``, and what each decode, prompt token and token of context adds.

    Context are the tokens whose keys and values the step's requests read, their own included.
    """

    fixed_s: float
    decode_s: float
    prefill_token_s: float
    context_token_s: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, checked_amount(field.name, getattr(self, field.name)))
        if not any(getattr(self, field.name) for field in fields(self)):
            raise ConfigError("a step must take time; give a fixed_s, decode_s or prefill_token_s above 0")

    def seconds(self, num_decodes: int, num_prefill_tokens: int, num_context_tokens: int = 0) -> float:
        """How long a step takes."""
        return (
            self.fixed_s
            + self.decode_s * num_decodes
            + self.prefill_token_s * num_prefill_tokens
            + self.context_token_s * num_context_tokens
        )

    def of(self, step: ScheduledStep) -> float:
        """How long a step takes that is planned and not committed."""
        num_context_tokens = 0
        if self.context_token_s:
            num_context_tokens = sum(r.num_computed_tokens + r.num_scheduled_tokens for r in step.requests)
        return self.seconds(len(step.decodes), step.num_prefill_tokens, num_context_tokens)

    def alone(self, num_prompt_tokens: int, num_output_tokens: int, num_others: int, budget: int) -> float:
        """How long a request takes that begins at once and decodes beside ``num_others`` others.

        budget: prompt tokens of a step, at most.
        """
        num_steps, end = -(-num_prompt_tokens // budget), num_prompt_tokens + num_output_tokens
        prefill_s = num_steps * self.seconds(num_others, 0) + self.prefill_token_s * num_prompt_tokens
        context_s = self.context_token_s * (num_prompt_tokens + end) / 2
        return prefill_s + (num_output_tokens - 1) * (self.seconds(1 + num_others, 0) + context_s)

    def to_json(self) -> str:
        """What ``from_json`` reads."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "step costs") -> StepCost:
        """The costs that ``to_json`` wrote; ConfigError, which names ``source``, for anything else."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{source}: not JSON ({error})") from error
        names = [field.name for field in fields(cls)]
        if not isinstance(values, Mapping) or not set(names[:3]) <= values.keys() <= set(names):
            raise ConfigError(f"{source}: must be a JSON object of {', '.join(names)} in seconds, got {values!r:.200}")
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error

    @classmethod
    def fit(cls, steps: Iterable[StepStats]) -> StepCost:
        """The costs that come nearest to what ``steps`` took, in least squares of seconds, none of them negative.

        Raises ConfigError when the steps are too few or too much alike to tell.
        """
        kept = [step for step in steps if step.num_decodes or step.num_prefill_tokens]
        columns = np.array(
            [[1, step.num_decodes, step.num_prefill_tokens, step.num_context_tokens] for step in kept], float
        ).reshape(-1, 4)
        seconds = np.array([step.forward_s + step.overhead_s for step in kept])
        if np.linalg.matrix_rank(columns) < 4:
            raise ConfigError(
                f"{len(kept)} steps do not tell the costs of decodes, prompt tokens and context apart; run requests of "
                "different lengths, different numbers of them at once"
            )
        used, costs = [0, 1, 2, 3], np.zeros(4)
        while used:
            # Columns of very different size are solved for at one scale.
            scale = np.abs(columns[:, used]).max(0)
            solution = np.linalg.lstsq(columns[:, used] / scale, seconds, rcond=None)[0] / scale
            if (solution >= 0).all():
                costs[used] = solution
                break
            # What would be below nothing costs nothing, the most negative first.
            del used[int(np.argmin(solution * scale))]
        return cls(*(float(cost) for cost in costs))


# Round numbers in seconds: of a model with 7 billion parameters on a large GPU, and of SmolLM2-135M on one CPU core.
PRESETS = {
    "gpu-7b": StepCost(0.008, 0.00025, 0.00005),
    "cpu-135m": StepCost(0.013, 0.001, 0.0013),
}


def step_cost(name: str) -> StepCost:
    """The preset of this name, or what the JSON file of this name holds. Raises ConfigError for neither, OSError."""
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if path.suffix != ".json" and not path.is_file():
        raise ConfigError(f"device {name!r} is unknown; choose from {', '.join(PRESETS)}, or give a JSON file of costs")
    return StepCost.from_json(path.read_text(encoding="utf-8-sig"), name)
