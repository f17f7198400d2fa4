"""Engine: adds requests, runs steps, hands out results; the only place that wires the parts together."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import Tensor
from tqdm import tqdm

from paged_backend.attention import add_backend, check_backend
from paged_backend.block_manager import BlockManager
from paged_backend.cache_sizing import blocks_for_budget, blocks_for_lengths, budget_bytes
from paged_backend.config import EngineConfig, check_block_size
from paged_backend.decode_timing import decode_seconds
from paged_backend.detokenizer import tokenizer_lock
from paged_backend.errors import (
    ConfigError,
    ContextOverflow,
    EngineClosed,
    PluginError,
    QueueFull,
    RequestRefused,
    UnsupportedModel,
)
from paged_backend.executor import Executor
from paged_backend.intake import Prompt, as_prompts, check_prompt_embeds, moment, prompt_token_ids, sampling_params
from paged_backend.kv_cache import KVCache, group_layers
from paged_backend.load_probe import prove
from paged_backend.lockstep import HeldRows, Lockstep
from paged_backend.memory_report import explain_memory
from paged_backend.model_runner import ModelRunner
from paged_backend.plugin_manager import PluginManager
from paged_backend.policies import ModelShape
from paged_backend.policy_errors import FAILED, PolicyErrors, call
from paged_backend.policy_guard import PolicyGuard
from paged_backend.request import FinishReason, Request, RequestOutput
from paged_backend.sampler import Sampler
from paged_backend.sampling_params import SamplingParams
from paged_backend.scheduler import ScheduledStep, Scheduler
from paged_backend.stats import EngineStats, StatsRecorder, Stopwatch
from paged_backend.stopping import check_stop, finish_reason
from paged_backend.structured import check_constraint
from paged_backend.swaps import Swaps, swap_modules
from paged_backend.twin import Twin

logger = logging.getLogger("paged_backend")

# What a model without a stated length is taken to run at most, when its cache is sized.
DEFAULT_LENGTH = 2048
# An idle elastic engine whose cache is this many times too large gives the rest back.
SHRINK_FACTOR = 4


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _alone(
    method: Callable[Concatenate[Engine, Arguments], Result],
) -> Callable[Concatenate[Engine, Arguments], Result]:
    """What changes the engine runs alone: policies, hooks and processors, which run inside, must not call it."""

    @wraps(method)
    def run(self: Engine, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        self._check_open()
        self._busy = True
        try:
            return method(self, *args, **kwargs)
        finally:
            self._busy = False

    return run


class Engine:
    """Runs requests for one model through one continuously changing batch. Single-threaded.

    model: a decoder-only transformers model; it is never changed, and may be used at the same time.
    tokenizer: needed for text prompts, text output and stop strings.
    config: an EngineConfig or a mapping of its fields; keyword arguments replace single fields.
    plugins: modules or objects with hooks, on top of the installed ones.
    clock: seconds, monotonic; every deadline and time limit is read from it.
    elastic: size the cache by the requests that come (as ``generate`` does) instead of by a budget.

    Raises UnsupportedModel when the load probe cannot prove that the model runs right on paged attention.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        config: EngineConfig | Mapping[str, Any] | None = None,
        *,
        plugins: Sequence[Any] = (),
        clock: Callable[[], float] = time.monotonic,
        elastic: bool = False,
        **options: Any,
    ) -> None:
        self.config = EngineConfig.from_options(config, **options)
        self.tokenizer = tokenizer
        self.clock = clock
        self._closed = False
        self._busy = False
        self._kept_model: Any = None
        self._plugins = PluginManager(plugins)
        self._policy_errors = PolicyErrors(self.config.strict_policies)
        self._use_attention_backend()
        policy = self._plugins.scheduler(self.config.scheduler, self.config.scheduler_options)
        self._guard = PolicyGuard(policy, self._policy_errors)
        self._elastic = elastic and self.config.kv_cache_memory is None
        self._model = weakref.ref(model)
        self._load(model)
        self.scheduler = Scheduler(self.blocks, self._guard, self.config.max_num_batched_tokens)
        self.eos_token_ids = _eos_token_ids(model)
        self.sampler = Sampler(self.eos_token_ids, self.config.seed, tokenizer)
        self._held = HeldRows()
        self._requests: dict[str, list[Request]] = {}
        self._pins: dict[tuple[str | None, tuple[int, ...]], None] = {}
        self._orders = itertools.count()
        self._time_limits: list[tuple[float, int, Request]] = []
        self._ended: deque[RequestOutput] = deque()
        self._stats = StatsRecorder()
        self._notify("engine_started", engine=self)
        self._policy_errors.raise_first()

    @classmethod
    def from_pretrained(
        cls, name_or_path: str, *, model_kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> Engine:
        """An engine for a model folder or hub id, its tokenizer included.

        ``model_kwargs`` go to ``AutoModelForCausalLM.from_pretrained`` (``dtype``, ``device_map``, ``gguf_file``, ...).
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        kwargs = dict(model_kwargs or {})
        names = ("gguf_file", "revision", "token", "trust_remote_code", "subfolder", "cache_dir", "local_files_only")
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, **{k: v for k, v in kwargs.items() if k in names})
        model = AutoModelForCausalLM.from_pretrained(name_or_path, **kwargs)
        engine = cls(model, tokenizer, **options)
        engine._kept_model = model
        return engine

    # Requests

    @_alone
    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
        client_id: str | None = None,
        cache_salt: str | None = None,
        stop_condition: Callable[[Request], bool] | None = None,
        metadata: Any = None,
        lockstep: Lockstep | None = None,
        prompt_embeds: Tensor | None = None,
    ) -> str:
        """Queue a prompt (text, token ids, or a 1-D tensor of them); returns the request's id.

        deadline_s: seconds from now by which the caller would like it finished; policies may order by it.
        timeout_s: seconds from now after which it ends with ``"timeout"``, wherever it is.
        queue_timeout_s: seconds from now after which it ends with ``"timeout"`` if it has not begun to run.
        client_id: for policies that share out service. cache_salt: prefixes are shared only under an equal salt.
        stop_condition: called with the Request after each token; True ends it with ``"stop"``.
        lockstep: shared by requests that choose each token together. metadata: anything, for the caller and policies.
        prompt_embeds: [num_prompt_tokens, D] floats that the model is fed in place of the prompt's tokens, which then
        only tell penalties and processors what was said; prefixes of such a prompt are not shared.

        Raises RequestRefused (ContextOverflow when it could never fit) and leaves everything as it was.
        """
        self._refresh()
        request = self.prepare(
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            deadline_s=deadline_s,
            timeout_s=timeout_s,
            queue_timeout_s=queue_timeout_s,
            client_id=client_id,
            cache_salt=cache_salt,
            stop_condition=stop_condition,
            metadata=metadata,
            lockstep=lockstep,
            prompt_embeds=prompt_embeds,
        )
        self.check_queue()
        self._queue(request)
        return request.request_id

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        deadline_s: float | None = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
        **options: Any,
    ) -> Request:
        """A checked request for ``enqueue``, from the arguments of ``add_request``. Any thread may call this."""
        self._check_not_closed()
        lockstep = options.get("lockstep")
        if lockstep is not None and not isinstance(lockstep, Lockstep):
            raise RequestRefused(f"lockstep must be a Lockstep that its requests share, or None, got {lockstep!r:.80}")
        now = self.clock()
        return self._build(
            prompt,
            params,
            now,
            deadline=moment(now, "deadline_s", deadline_s),
            time_limit=moment(now, "timeout_s", timeout_s),
            queue_limit=moment(now, "queue_timeout_s", queue_timeout_s),
            **options,
        )

    @_alone
    def enqueue(self, request: Request) -> None:
        """Queue a request that ``prepare`` built; its deadlines count from then, and ``max_waiting`` is not looked at.

        Raises RequestRefused when a plugin refuses it or its id is taken.
        """
        self._refresh()
        self._check_id(request.request_id)
        self._queue(request)

    def _queue(self, request: Request) -> None:
        self._admit_by_hook(request)
        self._policy_errors.raise_first()
        self._make_room_for(request)
        self._requests[request.request_id] = [request, *request.forks]
        if request.lockstep is not None:
            request.lockstep.members += [request, *request.forks]
        self._limit_time(request)
        self.scheduler.add(request, self.clock())
        self._notify("request_added", request=request.view)

    @_alone
    def abort(self, request_id: str) -> bool:
        """End a request, wherever it is, with ``"abort"``; its outputs come with the next step. False if it is over."""
        samples = self._requests.get(request_id)
        if not samples:
            return False
        for request in list(samples):
            self._end(request, "abort")
        return True

    def outputs(self, request_id: str) -> list[RequestOutput]:
        """The outputs of an unfinished request, one per sample, which fill up as it runs; empty once it is over."""
        return [request.output for request in self._requests.get(request_id, ())]

    def has_unfinished_requests(self) -> bool:
        """Whether a further ``step`` has something to do or to hand out."""
        return bool(self._requests or self._ended)

    @_alone
    def step(self, *, drain: bool = False) -> list[RequestOutput]:
        """Run one step; returns the outputs that got a token or ended since the last one.

        A request that fails (its forward pass, its processors, its stop rule) ends with ``"error"`` alone.
        drain: nothing more will be added for now, so a policy that holds requests back to batch them is not waited for.
        Without it such a step does nothing, and ``held_until`` says when to come back.
        """
        try:
            outputs = self._step(drain)
        except BaseException:
            self.scheduler.restart(self.clock())
            raise
        try:
            self._policy_errors.raise_first()
        except PluginError:
            self._ended.extend(output for output in outputs if output.finished)
            raise
        return outputs

    def _step(self, drain: bool) -> list[RequestOutput]:
        watch, started = Stopwatch(), self.clock()
        self._expire(started)
        step = self.scheduler.schedule(started, drain=drain)
        watch.lap("schedule")
        logits, failures = self.executor.run(step, watch)
        rows, num_prefill_tokens = step.sampling, step.num_prefill_tokens
        logits, rows = self._held.join(logits, rows)
        sampled = self.sampler.sample(logits, rows) if logits is not None else None
        watch.lap("sample")
        now = self.clock()
        self.scheduler.commit(step, now)
        outputs = self._deliver(rows, sampled, now)
        for request, error in failures.items():
            self._fail(request, error)
        outputs.extend(self._ended)
        self._ended.clear()
        watch.lap("update")
        self._close_step(step, num_prefill_tokens, outputs, watch, now)
        return outputs

    @_alone
    def settle(self) -> list[RequestOutput]:
        """The outputs that ended since the last step, those past their time limit included, without running a step."""
        self._expire(self.clock())
        outputs = list(self._ended)
        self._ended.clear()
        self._stats.num_finished += len(outputs)
        return outputs

    @property
    def next_time_limit(self) -> float | None:
        """When the next request may have to end with ``"timeout"``, in seconds of the engine's clock."""
        return self._time_limits[0][0] if self._time_limits else None

    @property
    def held_until(self) -> float | None:
        """When to ``step`` again if the scheduling policy holds everybody back until then, else None."""
        if self.scheduler.held_until is None or self._ended or not self.scheduler.num_waiting:
            return None
        return min([self.scheduler.held_until, *(moment for moment, _, _ in self._time_limits[:1])])

    @_alone
    def pin_prefix(self, prompt: Prompt, *, cache_salt: str | None = None) -> int:
        """Keep this beginning of prompts in the cache, from when it is next computed until ``unpin_prefix``.

        Returns how many of its tokens stay: its full blocks. Raises RequestRefused when it fills no block, when pinned
        prefixes would take more than half of the cache, or when a request that is unfinished could not fit any more;
        ConfigError when the engine keeps no prefixes or is sized by its requests.
        """
        if self._elastic or not self.config.enable_prefix_caching:
            raise ConfigError("pin_prefix needs enable_prefix_caching and a cache of fixed size; set kv_cache_memory")
        token_ids = prompt_token_ids(prompt, self.tokenizer, self.twin.vocab_size)
        num_tokens = self.blocks.pin(token_ids, cache_salt)
        longest = max((sample.max_num_tokens for s in self._requests.values() for sample in s), default=0)
        shortage = self.blocks.shortage(longest)
        if shortage is not None:
            self.blocks.unpin(token_ids, cache_salt)
            raise RequestRefused(f"an unfinished request could not fit beside the pinned prefix: {shortage}")
        self._pins[cache_salt, tuple(token_ids)] = None
        return num_tokens

    @_alone
    def unpin_prefix(self, prompt: Prompt, *, cache_salt: str | None = None) -> bool:
        """Take back ``pin_prefix``; False if this prefix is not pinned."""
        token_ids = prompt_token_ids(prompt, self.tokenizer, self.twin.vocab_size)
        self._pins.pop((cache_salt, tuple(token_ids)), None)
        return self.blocks.unpin(token_ids, cache_salt)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Mapping[str, Any] | Sequence[Any] | None = None,
        *,
        progress: bool = False,
        **request_options: Any,
    ) -> list[RequestOutput]:
        """Run prompts to their end; one RequestOutput per prompt and sample, in the order given.

        ``params`` is for all prompts, or a sequence of one each. ``progress`` shows a bar. Other requests of the engine
        go on meanwhile. A prompt that is refused raises before any is queued. Interrupted, it aborts its own requests.
        """
        self._check_open()
        many = as_prompts(prompts)
        each: list[Any] = list(params) if isinstance(params, (list, tuple)) else [params] * len(many)
        if len(each) != len(many):
            raise RequestRefused(f"{len(many)} prompts came with {len(each)} sampling params; give one, or one each")
        self._refresh()
        for index, (prompt, p) in enumerate(zip(many, each, strict=True)):
            try:
                self._build(prompt, p, self.clock(), order=-1)
            except (RequestRefused, ConfigError) as error:
                raise type(error)(f"prompt {index}: {error}") from error
        outputs: dict[str, list[RequestOutput]] = {}
        unfinished: set[str] = set()
        pending = deque(zip(many, each, strict=True))
        bar = tqdm(total=len(many), desc="requests", unit="request", disable=not progress)
        try:
            with bar:
                while pending or unfinished:
                    while pending and not self._queue_is_full():
                        prompt, p = pending.popleft()
                        request_id = self.add_request(prompt, p, **request_options)
                        outputs[request_id] = [request.output for request in self._requests[request_id]]
                        unfinished.add(request_id)
                    for output in self.step(drain=True):
                        if output.request_id in unfinished and all(o.finished for o in outputs[output.request_id]):
                            unfinished.remove(output.request_id)
                            bar.update()
        except BaseException:
            for request_id in unfinished:
                self.abort(request_id)
            raise
        return [output for samples in outputs.values() for output in samples]

    # State

    def stats(self) -> EngineStats:
        """Numbers since the engine started, and the memory as it is now."""
        self._check_not_closed()
        reserved = self.runner.kv_cache.num_bytes
        stats = self._stats.snapshot(self.scheduler, reserved, dict(self._policy_errors.counts))
        return dataclasses.replace(
            stats,
            swaps_made=self.swaps.made,
            swaps_refused=self.swaps.refused,
            packed_bytes=self.swaps.packed_bytes,
        )

    def explain_memory(self) -> str:
        """Where the memory of keys and values goes, in words."""
        return explain_memory(self.stats(), self.twin.layers, self.config)

    @_alone
    def weights_changed(self) -> None:
        """Say that the model's weights, adapters or dtype changed; cached prefixes are dropped, nothing stale is used.

        The engine notices most changes by itself when it is idle and gets work.
        """
        self._reload("weights_changed() was called")

    @_alone
    def close(self) -> None:
        """End what runs with ``"abort"`` and free the cache. Raises EngineClosed when the engine is closed already."""
        for samples in list(self._requests.values()):
            for request in list(samples):
                self._end(request, "abort")
        self._closed = True
        del self.runner, self.executor, self.twin
        self._notify("engine_stopped", engine=self)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if not self._closed:
            self.close()

    @property
    def is_closed(self) -> bool:
        return self._closed

    # Inside

    def _use_attention_backend(self) -> None:
        name = self.config.attention_backend
        functions = self._plugins.attention_backend(name)
        if functions is not None:
            add_backend(name, functions)
        check_backend(name)

    def _load(self, model: Any) -> None:
        """Everything that depends on the model: its twin, the proof, the cache and its books."""
        config, backend = self.config, self.config.attention_backend
        self.twin = Twin(model)
        self.swaps = self._swap(model)
        self.max_model_len = self._length_limit()
        groups = group_layers(self.twin.layers, config.kv_torch_dtype)
        block_size = self._block_size()
        chunk = config.max_num_batched_tokens
        if self._elastic:
            num_blocks = [0] * len(groups)
        else:
            max_len = self.max_model_len or DEFAULT_LENGTH
            budget = budget_bytes(config.kv_cache_memory, groups, config.max_num_seqs, max_len, self.twin.device)
            num_blocks = blocks_for_budget(groups, block_size, chunk, budget, max_len)
        make_eviction = self._plugins.eviction_factory(config.eviction, config.eviction_options)
        self.blocks = BlockManager(
            groups,
            num_blocks,
            block_size,
            config.max_num_seqs,
            chunk,
            [make_eviction() for _ in groups],
            self._policy_errors,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        cache = KVCache(self.twin.layers, groups, num_blocks, block_size, config.kv_torch_dtype)
        self.runner = ModelRunner(self.twin, cache, backend)
        # One pass reads the weights once, which is what a step costs on a CPU; a GPU prefers uniform batches.
        shared = config.batching == "shared" or (config.batching == "auto" and self.twin.device.type == "cpu")
        self.executor = Executor(self.runner, self.blocks, shared=shared)

    def _swap(self, model: Any) -> Swaps:
        """Swap modules of the twin, and prove it right."""
        config, backend = self.config, self.config.attention_backend
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
        hard, asked = self.twin.max_positions, self.config.max_model_len
        if asked is not None and hard is not None and asked > hard:
            raise ConfigError(f"max_model_len={asked} is beyond the {hard} positions that the model has")
        if asked is not None:
            return asked
        limits = [hard] if self._elastic else [hard, self.twin.advertised_positions]
        return min((limit for limit in limits if limit is not None), default=None)

    def _block_size(self) -> int:
        rule = self._plugins.block_size_rule(self.config.block_size)
        if isinstance(rule, int):
            return rule
        layer = self.twin.layers[0]
        shape = ModelShape(
            num_layers=len(self.twin.layers),
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            key_dim=layer.key_dim,
            value_dim=layer.value_dim,
            dtype=layer.dtype,
            decode_seconds=partial(decode_seconds, layer, self.config.kv_torch_dtype, self.config.attention_backend),
            max_positions=self.max_model_len,
        )
        device = self.twin.device
        answer = call(self._policy_errors, rule, "block_size", lambda: rule(shape, device), may_take_long=True)
        if answer is FAILED:
            return EngineConfig.block_size
        try:
            return check_block_size(answer, source="the answer")
        except ConfigError as error:
            self._policy_errors(rule, "block_size", f"{error}")
            return EngineConfig.block_size

    def fit(self, lengths: Sequence[int]) -> None:
        """Size an elastic engine's cache so that requests of these lengths (prompt and output) run at once."""
        if not self._elastic:
            return
        longest = sorted(lengths, reverse=True)[: self.config.max_num_seqs]
        need = self._blocks_for(longest)
        have = self.runner.kv_cache.num_blocks
        if any(n > h for n, h in zip(need, have, strict=True)):
            self._resize([max(n, h) for n, h in zip(need, have, strict=True)])
        elif not self.scheduler.has_work() and all(n * SHRINK_FACTOR < h for n, h in zip(need, have, strict=True)):
            self.blocks.reset()
            self._resize(need)

    def runs_at_once(self, lengths: Sequence[int]) -> bool:
        """Whether requests of these lengths (prompt and output) can all run at the same time, if nothing else does."""
        if len(lengths) > self.config.max_num_seqs:
            return False
        need, have = self._blocks_for(lengths), self.runner.kv_cache.num_blocks
        return self._elastic or all(n <= h for n, h in zip(need, have, strict=True))

    def _make_room_for(self, request: Request) -> None:
        """Let an elastic engine's cache grow, by half at least, until ``request`` can run beside all others."""
        if not self._elastic:
            return
        running = [sample for samples in self._requests.values() for sample in samples]
        if len(running) < self.config.max_num_seqs:
            lengths = [sample.max_num_tokens for sample in (*running, request, *request.forks)]
        elif self.blocks.shortage(request.max_num_tokens) is not None:
            lengths = [request.max_num_tokens]
        else:
            return
        need = self._blocks_for(lengths)
        have = self.runner.kv_cache.num_blocks
        if any(n > h for n, h in zip(need, have, strict=True)):
            self._resize([max(n, h, h * 3 // 2) for n, h in zip(need, have, strict=True)])

    def _blocks_for(self, lengths: Sequence[int]) -> list[int]:
        chunk = self.config.max_num_batched_tokens
        return blocks_for_lengths(self.blocks.groups, self.blocks.block_size, chunk, lengths)

    def _resize(self, num_blocks: Sequence[int]) -> None:
        self.runner.use_cache(self.runner.kv_cache.resized(num_blocks, self.blocks.blocks_in_use()))
        self.blocks.resize(num_blocks)

    def _build(
        self,
        prompt: Prompt,
        params: SamplingParams | Mapping[str, Any] | None,
        now: float,
        *,
        request_id: str | None = None,
        order: int | None = None,
        **options: Any,
    ) -> Request:
        """A checked request that is not queued yet."""
        token_ids = prompt_token_ids(prompt, self.tokenizer, self.twin.vocab_size)
        params = self._default_params(len(token_ids)) if params is None else sampling_params(params)
        params.validate_for(self.twin.vocab_size)
        check_prompt_embeds(options.get("prompt_embeds"), len(token_ids), self.twin)
        check_stop(params, self.tokenizer)
        check_constraint(params, self.tokenizer)
        if params.n > self.config.max_num_seqs:
            raise RequestRefused(f"n={params.n} samples cannot run at once; max_num_seqs is {self.config.max_num_seqs}")
        self._check_length(len(token_ids), params.max_tokens)
        if request_id is not None:
            self._check_id(request_id)
        orders = itertools.repeat(order) if order is not None else self._orders
        first = next(orders)
        name = request_id if request_id is not None else str(first)
        samples = [Request(name, token_ids, params, now, first, **options)]
        samples += [Request(name, token_ids, params, now, next(orders), index=i, **options) for i in range(1, params.n)]
        for sample in samples:
            sample.output.decode = self._decode
        samples[0].forks = tuple(samples[1:])
        return samples[0]

    def _check_id(self, request_id: str) -> None:
        if request_id in self._requests:
            raise RequestRefused(f"request_id {request_id!r} is taken by an unfinished request")

    def _default_params(self, num_prompt_tokens: int) -> SamplingParams:
        """Greedy, with as many tokens as are left to a short model."""
        params = SamplingParams()
        room = params.max_tokens if self.max_model_len is None else self.max_model_len - num_prompt_tokens
        return SamplingParams(max_tokens=max(1, min(params.max_tokens, room)))

    def _check_length(self, num_prompt_tokens: int, max_tokens: int) -> None:
        total = num_prompt_tokens + max_tokens
        if self.max_model_len is not None and total > self.max_model_len:
            raise ContextOverflow(
                f"a prompt of {num_prompt_tokens} tokens and max_tokens={max_tokens} come to {total}, beyond the "
                f"{self.max_model_len} positions of the model or of max_model_len"
            )
        shortage = self.blocks.shortage(total)
        if shortage is not None and not self._elastic:
            raise ContextOverflow(
                f"a prompt of {num_prompt_tokens} tokens and max_tokens={max_tokens} can never fit: {shortage}; "
                "shorten them or raise kv_cache_memory"
            )

    def check_queue(self, num_on_their_way: int = 0) -> None:
        """Raise QueueFull if no further request may wait, beside the waiting ones and those on their way here."""
        num_waiting = self.scheduler.num_waiting + num_on_their_way
        if self.config.max_waiting is not None and num_waiting >= self.config.max_waiting:
            raise QueueFull(f"{num_waiting} requests wait already; max_waiting is {self.config.max_waiting}")

    def _admit_by_hook(self, request: Request) -> None:
        if self._plugins.listens("admit_request"):
            answer = self._plugins.first_opinion(
                "admit_request",
                self._policy_errors,
                lambda value: isinstance(value, (bool, str)),
                request=request.view,
                stats=self.stats(),
            )
            if answer is False or isinstance(answer, str):
                raise RequestRefused(answer or "a plugin refused the request")

    def _queue_is_full(self) -> bool:
        return self.config.max_waiting is not None and self.scheduler.num_waiting >= self.config.max_waiting

    def _decode(self, token_ids: Sequence[int]) -> str:
        if self.tokenizer is None:
            return ""
        with tokenizer_lock(self.tokenizer):
            text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def _limit_time(self, request: Request) -> None:
        # Requests that ended long before their limits must not pile up.
        if len(self._time_limits) > 100 + 4 * len(self._requests):
            self._time_limits = [entry for entry in self._time_limits if entry[2].request_id in self._requests]
            heapq.heapify(self._time_limits)
        for limit in {request.time_limit, request.queue_limit}:
            if limit is not None:
                heapq.heappush(self._time_limits, (limit, request.order, request))

    def _expire(self, now: float) -> None:
        while self._time_limits and self._time_limits[0][0] <= now:
            limit, _, request = heapq.heappop(self._time_limits)
            if limit != request.time_limit:
                if request.last_scheduled_time is None and not request.is_finished:
                    self._end(request, "timeout")
                continue
            for sample in list(self._requests.get(request.request_id, ())):
                if sample.time_limit == request.time_limit and not sample.is_finished:
                    self._end(sample, "timeout")
        for request in self._guard.doomed(now):
            self._end(request, "timeout")

    def _deliver(self, rows: Sequence[Request], sampled: Any, now: float) -> list[RequestOutput]:
        """Append each row's token, end what is complete; returns the outputs of those that go on."""
        advanced = []
        for index, request in enumerate(rows):
            token = sampled.tokens[index]
            if isinstance(token, Exception):
                self._fail(request, token)
                continue
            request.append_token(token)
            output = request.output
            output.new_token_ids = [token]
            if output.metrics.first_token_time is None:
                output.metrics.first_token_time = now
            if sampled.logprobs is not None and sampled.logprobs[index] is not None:
                output.logprobs = output.logprobs or []
                output.logprobs.append(sampled.logprobs[index])
            advanced.append(request)
        outputs = []
        # Only now that all have their tokens: a stop condition may look at those of its lockstep.
        for request in advanced:
            try:
                reason = finish_reason(request, request.token_ids[-1], self.eos_token_ids)
            except Exception as error:
                self._fail(request, error, keep_new_tokens=True)
                continue
            if reason is None:
                outputs.append(request.output)
            else:
                self._end(request, reason, keep_new_tokens=True)
        return outputs

    def _fail(self, request: Request, error: Exception, *, keep_new_tokens: bool = False) -> None:
        logger.warning("request %s failed: %r", request.request_id, error)
        request.output.error = error
        self._end(request, "error", keep_new_tokens=keep_new_tokens)

    def _end(self, request: Request, reason: FinishReason, *, keep_new_tokens: bool = False) -> None:
        """Finish a request and the forks that never split from it; their outputs go out with the step."""
        now = self.clock()
        for sample in (request, *request.forks):
            if sample.is_finished:
                continue
            if not keep_new_tokens:
                sample.output.new_token_ids = []
            sample.output.error = request.output.error
            self.scheduler.finish(sample, reason, now)
            samples = self._requests[sample.request_id]
            samples.remove(sample)
            if not samples:
                del self._requests[sample.request_id]
            self._ended.append(sample.output)
            if self._plugins.listens("request_finished"):
                self._notify("request_finished", request=sample.view, output=sample.output.snapshot())
            sample.forget_view()

    def _close_step(
        self,
        step: ScheduledStep,
        num_prefill_tokens: int,
        outputs: Sequence[RequestOutput],
        watch: Stopwatch,
        now: float,
    ) -> None:
        for request in step.admitted:
            metrics = request.output.metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = step.time
                metrics.num_cached_tokens = request.num_cached_tokens
        stats = self._stats.record_step(self.scheduler, step, outputs, num_prefill_tokens, watch.laps, now)
        for request, num_blocks in step.preempted:
            self._notify("request_preempted", request=request.view, num_blocks=num_blocks)
        self._notify("step_finished", stats=stats)

    def _notify(self, name: str, **kwargs: Any) -> None:
        if self._plugins.listens(name):
            self._plugins.notify(name, self._policy_errors, **kwargs)

    def _refresh(self) -> None:
        """Look for changes of the model whenever an idle engine gets work."""
        if not self.scheduler.has_work():
            reason = self.twin.stale_reason()
            if reason is not None:
                self._reload(reason)

    def _reload(self, reason: str) -> None:
        model = self._model()
        logger.info("reloading the model: %s", reason)
        self.scheduler.restart(self.clock())
        if model is not None:
            counts = self.runner.kv_cache.num_blocks
            self._load(model)
            self.scheduler.blocks = self.blocks
            self._repin()
            if self._elastic and len(counts) == len(self.blocks.groups):
                self._resize(counts)

    def _repin(self) -> None:
        for salt, token_ids in list(self._pins):
            try:
                self.blocks.pin(token_ids, salt)
            except RequestRefused as error:
                logger.warning("a pinned prefix of %d tokens is given up: %s", len(token_ids), error)
                del self._pins[salt, token_ids]

    def _check_not_closed(self) -> None:
        if self._closed:
            raise EngineClosed("the engine is closed; make a new one")

    def _check_open(self) -> None:
        self._check_not_closed()
        if self._busy:
            raise EngineClosed("the engine is in the middle of a call; what runs inside of it must not call it again")


def _eos_token_ids(model: Any) -> frozenset[int]:
    """The tokens that end a text, from the model's generation config or its config."""
    for holder in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        value = getattr(holder, "eos_token_id", None)
        if value is not None:
            return frozenset(value if isinstance(value, (list, tuple)) else [value])
    return frozenset()
