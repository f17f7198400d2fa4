"""Request: one sequence that is being generated, from what its caller submitted to what is computed of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from paged_backend.outputs import RequestMetrics, RequestOutput
from paged_backend.request.continued_tokens import ContinuedTokens
from paged_backend.request.lockstep import Lockstep
from paged_backend.request.state import RequestState
from paged_backend.request.view import RequestView
from paged_backend.sampling_params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor


class Request:
    """One sequence being generated. The scheduler, the block manager and the sampler fill it in; plugins see a view.

    token_ids: prompt and output together, num_tokens of them; a prompt that is no list is not copied, and read as it is
    asked for. num_computed_tokens: how many of them have keys and values in the cache.
    num_scheduled_tokens: how many the current step feeds. num_lost_tokens: how many the last preemption took.
    prompt_embeds: what is fed in place of the prompt's tokens, [num_prompt_tokens, D], or None.
    prefix_node: while it waits, the last node in the tree of prefixes that its tokens lead to.
    seat: its row in the block tables while it holds one. forks: samples that split off when the prompt is computed.
    """

    __slots__ = (
        "_view",
        "arrival_time",
        "cache_salt",
        "client_id",
        "deadline",
        "forks",
        "last_scheduled_time",
        "lockstep",
        "metadata",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_lost_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_scheduled_tokens",
        "num_tokens",
        "order",
        "output",
        "overtaken",
        "params",
        "prefix_node",
        "priority",
        "prompt_embeds",
        "queue_limit",
        "request_id",
        "sampling_state",
        "seat",
        "state",
        "stop_condition",
        "time_limit",
        "token_ids",
        "tokens_since_admission",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        arrival_time: float,
        order: int,
        *,
        index: int = 0,
        priority: int = 0,
        deadline: float | None = None,
        time_limit: float | None = None,
        queue_limit: float | None = None,
        client_id: str | None = None,
        cache_salt: str | None = None,
        stop_condition: Callable[[Request], bool] | None = None,
        metadata: Any = None,
        lockstep: Lockstep | None = None,
        prompt_embeds: Tensor | None = None,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.arrival_time = arrival_time
        self.order = order
        self.priority = priority
        self.deadline = deadline
        self.time_limit = time_limit
        self.queue_limit = queue_limit
        self.client_id = client_id
        self.cache_salt = cache_salt
        self.stop_condition = stop_condition
        self.metadata = metadata
        self.lockstep = lockstep
        self.prompt_embeds = prompt_embeds
        self.state = RequestState.WAITING
        self.token_ids: list[int] | ContinuedTokens = (
            list(prompt_token_ids) if isinstance(prompt_token_ids, list) else ContinuedTokens(prompt_token_ids)
        )
        self.num_prompt_tokens = self.num_tokens = len(prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_scheduled_tokens = 0
        self.num_lost_tokens = 0
        self.num_preemptions = 0
        self.tokens_since_admission = 0
        self.last_scheduled_time: float | None = None
        self.overtaken = 0
        self.seat: int | None = None
        self.prefix_node: Any = None
        self.forks: tuple[Request, ...] = ()
        self.sampling_state: Any = None
        self._view: RequestView | None = None
        self.output = RequestOutput(request_id, index, prompt_token_ids, RequestMetrics(arrival_time))

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_known_tokens(self) -> int:
        """Leading tokens of a waiting request that the cache knows, though a part may have been dropped again."""
        return 0 if self.prefix_node is None else self.prefix_node.depth * len(self.prefix_node.tokens)

    @property
    def max_num_tokens(self) -> int:
        """The most tokens, prompt and output, this request can come to."""
        return self.num_prompt_tokens + self.params.max_tokens

    @property
    def num_seats(self) -> int:
        """Rows of the batch that admitting it takes: its own and its forks'."""
        return 1 + len(self.forks)

    @property
    def view(self) -> RequestView:
        """What policies and hooks get to see of this request."""
        if self._view is None:
            self._view = RequestView(self)
        return self._view

    def forget_view(self) -> None:
        """Break the cycle with the view, so that a finished request goes with its last reference."""
        self._view = None

    @property
    def is_waiting(self) -> bool:
        return self.state is RequestState.WAITING

    @property
    def is_decoding(self) -> bool:
        return self.state is RequestState.DECODE

    @property
    def is_held(self) -> bool:
        """All of its tokens are computed, and the next one is not chosen before others of its lockstep come so far."""
        return self.state is RequestState.DECODE and self.num_tokens == self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED

    def append_token(self, token: int) -> None:
        self.token_ids.append(token)
        self.output.token_ids.append(token)
        self.num_tokens += 1
        self.tokens_since_admission += 1

    def replace_last_token(self, token: int) -> None:
        """Let another token stand, and be fed, in the place of the last one, which nothing was computed of yet."""
        if isinstance(self.token_ids, list):
            self.token_ids[-1] = token
        else:
            self.token_ids.replace_last(token)
        self.output.token_ids[-1] = token
        self.output.new_token_ids = [token]
        # It follows from the tokens.
        self.sampling_state = None

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.state.value}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )
