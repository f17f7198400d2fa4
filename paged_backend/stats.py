"""Numbers about a step, about memory, and about an engine since it started."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class GroupStats:
    """One KV group's memory, in slots: what one token takes in the group's layers, ``bytes_per_token`` bytes.

    reserved: all slots of the pool. allocated: slots of the blocks that requests own. filled: allocated slots with a
    token in them. wasted: allocated minus filled. cached: slots of unused blocks kept for reuse. The rest is free.
    mean_*: the time-weighted mean since the engine started; peak: the highest value at the end of a step.
    """

    rule: str
    num_layers: int
    block_size: int
    num_blocks: int
    num_owned_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    num_filled_slots: int
    bytes_per_token: int
    num_evictions: int
    mean_allocated_slots: float = 0.0
    mean_filled_slots: float = 0.0
    mean_cached_slots: float = 0.0
    peak_allocated_slots: int = 0

    @property
    def num_reserved_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_allocated_slots(self) -> int:
        return self.num_owned_blocks * self.block_size

    @property
    def num_cached_slots(self) -> int:
        return self.num_cached_blocks * self.block_size

    @property
    def num_wasted_slots(self) -> int:
        return self.num_allocated_slots - self.num_filled_slots

    @property
    def mean_wasted_slots(self) -> float:
        return self.mean_allocated_slots - self.mean_filled_slots


@dataclass(frozen=True)
class StateStats:
    """The recurrent states of a model that has some, in slots: one sequence's state of all layers.

    mode: how a prompt goes on from a state that is there: ``native`` with many tokens at once, ``stepped`` token by
        token, which is slow for long prompts that share a beginning or do not fit one step.
    num_reserved_slots: those there is memory for; num_held_slots: those that requests and snapshots use.
    num_snapshots, max_snapshots: prefixes that keep their state, and how many may; num_evictions: those that lost it.
    """

    mode: str
    num_layers: int
    bytes_per_slot: int
    num_reserved_slots: int
    num_held_slots: int
    num_snapshots: int
    max_snapshots: int
    num_evictions: int


@dataclass(frozen=True)
class StepStats:
    """One step. Times are seconds of the engine's clock, durations wall seconds.

    num_context_tokens: the tokens whose keys and values its requests read, their own of this step included.
    """

    step: int
    time: float
    num_waiting: int
    num_running: int
    num_decodes: int
    num_prefill_tokens: int
    num_context_tokens: int
    num_new_tokens: int
    num_finished: int
    num_preempted: int
    schedule_s: float
    batch_s: float
    forward_s: float
    sample_s: float
    update_s: float

    @property
    def overhead_s(self) -> float:
        """What the step took beside the forward pass."""
        return self.schedule_s + self.batch_s + self.sample_s + self.update_s


@dataclass(frozen=True)
class EngineStats:
    """An engine since it started. Token counts are per request token, not per layer.

    num_prompt_tokens: of the requests that began to run, each prompt once, whether it was computed, found in the cache
        or computed again.
    num_prefill_tokens: those that were computed, and computed again.
    num_cached_tokens, num_recomputed_tokens: those found in the cache, and those computed again.
    reserved_bytes, peak_allocated_bytes: of keys and values. waste: the time-weighted share of allocated slots that no
        token filled. states: recurrent states, None of a model without.
    block_size_reason: why blocks are as large as they are, in words: what was measured, or who said so.
    swaps_made, swaps_refused, packed_bytes: see `Swaps`.
    kernels: what computes: ``C++ (avx2)``, by the processor's level, ``plain torch``, ``triton`` or a plugin's backend.
    faster: what would be faster on this machine, in words; nothing where nothing is known.
    weight_bytes: of the model's own weights, by what they are stored in: a dtype, or a type of GGUF files.
    weights_widened: those that were to be kept in the few bits of a GGUF file and were not, by name, and why.
    """

    num_waiting: int
    num_running: int
    num_finished: int
    num_steps: int
    num_prompt_tokens: int
    num_prefill_tokens: int
    num_generated_tokens: int
    num_cached_tokens: int
    num_prefix_hits: int
    num_preemptions: int
    num_recomputed_tokens: int
    peak_running: int
    reserved_bytes: int
    peak_allocated_bytes: int
    waste: float
    groups: tuple[GroupStats, ...]
    policy_errors: dict[str, int] = field(default_factory=dict)
    swaps_made: dict[str, int] = field(default_factory=dict)
    swaps_refused: dict[str, str] = field(default_factory=dict)
    packed_bytes: int = 0
    weight_bytes: dict[str, int] = field(default_factory=dict)
    weights_widened: dict[str, str] = field(default_factory=dict)
    states: StateStats | None = None
    block_size_reason: str = ""
    kernels: str = ""
    faster: tuple[str, ...] = ()
