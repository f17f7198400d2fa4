"""SharedEngine: several threads run their requests through one engine; whichever of them leads steps for all."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from paged_backend.engine.engine import Engine
from paged_backend.engine.exclusive import StaysHere
from paged_backend.engine.intake import sampling_params
from paged_backend.errors import ConfigError, EngineBusy, EngineClosed
from paged_backend.outputs import RequestOutput

logger = logging.getLogger("paged_backend")


class SharedEngine(StaysHere):
    """Lets any number of threads share one engine's running batch, without a thread of its own and without polling.

    The thread that comes first leads: it takes in what the others submit, steps until its own requests are over, and
    hands the lead to one that still waits. The others sleep meanwhile. A leader that fails, by Ctrl-C too, fails alone:
    its requests are aborted and the next thread leads. So does a waiting thread that is interrupted.
    """

    def __init__(self, engine: Engine) -> None:
        if not isinstance(engine, Engine):
            raise ConfigError(
                f"SharedEngine takes an Engine, got a {type(engine).__name__}; make one with Engine(model, tokenizer)"
            )
        engine.check_open()
        self.engine = engine
        # Guards everything below. The engine itself belongs to the leader, who calls it without the lock.
        self._lock = threading.Lock()
        self._leader: _Submission | None = None
        self._leading_thread: int | None = None
        self._inbox: deque[_Submission] = deque()
        self._running: list[_Submission] = []
        self._abandoned: list[_Submission] = []
        self._closed = False
        # Whether a thread that the process does not have, being the child of a fork, was in the middle of using it.
        self.is_lost = False
        _shared_engines.add(self)

    def run(self, requests: Sequence[Mapping[str, Any]]) -> list[RequestOutput]:
        """Run requests, each the arguments of ``Engine.add_request``, to their end; their outputs in the same order.

        Raises what refused one of them, in this thread only; none of them runs then. EngineClosed after ``close``,
        EngineBusy when called from inside a step, which would wait for itself.
        """
        if self._leading_thread == threading.get_ident():
            raise EngineBusy(
                "the engine is in the middle of a step; what runs inside a step, such as a processor, a criterion or a "
                "hook, must not wait for it: call generate there without cache_impl"
            )
        if not requests:
            return []
        submission = _Submission(requests)
        try:
            with self._lock:
                if self._closed:
                    raise EngineClosed("the engine is closed; make a new one")
                if self.is_lost:
                    raise EngineClosed(
                        "the process was forked while another thread ran this engine; make one in the process that "
                        "uses it"
                    )
                self._inbox.append(submission)
                if self._leader is None:
                    self._appoint(submission)
            submission.wake.wait()
            if not submission.is_over:
                self._lead(submission)
        finally:
            self._leave(submission)
        if submission.error is not None:
            raise submission.error
        return submission.outputs

    @property
    def vocab_size(self) -> int:
        """How many token ids the model has."""
        return self.engine.twin.vocab_size

    @property
    def masks_padding(self) -> bool:
        """Whether stock computes the same for a row however much padding stands on its left, as rows alone do here."""
        return self.engine.twin.masks_padding

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of a request, prompt and output; None without a limit."""
        return self.engine.max_model_len

    def runs_at_once(self, lengths: Sequence[int]) -> bool:
        """Whether requests of these lengths (prompt and output) can all run at the same time, if nothing else does."""
        return self.engine.runs_at_once(lengths)

    def close(self) -> None:
        """Close the engine once nobody uses it; no further call is taken."""
        with self._lock:
            self._closed = True
            if self._leader is None and not self.is_lost and not self.engine.is_closed:
                self.engine.close()

    def _forked(self) -> None:
        """In the child of a fork only the thread that forked exists, and a lock may be held for ever."""
        was_held, self._lock = self._lock.locked(), threading.Lock()
        if self._leading_thread == threading.get_ident():
            # From inside of a step: it goes on, for itself alone.
            self._abandoned += [s for s in {*self._running, *self._inbox} if s is not self._leader]
        else:
            self.is_lost = was_held or self._leader is not None
            self._leader = None

    def _appoint(self, submission: _Submission) -> None:
        self._leader = submission
        submission.wake.set()

    def _lead(self, submission: _Submission) -> None:
        self._leading_thread = threading.get_ident()
        while True:
            self._drop_abandoned()
            self._take_in()
            if submission.is_over:
                return
            assert self.engine.has_unfinished_requests(), "the engine has lost a request"
            self.engine.step(drain=True)
            self._settle()

    def _leave(self, submission: _Submission) -> None:
        """Called by every thread on its way out, whatever ended its wait."""
        with self._lock:
            if self._leader is not submission:
                if not submission.is_over:
                    self._abandoned.append(submission)
                return
            if not submission.is_over:
                self._abandoned.append(submission)
            self._drop_abandoned()
            self._settle()
            self._leading_thread = None
            following = next(iter([*self._running, *self._inbox]), None)
            if following is not None:
                self._appoint(following)
                return
            self._leader = None
            if self._closed and not self.engine.is_closed:
                self.engine.close()

    # What follows is the leader's alone.

    def _take_in(self) -> None:
        for submission in list(self._inbox):
            self._admit(submission)
            if submission.error is not None:
                submission.wake.set()
            elif submission not in self._running:
                self._running.append(submission)
            self._inbox.remove(submission)

    def _admit(self, submission: _Submission) -> None:
        """Add the requests to the engine; one that is refused takes back the others and is the submission's error."""
        try:
            self.engine.fit([n for s in [*self._running, submission] for n in s.lengths])
            # Begins where an interrupted leader stopped.
            for request in submission.requests[len(submission.request_ids) :]:
                # Whoever waits for a result has its requests already, so max_waiting has nothing to hold off.
                prepared = self.engine.prepare(**request)
                self.engine.enqueue(prepared)
                submission.outputs += [sample.output for sample in (prepared, *prepared.forks)]
                submission.request_ids.append(prepared.request_id)
        except Exception as error:
            self._abort(submission)
            submission.error = error

    def _drop_abandoned(self) -> None:
        while self._abandoned:
            submission = self._abandoned[-1]
            self._abort(submission)
            for place in (self._running, self._inbox):
                if submission in place:
                    place.remove(submission)
            self._abandoned.pop()

    def _abort(self, submission: _Submission) -> None:
        for request_id in submission.request_ids:
            try:
                self.engine.abort(request_id)
            except Exception:
                # What makes a broken engine fail must not keep the others from hearing of it.
                logger.exception("request %s could not be aborted", request_id)

    def _settle(self) -> None:
        """Wake those whose requests are over."""
        for submission in [s for s in self._running if s.is_over]:
            self._running.remove(submission)
            submission.wake.set()


class _Submission:
    """One thread's requests, and the event on which it sleeps until they are over or it has to lead.

    lengths: the most tokens, prompt and output, of every sample; the engine itself measures texts and default params.
    """

    def __init__(self, requests: Sequence[Mapping[str, Any]]) -> None:
        self.requests: list[Mapping[str, Any]] = []
        self.lengths: list[int] = []
        for request in requests:
            prompt, params = request["prompt"], request.get("params")
            if params is not None:
                params = sampling_params(params)
                if not isinstance(prompt, str):
                    self.lengths += [len(prompt) + params.max_tokens] * params.n
            self.requests.append({**request, "params": params})
        self.request_ids: list[str] = []
        self.outputs: list[RequestOutput] = []
        self.error: Exception | None = None
        self.wake = threading.Event()

    @property
    def is_over(self) -> bool:
        if self.error is not None:
            return True
        added = len(self.request_ids) == len(self.requests)
        return added and all(output.finished for output in self.outputs)


_shared_engines: weakref.WeakSet[SharedEngine] = weakref.WeakSet()


def _after_fork() -> None:
    for engine in list(_shared_engines):
        engine._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
