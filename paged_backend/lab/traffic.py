"""Traffic: requests drawn at random, as long and as often as those of a kind are."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

from paged_backend.checks import checked_amount, checked_int, describe
from paged_backend.errors import ConfigError
from paged_backend.lab.trace import TraceRequest, checked_time

ARRIVALS = ("poisson", "bursts", "at-once", "trace")
LENGTHS = ("uniform", "heavy", "short", "trace")
# Of the requests that arrive in bursts, so many come at once.
BURST = 8
# Of traffic that is mostly short, this share is, and a short request is at most so long, of the longest.
SHORT_SHARE, SHORT_LENGTH = 0.7, 1 / 8
MAX_REQUESTS = 1_000_000
MAX_LENGTH = 1_000_000


@dataclass(frozen=True)
class Traffic:
    """What requests are drawn.

    lengths: of prompt and output together, in tokens, half of which are the prompt on average. ``uniform``: from
    shortest to longest. ``heavy``: their logarithms normally distributed, most near the geometric mean. ``short``: 70 %
    are uniform up to an eighth of the longest, the others uniform from half of it. ``trace``: those of ``trace`` in
    turn, as far as they are within shortest and longest. seed: where random numbers start.

    Raises ConfigError for what cannot be drawn.
    """

    num_requests: int = 32
    lengths: str = "uniform"
    shortest: int = 64
    longest: int = 1024
    seed: int = 0
    trace: Sequence[TraceRequest] = ()

    def __post_init__(self) -> None:
        checked_int("num_requests", self.num_requests, 1, MAX_REQUESTS)
        checked_int("shortest", self.shortest, 4)
        checked_int("longest", self.longest, self.shortest, MAX_LENGTH)
        _check_known("lengths", self.lengths, LENGTHS)
        if self.lengths == "trace" and not self.trace:
            raise ConfigError("lengths='trace' needs a trace to take them from")

    def draw(self, vocab_size: int = 1000) -> list[TraceRequest]:
        """The requests, all of which arrive at once, with prompts of random tokens."""
        # Lengths have a stream of their own, so that they are the same for every vocabulary.
        rng, lengths = random.Random(self.seed), self._lengths(random.Random(self.seed))
        requests = []
        for num_prompt_tokens, num_output_tokens in islice(lengths, self.num_requests):
            prompt = [rng.randrange(vocab_size) for _ in range(num_prompt_tokens)]
            requests.append(TraceRequest(0.0, prompt, num_output_tokens))
        return requests

    def scaled(self, scale: float) -> Traffic:
        """The same with lengths of ``scale`` times as many tokens."""
        checked_amount("scale", scale, positive=True)
        shortest, longest = (round(min(length * scale, MAX_LENGTH + 1)) for length in (self.shortest, self.longest))
        return replace(self, shortest=max(4, shortest), longest=max(4, longest))

    def is_short(self, request: TraceRequest) -> bool:
        """Whether a request is one of the short ones of traffic that is mostly short."""
        return len(request.prompt) + request.output_length <= self._short

    @property
    def _short(self) -> int:
        return max(self.shortest, int(self.longest * SHORT_LENGTH))

    def _lengths(self, rng: random.Random) -> Iterator[tuple[int, int]]:
        """Of prompt and output."""
        if self.lengths == "trace":
            for request in cycle(self.trace):
                shrink = max(1.0, (len(request.prompt) + request.output_length) / self.longest)
                yield max(1, int(len(request.prompt) / shrink)), max(1, int(request.output_length / shrink))
        while True:
            length = self._length(rng)
            prompt = min(length - 1, max(1, round(length * rng.uniform(0.25, 0.75))))
            yield prompt, length - prompt

    def _length(self, rng: random.Random) -> int:
        if self.lengths == "uniform":
            return rng.randint(self.shortest, self.longest)
        if self.lengths == "short":
            if rng.random() < SHORT_SHARE:
                return rng.randint(self.shortest, self._short)
            return rng.randint(max(self._short, self.longest // 2), self.longest)
        middle = math.log(self.shortest * self.longest) / 2
        spread = math.log(self.longest / self.shortest) / 4
        return min(self.longest, max(self.shortest, round(rng.lognormvariate(middle, spread))))


def arriving(
    requests: Sequence[TraceRequest], arrivals: str, rate: float, seed: int = 0, trace: Sequence[TraceRequest] = ()
) -> list[TraceRequest]:
    """``requests`` at their times: ``rate`` a second on average.

    ``poisson``: each independent of the others. ``bursts``: eight at once, bursts independent. ``at-once``: all at
    once. ``trace``: at the pace of ``trace``, sped up to the rate. Raises ConfigError for what cannot be.
    """
    _check_known("arrivals", arrivals, ARRIVALS)
    if arrivals == "at-once":
        return [replace(request, arrival=0.0) for request in requests]
    checked_amount("rate", rate, positive=True)
    rng, now = random.Random(seed), 0.0
    times = []
    if arrivals == "trace":
        paced = trace[: len(requests)]
        if len(paced) < len(requests) or not paced[-1].arrival:
            raise ConfigError(
                f"arrivals='trace' needs a trace of at least {len(requests)} requests over some time, got {len(paced)}"
            )
        scale = len(requests) / rate / paced[-1].arrival
        times = [request.arrival * scale for request in paced]
    else:
        size = BURST if arrivals == "bursts" else 1
        while len(times) < len(requests):
            times += [now] * size
            now += rng.expovariate(rate / size)
    return [replace(request, arrival=checked_time(time)) for request, time in zip(requests, times, strict=False)]


def _check_known(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"{name}={describe(value)} is unknown; choose from {', '.join(known)}")
