"""ServedModel: the twin of a model, proven right, with the block size and the length that go with it, and its cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from paged_backend.config import EngineConfig, check_block_size
from paged_backend.engine.choices import Choices
from paged_backend.engine.executor import Executor
from paged_backend.errors import ConfigError, ContextOverflow, UnsupportedModel
from paged_backend.memory.block_manager import BlockManager
from paged_backend.memory.cache_sizing import (
    MAX_BLOCKS,
    blocks_for_config,
    blocks_for_lengths,
    seats_for_config,
    snapshots_for_config,
)
from paged_backend.memory.kv_cache import KVCache, group_layers
from paged_backend.memory.state_slots import SLOTS_PER_SEAT
from paged_backend.model.attention_backend import check_runs, what_computes
from paged_backend.model.attention_timing import AttentionTiming
from paged_backend.model.proof import prove
from paged_backend.model.runner import ModelRunner
from paged_backend.model.twin import Twin
from paged_backend.policies import BlockSize, ModelShape
from paged_backend.policy.policy_errors import FAILED, PolicyErrors, call, name_of
from paged_backend.request.request import Request
from paged_backend.stats import StateStats
from paged_backend.swaps.swaps import Swaps, swap_modules

# What a model without a stated length is taken to run at most, when its cache is sized.
DEFAULT_LENGTH = 2048
# Wall seconds of a measurement for a block-size rule, which takes some dozens of them while an engine is made.
TIME_LIMIT_S = 0.006
# An idle elastic engine whose cache is this many times too large gives the rest back.
SHRINK_FACTOR = 4


class ServedModel:
    """All of an engine that depends on the model; when the model changes, the engine makes another one.

    elastic: the cache grows with the requests that come, from nothing, instead of having a budget.
    max_model_len: most tokens of a request, None without a limit. num_seats: most requests that run at once.
    block_size, block_size_reason: tokens per block, and why so many, in words.
    kernels, faster: what computes, and what would be faster, as in `EngineStats`.

    Raises UnsupportedModel when the model cannot be proven right, ConfigError for options that do not go with it.
    """

    blocks: BlockManager
    runner: ModelRunner
    executor: Executor

    def __init__(
        self, model: Any, config: EngineConfig, choices: Choices, policy_errors: PolicyErrors, *, elastic: bool
    ) -> None:
        self.config = config
        self.choices = choices
        self.elastic = elastic
        self._policy_errors = policy_errors
        self.twin = Twin(model)
        self._devices = list(dict.fromkeys([self.twin.device, *(layer.device for layer in self.twin.layers)]))
        check_runs(choices.attention_backend, self._devices)
        self.swaps = self._swap(model)
        self.kernels, self.faster = what_computes(
            choices.attention_backend, self.twin.device, self.twin.dtype, config.quantize
        )
        self.max_model_len = self._length_limit()
        self.groups = group_layers(self.twin.layers, config.kv_torch_dtype)
        chosen = self._choose_block_size()
        self.block_size, self.block_size_reason = int(chosen), chosen.reason
        state_bytes = sum(spec.num_bytes for mixer in self.twin.mixers for spec in mixer.specs)
        # An elastic engine has room for whatever comes.
        self.num_seats = (
            config.max_num_seqs if elastic else seats_for_config(config, self.groups, state_bytes, self.twin.device)
        )
        self._num_snapshots = snapshots_for_config(config, self.groups, state_bytes, self.twin.device)
        self._state_bytes = self.num_seats * SLOTS_PER_SEAT * state_bytes

    def make_cache(self, num_blocks: Sequence[int] | None = None) -> None:
        """The cache, its books and what runs on it, all empty; ``num_blocks`` are those of an elastic cache before."""
        config, groups = self.config, self.groups
        if not self.elastic:
            num_blocks = blocks_for_config(
                config,
                groups,
                self.block_size,
                self.max_model_len or DEFAULT_LENGTH,
                self._devices,
                self._state_bytes,
            )
        elif num_blocks is None or len(num_blocks) != len(groups):
            num_blocks = [0] * len(groups)
        self.blocks = BlockManager(
            groups,
            num_blocks,
            self.block_size,
            self.num_seats,
            config.max_num_batched_tokens,
            [self.choices.make_eviction() for _ in groups],
            self._policy_errors,
            # Keys of a prefix may be others by the time that it comes again.
            enable_prefix_caching=config.enable_prefix_caching and self.twin.foreign_code is None,
            num_snapshots=self._num_snapshots,
        )
        try:
            cache = self._cache_of(num_blocks)
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(
                f"keys and values find no memory for {self._bytes_of(num_blocks):,} bytes; give a smaller "
                f"kv_cache_memory than {config.kv_cache_memory!r}: {error}"
            ) from error
        self.runner = ModelRunner(self.twin, cache, self.choices.attention_backend)
        # One pass reads the weights once, which is what a step costs on a CPU; a GPU prefers uniform batches.
        shared = config.batching == "shared" or (config.batching == "auto" and self.twin.device.type == "cpu")
        self.executor = Executor(self.runner, self.blocks, shared=shared)

    def drop_cache(self) -> list[int]:
        """Free the cache, without which no request can run; returns the blocks that it had per group."""
        self.runner.use_cache(self._cache_of([0] * len(self.groups)))
        self.runner.states.clear()
        return self.num_blocks

    def _cache_of(self, num_blocks: Sequence[int]) -> KVCache:
        return KVCache(self.twin.layers, self.groups, num_blocks, self.block_size, self.config.kv_torch_dtype)

    @property
    def num_blocks(self) -> list[int]:
        """Blocks of each KV group."""
        return [pool.num_blocks for pool in self.blocks.pools]

    def _swap(self, model: Any) -> Swaps:
        """Swap modules of the twin, and prove it right."""
        config, backend = self.config, self.choices.attention_backend
        if config.quantize:
            # Rounded weights give other logits, so everything else is proven before.
            prove(model, self.twin, backend)
        swaps = swap_modules(
            self.twin,
            optimize=config.optimize,
            quantize=config.quantize,
            backend=backend,
            kv_dtype=config.kv_torch_dtype,
        )
        if config.quantize:
            if not swaps.packed_bytes:
                raise ConfigError(f"quantize={config.quantize!r} cannot be had here: {swaps.refused}")
            return swaps
        try:
            prove(model, self.twin, backend)
        except UnsupportedModel as reason:
            if not swaps.made:
                raise
            swaps.undo(str(reason))
            prove(model, self.twin, backend)
        return swaps

    def _length_limit(self) -> int | None:
        hard, asked, why = self.twin.max_positions, self.config.max_model_len, self.twin.bound_reason
        if asked is not None and hard is not None and asked > hard:
            told = self.twin.why_positions_end
            reason = f" ({told})" if told else ""
            raise ConfigError(
                f"max_model_len={asked} is beyond the {hard} positions that the model has{reason}; lower it"
            )
        # Such a model may go by a token's place in the pack, which then must not be beyond its positions either.
        longest = self.config.max_num_batched_tokens + self.config.max_num_seqs
        if why and hard is not None and longest > hard:
            raise ConfigError(
                f"a step of max_num_batched_tokens={self.config.max_num_batched_tokens} and "
                f"max_num_seqs={self.config.max_num_seqs} may hold {longest} tokens, beyond the {hard} positions for "
                f"which the model is proven ({why}); lower them"
            )
        if asked is not None:
            return asked
        limits = [hard] if self.elastic else [hard, self.twin.advertised_positions]
        return min((limit for limit in limits if limit is not None), default=None)

    def _choose_block_size(self) -> BlockSize:
        rule, default = self.choices.block_size, EngineConfig.block_size
        if isinstance(rule, int):
            return BlockSize(rule, f"block_size={rule} was configured")
        if not self.twin.layers:
            # Nothing lies in blocks; they only say how far apart states of prefixes are kept.
            return BlockSize(default, "no layer attends, so there was nothing to choose by")
        layer, num_layers = self.twin.layers[0], len(self.twin.layers)
        timing = AttentionTiming(
            self.twin.layers,
            self.config.kv_torch_dtype,
            self.choices.attention_backend,
            time_limit_s=TIME_LIMIT_S,
        )
        shape = ModelShape(
            num_layers=num_layers,
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            key_dim=layer.key_dim,
            value_dim=layer.value_dim,
            dtype=layer.dtype,
            decode_seconds=lambda *case: timing.decode_seconds(*case) / num_layers,
            max_positions=self.max_model_len,
        )
        device = self.twin.device
        answer = call(self._policy_errors, rule, "block_size", lambda: rule(shape, device), may_take_long=True)
        failed = BlockSize(default, f"the rule {name_of(rule)} gave no size that can be used")
        if answer is FAILED:
            return failed
        try:
            size = check_block_size(answer, source="the answer")
        except ConfigError as error:
            self._policy_errors(rule, "block_size", f"{error}")
            return failed
        return answer if isinstance(answer, BlockSize) else BlockSize(size, f"the rule {name_of(rule)} chose it")

    def state_stats(self) -> StateStats | None:
        """The recurrent states as they are now, None where there are none."""
        books, cache, mode = self.blocks.states, self.runner.states, self.twin.state_mode
        if books is None or mode is None:
            return None
        return StateStats(
            mode=mode,
            num_layers=len(self.twin.mixers),
            bytes_per_slot=cache.bytes_per_slot,
            num_reserved_slots=cache.num_slots,
            num_held_slots=books.num_held,
            num_snapshots=books.num_kept,
            max_snapshots=books.num_snapshots,
            num_evictions=books.num_evictions,
        )

    # Room

    @property
    def seat_limit(self) -> str:
        """What allows ``num_seats`` and not more, in words."""
        if self.num_seats == self.config.max_num_seqs:
            return f"max_num_seqs is {self.num_seats}"
        return f"kv_cache_memory holds the states of {self.num_seats}"

    def runs_at_once(self, lengths: Sequence[int]) -> bool:
        """Whether requests of these lengths (prompt and output) can all run at the same time, if nothing else does."""
        if len(lengths) > self.num_seats:
            return False
        need, pools = self._blocks_for(lengths), self.blocks.pools
        return self.elastic or all(n <= p.num_blocks - p.num_pinned for n, p in zip(need, pools, strict=True))

    def fit(self, lengths: Sequence[int], *, is_idle: bool) -> None:
        """Size an elastic cache so that requests of these lengths run at once; an idle one may shrink."""
        if not self.elastic:
            return
        if not self.groups:
            if is_idle:
                self._shrink_states(len(lengths))
            return
        need = self._blocks_for(sorted(lengths, reverse=True)[: self.num_seats])
        have = self.num_blocks
        if any(n > h for n, h in zip(need, have, strict=True)):
            self._resize([max(n, h) for n, h in zip(need, have, strict=True)])
        elif is_idle and all(n * SHRINK_FACTOR < h for n, h in zip(need, have, strict=True)):
            self.blocks.reset()
            self.runner.states.clear()
            self._resize(need)

    def _shrink_states(self, num_requests: int) -> None:
        """Give the slots of states back when those that no prefix keeps are many more than so many requests take."""
        books, states = self.blocks.states, self.runner.states
        need = SLOTS_PER_SEAT * min(num_requests, self.num_seats)
        if books is not None and states.num_slots - books.num_kept > SHRINK_FACTOR * need:
            self.blocks.reset()
            states.clear()

    def make_room(self, request: Request, unfinished: Iterable[Request]) -> None:
        """Let an elastic cache grow, by half at least, until ``request`` and its forks can run beside ``unfinished``.

        Raises ContextOverflow when it cannot grow so far.
        """
        if not self.elastic:
            return
        others = [sample.max_num_tokens for sample in unfinished]
        lengths = [request.max_num_tokens] * request.num_seats
        if len(others) < self.num_seats:
            lengths += others
        elif self.blocks.shortage(request.max_num_tokens) is None:
            return
        need, have = self._blocks_for(lengths), self.num_blocks
        if any(n > h for n, h in zip(need, have, strict=True)):
            self._resize([max(n, min(h * 3 // 2, MAX_BLOCKS)) for n, h in zip(need, have, strict=True)])

    def _blocks_for(self, lengths: Sequence[int]) -> list[int]:
        return blocks_for_lengths(self.groups, self.block_size, self.config.max_num_batched_tokens, lengths)

    def _bytes_of(self, num_blocks: Sequence[int]) -> int:
        sizes = (group.bytes_per_token * self.block_size for group in self.groups)
        return sum(count * size for count, size in zip(num_blocks, sizes, strict=True))

    def _resize(self, num_blocks: Sequence[int]) -> None:
        try:
            if max(num_blocks) > MAX_BLOCKS:
                raise MemoryError(f"{max(num_blocks):,} blocks, and at most {MAX_BLOCKS:,} can be managed")
            cache = self.runner.kv_cache.resized(num_blocks, self.blocks.blocks_in_use())
        except (RuntimeError, MemoryError) as error:
            raise ContextOverflow(
                f"keys and values of all requests would need {self._bytes_of(num_blocks):,} bytes at once, which "
                "cannot be had; lower max_tokens (max_new_tokens in generate), or set kv_cache_memory, with which "
                f"requests that find no room wait: {error}"
            ) from error
        self.runner.use_cache(cache)
        self.blocks.resize(num_blocks)
