"""Engine: adds requests, runs steps, hands out results; the only place that wires the parts together."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Unpack

from tqdm import tqdm

from paged_backend.checks import describe
from paged_backend.config import EngineConfig
from paged_backend.engine.choices import choose
from paged_backend.engine.exclusive import Exclusive, alone
from paged_backend.engine.intake import Intake, Params, Prompt, admit_by_hook, as_prompts, check_model, check_tokenizer
from paged_backend.engine.lockstep_room import check_room, check_room_beside_pins
from paged_backend.engine.model_loader import ModelLoader
from paged_backend.engine.request_table import RequestTable
from paged_backend.engine.scheduler import ScheduledStep, Scheduler
from paged_backend.engine.served_model import ServedModel
from paged_backend.engine.stats_recorder import StatsRecorder
from paged_backend.engine.step_loop import Executed, StepLoop
from paged_backend.engine.stopwatch import Stopwatch
from paged_backend.errors import ConfigError, PluginError, QueueFull, RequestRefused
from paged_backend.memory.block_manager import BlockManager
from paged_backend.memory.memory_report import explain_memory
from paged_backend.model.precision import own_precision
from paged_backend.model.pretrained import load_pretrained
from paged_backend.model.quantised_tensor import weight_bytes
from paged_backend.model.runner import ModelRunner
from paged_backend.model.twin import Twin
from paged_backend.outputs import RequestOutput
from paged_backend.policy.plugin_manager import PluginManager
from paged_backend.policy.policy_errors import PolicyErrors
from paged_backend.policy.policy_guard import PolicyGuard
from paged_backend.request.options import RequestOptions, check_salt, check_text
from paged_backend.request.request import Request
from paged_backend.sampling.held_rows import HeldRows
from paged_backend.sampling.sampler import Sampler
from paged_backend.sampling.stopping import eos_token_ids_of
from paged_backend.stats import EngineStats


class Engine(Exclusive):
    """Runs requests for one model through one continuously changing batch, for one thread at a time.

    model: a decoder-only transformers model; it is never changed, and may be used at the same time.
    tokenizer: needed for text prompts, text output and stop strings.
    config: an EngineConfig or a mapping of its fields; keyword arguments replace single fields.
    plugins: modules or objects with hooks, on top of the installed ones.
    clock: seconds, monotonic; every deadline and time limit is read from it.
    elastic: size the cache by the requests that come (as ``generate`` does) instead of by a budget.

    The model is compared with what it was, and a changed one is loaded again, without any prefix that was cached
    before; running requests keep their tokens and go on with the new weights. Before every step in-place operations on
    a weight are noticed (optimizers, ``load_state_dict``), which count its version up. When a request comes to an idle
    engine, so are other modules, adapters, hooks, attributes, dtypes and devices, replaced tensors, and edits through
    ``.data`` (or of weights made under ``torch.inference_mode``), which count nothing, of any tensor of up to 16,384
    elements, and of a larger one if they reach one of 64 elements spread over it, as an edit of most of it does. Not
    noticed are smaller edits of that kind in a large tensor, such as ``weight.data[i, j] = x``, and other changes than
    in-place operations while requests are running: call ``weights_changed()`` after those.

    Raises UnsupportedModel when the load probe cannot prove that the model runs right on paged attention, ConfigError
    for what cannot be used, PluginError for a plugin that cannot be loaded. Called in the middle of another call, by a
    hook or another thread, its methods raise EngineBusy and nothing changes.
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
        super().__init__()
        check_model(model)
        check_tokenizer(tokenizer)
        if not callable(clock):
            raise ConfigError(f"clock must be a function that returns seconds, got {describe(clock)}")
        self.config = EngineConfig.from_options(config, **options)
        self.tokenizer = tokenizer
        self.clock = clock
        self._kept_model: Any = None
        self._plugins = PluginManager(plugins)
        self._policy_errors = PolicyErrors(self.config.strict_policies)
        # What is named wrongly is told before the model is copied and proven.
        choices = choose(self.config, self._plugins)
        elastic = elastic and self.config.kv_cache_memory is None
        serve = partial(
            ServedModel, config=self.config, choices=choices, policy_errors=self._policy_errors, elastic=elastic
        )
        with own_precision():
            self._loader = ModelLoader(model, serve)
        guard = PolicyGuard(choices.scheduler, self._policy_errors)
        self.scheduler = Scheduler(self.blocks, guard, self.config.max_num_batched_tokens)
        self.eos_token_ids = eos_token_ids_of(model)
        self.sampler = Sampler(self.eos_token_ids, self.config.seed, tokenizer)
        self._held = HeldRows()
        self._requests = RequestTable(self.scheduler, clock, self._plugins, self._policy_errors)
        self._intake = Intake(tokenizer, self._loader, self._requests)
        self._stats = StatsRecorder()
        self._steps = StepLoop(self.scheduler, self._requests, self._stats, clock)
        self._notify("engine_started", engine=self)
        self._policy_errors.raise_first()

    @classmethod
    def from_pretrained(
        cls, name_or_path: str | os.PathLike[str], *, model_kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> Engine:
        """An engine for a model folder, a hub id or a GGUF file, its tokenizer included.

        ``model_kwargs`` go to ``AutoModelForCausalLM.from_pretrained`` (``dtype``, ``device_map``, ``gguf_file``, ...).
        On a CPU the weights of a GGUF file stay in its blocks, unless ``quantize`` rounds them to others;
        ``quantization_config=GgufConfig(dequantize=True)`` among ``model_kwargs`` widens them to floats.
        ``stats().weight_bytes`` tells what weights are stored in, ``weights_widened`` which had to be widened, and why.
        """
        quantize = options.get("quantize", EngineConfig.from_options(options.get("config")).quantize)
        model, tokenizer = load_pretrained(name_or_path, model_kwargs or {}, packed=quantize is None)
        engine = cls(model, tokenizer, **options)
        engine._kept_model = model
        return engine

    # Requests

    @alone
    def add_request(self, prompt: Prompt, params: Params = None, **options: Unpack[RequestOptions]) -> str:
        """Queue a prompt (text, token ids, or a 1-D tensor or array of them); returns the request's id.

        params: a SamplingParams or a mapping of its fields. None is greedy with 256 tokens, or as many as the model's
        positions and the cache leave; ``SamplingParams()`` asks for all 256, and is refused where they cannot fit.
        options: see ``RequestOptions``: request_id, priority, deadline_s, timeout_s, queue_timeout_s, client_id,
        cache_salt, stop_condition, metadata, lockstep, prompt_embeds.

        Raises RequestRefused (ContextOverflow when it could never fit, QueueFull when ``max_waiting`` wait), and
        ConfigError for a field of ``params`` that cannot be used; everything is left as it was.
        """
        self._refresh()
        request = self.prepare(prompt, params, **options)
        self.check_queue()
        self._queue(request)
        return request.request_id

    def prepare(self, prompt: Prompt, params: Params = None, **options: Unpack[RequestOptions]) -> Request:
        """A checked request for ``enqueue``, from the arguments of ``add_request``. Any thread may call this."""
        self.check_open()
        return self._intake.build(prompt, params, options, self.clock())

    @alone
    def enqueue(self, request: Request) -> None:
        """Queue a request that ``prepare`` built; its deadlines count from then, and ``max_waiting`` is not looked at.

        Raises RequestRefused when a plugin refuses it, its id is taken or it fits no more since prefixes were pinned.
        """
        self._refresh()
        self._requests.check_free(request.request_id)
        own = self.blocks.num_pinned_for(request)
        self._intake.check_length(request.num_prompt_tokens, request.params.max_tokens, own)
        self._queue(request)

    def _queue(self, request: Request) -> None:
        check_room(request, self._served)
        if self._plugins.listens("admit_request"):
            admit_by_hook(self._plugins, self._policy_errors, request, self.stats())
        self._policy_errors.raise_first()
        self._served.make_room(request, self._requests)
        self._requests.add(request)
        self.scheduler.add(request, self.clock())
        self._notify("request_added", request=request.view)

    def check_queue(self, num_on_their_way: int = 0) -> None:
        """Raise QueueFull if no further request may wait, beside the waiting ones and those on their way here."""
        num_waiting = self.scheduler.num_waiting + num_on_their_way
        if self.config.max_waiting is not None and num_waiting >= self.config.max_waiting:
            raise QueueFull(f"{num_waiting} requests wait already; max_waiting is {self.config.max_waiting}")

    @alone
    def abort(self, request_id: str) -> bool:
        """End a request, wherever it is, with ``"abort"``; its outputs come with the next step. False if it is over."""
        check_text("request_id", request_id)
        return self._requests.abort(request_id)

    def outputs(self, request_id: str) -> list[RequestOutput]:
        """The outputs of an unfinished request, one per sample, which fill up as it runs; empty once it is over."""
        check_text("request_id", request_id)
        return [request.output for request in self._requests.samples(request_id)]

    def has_unfinished_requests(self) -> bool:
        """Whether a further ``step`` has something to do or to hand out."""
        return bool(self._requests) or self._requests.has_ended

    @alone
    def step(self, *, drain: bool = False) -> list[RequestOutput]:
        """Run one step; returns the outputs that got a token or ended since the last one.

        A request that fails (its forward pass, its processors, its stop rule) ends with ``"error"`` alone.
        drain: nothing more will be added for now, so a policy that holds requests back to batch them is not waited for.
        Without it such a step does nothing, and ``held_until`` says when to come back.
        """
        return self._whole_step(drain)

    def _whole_step(self, drain: bool) -> list[RequestOutput]:
        """A step that leaves the books right whatever breaks it off."""
        if self.scheduler.has_work():
            self._refresh()
        try:
            with own_precision():
                outputs = self._step(drain)
        except BaseException:
            self.scheduler.restart(self.clock())
            raise
        try:
            self._policy_errors.raise_first()
        except PluginError:
            self._requests.give_back(outputs)
            raise
        return outputs

    def _step(self, drain: bool) -> list[RequestOutput]:
        step, outputs, stats = self._steps.run(self._execute, self.eos_token_ids, drain=drain)
        for request, num_blocks in step.preempted:
            self._notify("request_preempted", request=request.view, num_blocks=num_blocks)
        self._notify("step_finished", engine=self, stats=stats)
        return outputs

    def _execute(self, step: ScheduledStep, watch: Stopwatch) -> Executed:
        """Run the model on a step and choose the tokens of who is not held."""
        logits, failures = self._served.executor.run(step, watch)
        logits, rows = self._held.join(logits, step.sampling)
        return Executed(rows, self.sampler.sample(logits, rows) if logits is not None else None, failures)

    @alone
    def settle(self) -> list[RequestOutput]:
        """The outputs that ended since the last step, those past their time limit included, without running a step."""
        self._requests.expire(self.clock())
        outputs = self._requests.take_ended()
        self._stats.num_finished += len(outputs)
        return outputs

    @property
    def next_time_limit(self) -> float | None:
        """When the next request may have to end with ``"timeout"``, in seconds of the engine's clock."""
        return self._requests.next_time_limit

    @property
    def held_until(self) -> float | None:
        """When to ``step`` again if the scheduling policy holds everybody back until then, else None."""
        until, limit = self.scheduler.held_until, self._requests.next_time_limit
        if until is None or self._requests.has_ended or not self.scheduler.num_waiting:
            return None
        return until if limit is None else min(until, limit)

    @alone
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Any] = None,
        *,
        progress: bool = False,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """Run prompts to their end; one RequestOutput per prompt and sample, in the order given.

        ``params`` is for all prompts, or a sequence of one each; ``options`` are for all (see ``add_request``).
        ``progress`` shows a bar. Other requests of the engine go on meanwhile. A prompt that is refused raises before
        any is queued. Interrupted, it aborts its own requests.
        """
        self._refresh()
        pending = deque(self._intake.build_all(as_prompts(prompts), params, options, self.clock()))
        outputs = [sample.output for request in pending for sample in (request, *request.forks)]
        unfinished: set[str] = set()
        bar = tqdm(total=len(pending), desc="requests", unit="request", disable=not progress)
        try:
            with bar:
                while pending or unfinished:
                    while pending and (self.config.max_waiting or math.inf) > self.scheduler.num_waiting:
                        unfinished.add(pending[0].request_id)
                        self._queue(pending.popleft())
                    self._whole_step(drain=True)
                    over = {request_id for request_id in unfinished if request_id not in self._requests}
                    unfinished -= over
                    bar.update(len(over))
        except BaseException:
            for request_id in unfinished:
                self._requests.abort(request_id)
            raise
        return outputs

    @alone
    def pin_prefix(self, prompt: Prompt, *, cache_salt: str | None = None) -> int:
        """Keep this beginning of prompts in the cache, from when it is next computed until ``unpin_prefix``.

        Returns how many of its tokens stay: its full blocks. Raises RequestRefused when it fills no block, when pinned
        prefixes would take more than half of the cache, or when a request that is unfinished could not fit any more, or
        all of its lockstep at once; ConfigError when the engine keeps no prefixes or is sized by its requests.
        """
        if self._served.elastic or not self.config.enable_prefix_caching:
            raise ConfigError("pin_prefix needs enable_prefix_caching and a cache of fixed size; set kv_cache_memory")
        if self.twin.foreign_code is not None:
            raise ConfigError(
                f"no prefix of this model can be kept: {self.twin.foreign_code} may change what it computes at any "
                "time; remove it first"
            )
        check_salt(cache_salt)
        token_ids = self._intake.token_ids(prompt)
        num_tokens = self.blocks.pin(token_ids, cache_salt, self._requests)
        try:
            check_room_beside_pins(self._requests, self._served)
        except RequestRefused:
            self.blocks.unpin(token_ids, cache_salt)
            raise
        return num_tokens

    @alone
    def unpin_prefix(self, prompt: Prompt, *, cache_salt: str | None = None) -> bool:
        """Take back ``pin_prefix``; False if this prefix is not pinned."""
        check_salt(cache_salt)
        return self.blocks.unpin(self._intake.token_ids(prompt), cache_salt)

    # The cache

    @alone
    def fit(self, lengths: Sequence[int]) -> None:
        """Size an elastic engine's cache so that requests of these lengths (prompt and output) run at once."""
        self._refresh()
        self._served.fit(lengths, is_idle=not self.scheduler.has_work())

    def runs_at_once(self, lengths: Sequence[int]) -> bool:
        """Whether requests of these lengths (prompt and output) can all run at the same time, if nothing else does."""
        return self._served.runs_at_once(lengths)

    # State

    def stats(self) -> EngineStats:
        """Numbers since the engine started, and the memory as it is now. Hooks may ask too, until the engine closes."""
        reserved, swaps = self.runner.kv_cache.num_bytes, self._served.swaps
        stats = self._stats.snapshot(self.scheduler, reserved, dict(self._policy_errors.counts))
        return dataclasses.replace(
            stats,
            swaps_made=swaps.made,
            swaps_refused=swaps.refused,
            packed_bytes=swaps.packed_bytes,
            weight_bytes=weight_bytes(self.twin.module),
            weights_widened=getattr(self.twin.module, "widened", {}),
            states=self._served.state_stats(),
            block_size_reason=self._served.block_size_reason,
            kernels=self._served.kernels,
            faster=self._served.faster,
        )

    def explain_memory(self) -> str:
        """Where the memory of keys and values, and of recurrent states, goes, in words."""
        return explain_memory(self.stats(), self.twin.layers, self.config)

    def close(self) -> None:
        """End what runs with ``"abort"`` and free the cache; does nothing when the engine is closed already.

        An AsyncEngine, or LangChain models over this engine, that have nothing to do end with it: they raise
        EngineClosed from then on. While they have, this raises EngineBusy and nothing changes.
        """
        if self.is_closed:
            return
        if self.keeper is not None and not self.keeper.is_current:
            self.keeper.leave()
        self._close()

    @alone
    def _close(self) -> None:
        for request in self._requests:
            self._requests.end(request, "abort")
        super().close()
        del self._loader, self._intake
        self._notify("engine_stopped", engine=self)

    # The model

    @alone
    def weights_changed(self) -> None:
        """Say that the model's weights, adapters or dtype changed; cached prefixes are dropped, nothing stale is used.

        Needed after edits that the engine does not notice by itself, as the class says: those through ``.data`` that
        reach few elements of a large weight, and replaced modules or tensors while requests are running.

        When the model cannot be loaded any more this raises, as making an engine would, and every unfinished request
        ends with ``"error"`` and the cause. The engine stays open: each further request tries again to load it.
        """
        self._reload("weights_changed() was called")

    def _refresh(self) -> None:
        """Before anything is computed: look at the model, at a glance while requests run; load a changed one again."""
        reason = self._loader.stale_reason(at_a_glance=self.scheduler.has_work())
        if reason is not None:
            self._reload(reason)

    def _reload(self, reason: str) -> None:
        """Serve the model as it is now; the requests compute everything again, or end with what that raised."""
        self.scheduler.restart(self.clock())
        try:
            with own_precision():
                self._loader.reload(reason)
        except Exception as error:
            for request in self._requests:
                self._requests.fail(request, error)
            raise
        self.scheduler.use(self.blocks)

    @property
    def _served(self) -> ServedModel:
        self.check_open()
        return self._loader.served

    @property
    def twin(self) -> Twin:
        """The engine's copy of the model, replaced when the model changes."""
        return self._served.twin

    @property
    def runner(self) -> ModelRunner:
        """What runs forward passes, with the cache."""
        return self._served.runner

    @property
    def blocks(self) -> BlockManager:
        """The books of the cache."""
        return self._served.blocks

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of a request, prompt and output; None without a limit."""
        return self._served.max_model_len

    def _notify(self, name: str, **kwargs: Any) -> None:
        if self._plugins.listens(name):
            self._plugins.notify(name, self._policy_errors, **kwargs)
