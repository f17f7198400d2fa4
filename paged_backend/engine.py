"""Engine: adds requests, runs steps, hands out results; the only place that wires the parts together."""

from __future__ import annotations

import heapq
import itertools
import logging
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from paged_backend.block_manager import BlockManager
from paged_backend.cache_sizing import blocks_for_budget, blocks_for_lengths, budget_bytes
from paged_backend.config import EngineConfig, check_block_size
from paged_backend.errors import ConfigError, ContextOverflow, EngineClosed, PluginError, RequestRefused
from paged_backend.executor import Executor
from paged_backend.intake import Prompt, as_prompts, moment, prompt_token_ids, sampling_params
from paged_backend.kv_cache import KVCache, group_layers
from paged_backend.load_probe import prove
from paged_backend.memory_report import explain_memory
from paged_backend.model_runner import ModelRunner
from paged_backend.plugin_manager import PluginManager
from paged_backend.policies import ModelShape
from paged_backend.policy_guard import PolicyGuard
from paged_backend.request import FinishReason, Request, RequestOutput
from paged_backend.sampler import Sampler
from paged_backend.sampling_params import SamplingParams
from paged_backend.scheduler import ScheduledStep, Scheduler
from paged_backend.stats import EngineStats, GroupStats, StatsRecorder, Stopwatch
from paged_backend.stopping import check_stop, finish_reason
from paged_backend.twin import Twin

logger = logging.getLogger("paged_backend")

