"""What a step costs, learned from the steps that ran: what deadline policies need to know."""

from __future__ import annotations

# How much the newest of many observations counts.
SMOOTHING = 0.1


class StepCost:
    """Seconds of a decode step and of a prompt token, as running means; 0 until a step of the kind was seen.

    Steps without prompts tell what a decode step takes; what others take beyond that is shared by their prompt tokens.
    """

    def __init__(self) -> None:
        self.decode_step_s = 0.0
        self.prompt_token_s = 0.0
        self._num_decode_steps = 0
        self._num_prompt_steps = 0

    def observe(self, num_decodes: int, num_prefill_tokens: int, seconds: float) -> None:
        """A step took this long."""
        if num_prefill_tokens:
            decoding = self.decode_step_s if num_decodes else 0.0
            self._num_prompt_steps += 1
            share = max(SMOOTHING, 1 / self._num_prompt_steps)
            self.prompt_token_s += share * (max(0.0, seconds - decoding) / num_prefill_tokens - self.prompt_token_s)
        elif num_decodes:
            self._num_decode_steps += 1
            share = max(SMOOTHING, 1 / self._num_decode_steps)
            self.decode_step_s += share * (seconds - self.decode_step_s)

    def seconds(self, num_prompt_tokens: float, num_decode_steps: float) -> float:
        """How long this takes for a request that never has to wait."""
        return num_prompt_tokens * self.prompt_token_s + num_decode_steps * self.decode_step_s