# What a model without a stated length is taken to run at most, when its cache is sized.
DEFAULT_LENGTH = 2048
# An idle elastic engine whose cache is this many times too large gives the rest back.
SHRINK_FACTOR = 4


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
        self._stepping = False
        self._kept_model: Any = None
        self._plugins = PluginManager(plugins)
        self._policy_errors: Counter[str] = Counter()
        self._guard = PolicyGuard(
            self._plugins.scheduler(self.config.scheduler, self.config.scheduler_options), self._report_policy_error
        )
        self._elastic = elastic and self.config.kv_cache_memory is None
        self._model = weakref.ref(model)
        self._load(model)
        self.scheduler = Scheduler(self.blocks, self._guard, self.config.max_num_batched_tokens)
        self.eos_token_ids = _eos_token_ids(model)
        self.sampler = Sampler(self.eos_token_ids, self.config.seed, tokenizer)
        self._requests: dict[str, list[Request]] = {}
        self._orders = itertools.count()
        self._time_limits: list[tuple[float, int, Request]] = []
        self._ended: deque[RequestOutput] = deque()
        self._stats = StatsRecorder()
        self._notify("engine_started", engine=self)

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

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        timeout_s: float | None = None,
        client_id: str | None = None,
        cache_salt: str | None = None,
        stop_condition: Callable[[Request], bool] | None = None,
        metadata: Any = None,
    ) -> str:
        """Queue a prompt (text, token ids, or a 1-D tensor of them); returns the request's id.

        deadline_s: seconds from now by which the caller would like it finished; policies may order by it.
        timeout_s: seconds from now after which it ends with ``"timeout"``, wherever it is.
        client_id: for policies that share out service. cache_salt: prefixes are shared only under an equal salt.
        stop_condition: called with the Request after each token; True ends it with ``"stop"``.

        Raises RequestRefused (ContextOverflow when it could never fit) and leaves everything as it was.
        """
        self._check_open()
        now = self.clock()
        self._refresh()
        request = self._build(
            prompt,
            params,
            now,
            request_id=request_id,
            priority=priority,
            deadline=moment(now, "deadline_s", deadline_s),
            time_limit=moment(now, "timeout_s", timeout_s),
            client_id=client_id,
            cache_salt=cache_salt,
            stop_condition=stop_condition,
            metadata=metadata,
        )
        self._admit_by_hook(request)
        self._requests[request.request_id] = [request, *request.forks]
        if request.time_limit is not None:
            heapq.heappush(self._time_limits, (request.time_limit, request.order, request))
        self.scheduler.add(request, now)
        self._notify("request_added", request=request)
        return request.request_id

    def abort(self, request_id: str) -> bool:
        """End a request, wherever it is, with ``"abort"``; its outputs come with the next step. False if it is over."""
        self._check_open()
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

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the outputs that got a token or ended since the last one.

        A request that fails (its forward pass, its processors, its stop rule) ends with ``"error"`` alone.
        """
        self._check_open()
        with self._exclusive():
            watch, now = Stopwatch(), self.clock()
            self._expire(now)
            step = self.scheduler.schedule(now)
            watch.lap("schedule")
            logits, failures = self.executor.run(step, watch)
            rows, num_prefill_tokens = step.sampling, step.num_prefill_tokens
            sampled = self.sampler.sample(logits, rows) if logits is not None else None
            watch.lap("sample")
            self.scheduler.commit(step, now)
            outputs = self._deliver(rows, sampled, now)
            for request, error in failures.items():
                self._fail(request, error)
            outputs.extend(self._ended)
            self._ended.clear()
            watch.lap("update")
            self._close_step(step, num_prefill_tokens, outputs, watch, now)
            return outputs

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
                    for output in self.step():
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
        reserved = self.runner.kv_cache.num_bytes
        return self._stats.snapshot(self.scheduler, reserved, dict(self._policy_errors))

    def explain_memory(self) -> str:
        """Where the memory of keys and values goes, in words."""
        return explain_memory(self.stats(), self.twin.layers, self.config)

    def weights_changed(self) -> None:
        """Say that the model's weights, adapters or dtype changed; cached prefixes are dropped, nothing stale is used.

        The engine notices most changes by itself when it is idle and gets work.
        """
        self._check_open()
        self._reload("weights_changed() was called")

    def close(self) -> None:
        """End what runs with ``"abort"`` and free the cache. Raises EngineClosed when the engine is closed already."""
        self._check_open()
        for request_id in list(self._requests):
            self.abort(request_id)
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

    def _load(self, model: Any) -> None:
        """Everything that depends on the model: its twin, the proof, the cache and its books."""
        config, backend = self.config, self.config.attention_backend
        self.twin = Twin(model)
        prove(model, self.twin, backend)
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
            self._report_policy_error,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        cache = KVCache(self.twin.layers, groups, num_blocks, block_size, config.kv_torch_dtype)
        self.runner = ModelRunner(self.twin, cache, backend)
        # One pass reads the weights once, which is what a step costs on a CPU; a GPU prefers uniform batches.
        shared = config.batching == "shared" or (config.batching == "auto" and self.twin.device.type == "cpu")
        self.executor = Executor(self.runner, self.blocks, shared=shared)

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
            max_positions=self.max_model_len,
        )
        try:
            return check_block_size(rule(shape, self.twin.device), source="the block size rule's answer")
        except Exception as error:
            self._report_policy_error(rule, "block_size", error)
            return EngineConfig.block_size

    def fit(self, lengths: Sequence[int]) -> None:
        """Size an elastic engine's cache so that requests of these lengths (prompt and output) run at once."""
        if not self._elastic:
            return
        longest = sorted(lengths, reverse=True)[: self.config.max_num_seqs]
        chunk = self.config.max_num_batched_tokens
        need = blocks_for_lengths(self.blocks.groups, self.blocks.block_size, chunk, longest)
        have = self.runner.kv_cache.num_blocks
        if any(n > h for n, h in zip(need, have, strict=True)):
            self._resize([max(n, h) for n, h in zip(need, have, strict=True)])
        elif not self.scheduler.has_work() and all(n * SHRINK_FACTOR < h for n, h in zip(need, have, strict=True)):
            self.blocks.reset()
            self._resize(need)

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
        check_stop(params, self.tokenizer)
        if params.n > self.config.max_num_seqs:
            raise RequestRefused(f"n={params.n} samples cannot run at once; max_num_seqs is {self.config.max_num_seqs}")
        self._check_length(len(token_ids), params.max_tokens)
        if request_id is not None and request_id in self._requests:
            raise RequestRefused(f"request_id {request_id!r} is taken by an unfinished request")
        orders = itertools.repeat(order) if order is not None else self._orders
        first = next(orders)
        name = request_id if request_id is not None else str(first)
        samples = [Request(name, token_ids, params, now, first, **options)]
        samples += [Request(name, token_ids, params, now, next(orders), index=i, **options) for i in range(1, params.n)]
        for sample in samples:
            sample.output.decode = self._decode
        samples[0].forks = tuple(samples[1:])
        return samples[0]

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

    def _admit_by_hook(self, request: Request) -> None:
        if self._queue_is_full():
            raise RequestRefused(
                f"{self.scheduler.num_waiting} requests wait already; max_waiting is {self.config.max_waiting}"
            )
        if self._plugins.listens("admit_request"):
            answer = self._plugins.first_opinion(
                "admit_request", self._report_policy_error, request=request, stats=self.stats()
            )
            if answer is False or isinstance(answer, str):
                raise RequestRefused(answer or "a plugin refused the request")
        if self._elastic and self.blocks.shortage(request.max_num_tokens) is not None:
            self.fit([request.max_num_tokens])

    def _queue_is_full(self) -> bool:
        return self.config.max_waiting is not None and self.scheduler.num_waiting >= self.config.max_waiting

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True) if self.tokenizer is not None else ""

    def _expire(self, now: float) -> None:
        while self._time_limits and self._time_limits[0][0] <= now:
            request = heapq.heappop(self._time_limits)[2]
            for sample in list(self._requests.get(request.request_id, ())):
                if sample.time_limit == request.time_limit and not sample.is_finished:
                    self._end(sample, "timeout")

    def _deliver(self, rows: Sequence[Request], sampled: Any, now: float) -> list[RequestOutput]:
        """Append each row's token, end what is complete; returns the outputs of those that go on."""
        outputs = []
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
            try:
                reason = finish_reason(request, token, self.eos_token_ids)
            except Exception as error:
                self._fail(request, error, keep_new_tokens=True)
                continue
            if reason is None:
                outputs.append(output)
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
            self._notify("request_finished", request=sample, output=sample.output)

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
                metrics.first_scheduled_time = now
                metrics.num_cached_tokens = request.num_cached_tokens
        stats = self._stats.record_step(self.scheduler, step, outputs, num_prefill_tokens, watch.laps, now)
        for request, num_blocks in step.preempted:
            self._notify("request_preempted", request=request, num_blocks=num_blocks)
        self._notify("step_finished", stats=stats)

    def _notify(self, name: str, **kwargs: Any) -> None:
        if self._plugins.listens(name):
            self._plugins.notify(name, self._report_policy_error, **kwargs)

    def _report_policy_error(self, policy: object, method: str, error: BaseException | str) -> None:
        name = policy if isinstance(policy, str) else f"{type(policy).__module__}.{type(policy).__qualname__}"
        if self.config.strict_policies:
            raise PluginError(f"{name}.{method}: {error}") from (error if isinstance(error, BaseException) else None)
        key = f"{name}.{method}"
        self._policy_errors[key] += 1
        if self._policy_errors[key] == 1:
            logger.warning(
                "%s broke its contract (%s); the built-in rule takes over, further cases are counted", key, error
            )

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
            if self._elastic and len(counts) == len(self.blocks.groups):
                self._resize(counts)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if self._stepping:
            raise EngineClosed("the engine is in the middle of a step; hooks and policies must not call it")
        self._stepping = True
        try:
            yield
        except BaseException:
            self.scheduler.restart(self.clock())
            raise
        finally:
            self._stepping = False

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the engine is closed; make a new one")


def _eos_token_ids(model: Any) -> frozenset[int]:
    """The tokens that end a text, from the model's generation config or its config."""
    for holder in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        value = getattr(holder, "eos_token_id", None)
        if value is not None:
            return frozenset(value if isinstance(value, (list, tuple)) else [value])
    return frozenset()
