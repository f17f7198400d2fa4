"""Lockstep: members choose every token together, however unevenly they come to it."""

from __future__ import annotations

import pytest
import torch
from block_checks import assert_all_blocks_are_back
from oracle import assert_greedy, draw_prompts, stock_greedy
from tiny_models import make_tiny

from paged_backend import Engine, Lockstep, SamplingParams
from paged_backend.errors import SamplingFailed
from paged_backend.policies import KeyedPolicy

LENGTHS = (5, 23, 9, 1, 14, 40)
NUM_TOKENS = 12
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


class Recorder(Lockstep):
    """Changes nothing and keeps what it saw: the members' numbers of output tokens at each call."""

    def __init__(self, change=lambda requests, scores: scores):
        super().__init__()
        self.calls = []
        self.change = change

    def process(self, requests, scores):
        self.calls.append([request.num_output_tokens for request in requests])
        return self.change(requests, scores)


@pytest.fixture(scope="module")
def llama():
    return make_tiny("llama")


@pytest.fixture(scope="module")
def prompts():
    return draw_prompts(LENGTHS)


@pytest.fixture(scope="module")
def expected(llama, prompts):
    return [stock_greedy(llama, prompt, NUM_TOKENS) for prompt in prompts]


def run(engine, prompts, lockstep, params=GREEDY, **options):
    ids = [engine.add_request(prompt, params, lockstep=lockstep, **options) for prompt in prompts]
    outputs = [engine.outputs(request_id)[0] for request_id in ids]
    for _ in range(1000):
        if not engine.has_unfinished_requests():
            break
        engine.step(drain=True)
        engine.blocks.check_integrity()
    assert_all_blocks_are_back(engine)
    return outputs


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7, "block_size": 1},
        {"max_num_batched_tokens": 16, "block_size": 7, "batching": "separate"},
        {"kv_cache_memory": 150_000, "block_size": 4, "max_num_batched_tokens": 16},
    ],
    ids=str,
)
def test_members_come_to_each_token_together_and_get_stocks_tokens(llama, prompts, expected, options):
    lockstep = Recorder()
    outputs = run(Engine(llama, elastic=True, **options), prompts, lockstep)
    assert lockstep.calls == [[step] * len(prompts) for step in range(NUM_TOKENS)]
    for prompt, output, tokens in zip(prompts, outputs, expected, strict=True):
        assert_greedy(llama, prompt, output.token_ids, tokens)


def test_equal_prompts_that_share_blocks_stay_in_step(llama):
    (prompt,) = draw_prompts([16])
    tokens = stock_greedy(llama, prompt, NUM_TOKENS)
    engine = Engine(llama, elastic=True, block_size=4, max_num_batched_tokens=6)
    for _ in range(2):
        lockstep = Recorder()
        outputs = run(engine, [prompt] * 5, lockstep)
        assert lockstep.calls == [[step] * 5 for step in range(NUM_TOKENS)]
        for output in outputs:
            assert_greedy(llama, prompt, output.token_ids, tokens)


def test_what_process_returns_is_what_tokens_are_chosen_from(llama, prompts):
    def only_row_number(requests, scores):
        banned = torch.full_like(scores, -torch.inf)
        for row, request in enumerate(requests):
            banned[row, 100 + request.num_prompt_tokens] = 0
        return banned

    outputs = run(Engine(llama, elastic=True), prompts, Recorder(only_row_number))
    assert [output.token_ids for output in outputs] == [[100 + len(p)] * NUM_TOKENS for p in prompts]


def test_members_that_end_leave_the_others_in_step(llama, prompts, expected):
    lockstep = Recorder()
    engine = Engine(llama, elastic=True)
    outputs = run(
        engine, prompts, lockstep, stop_condition=lambda r: r.num_output_tokens == 2 + r.num_prompt_tokens % 5
    )
    ends = [2 + len(prompt) % 5 for prompt in prompts]
    assert [len(output.token_ids) for output in outputs] == ends
    assert [len(call) for call in lockstep.calls] == [sum(end > step for end in ends) for step in range(max(ends))]
    for output, tokens in zip(outputs, expected, strict=True):
        assert output.token_ids == tokens[: len(output.token_ids)]


def test_stop_conditions_see_the_tokens_of_all_members(llama, prompts):
    lockstep = Recorder()
    seen = []

    def look(request):
        seen.append({member.num_output_tokens for member in lockstep.members if not member.is_finished})
        return False

    run(Engine(llama, elastic=True), prompts, lockstep, stop_condition=look)
    # The last members to be asked find those before them finished by their length.
    assert all(len(lengths) == 1 for lengths in seen)


def test_other_requests_go_on_while_members_are_held(llama, prompts, expected):
    engine = Engine(llama, elastic=True, max_num_batched_tokens=4)
    other = engine.outputs(engine.add_request([7, 8, 9], GREEDY))[0]
    outputs = run(engine, prompts, Recorder())
    assert_greedy(llama, [7, 8, 9], other.token_ids, stock_greedy(llama, [7, 8, 9], NUM_TOKENS))
    # It was through long before the last member had its first token.
    assert other.metrics.finished_time < min(output.metrics.first_token_time for output in outputs)


def test_sampled_members_draw_from_their_own_streams(llama, prompts):
    params = [SamplingParams(max_tokens=6, temperature=1.0, seed=n, ignore_eos=True) for n in range(len(prompts))]
    alone = [
        Engine(llama, elastic=True).generate(prompt, p)[0].token_ids for prompt, p in zip(prompts, params, strict=True)
    ]
    engine, lockstep = Engine(llama, elastic=True), Recorder()
    ids = [engine.add_request(prompt, p, lockstep=lockstep) for prompt, p in zip(prompts, params, strict=True)]
    outputs = [engine.outputs(request_id)[0] for request_id in ids]
    while engine.has_unfinished_requests():
        engine.step()
    assert [output.token_ids for output in outputs] == alone


@pytest.mark.parametrize(
    ("change", "error"),
    [(lambda requests, scores: 1 / 0, ZeroDivisionError), (lambda requests, scores: scores[:, :5], SamplingFailed)],
    ids=["raises", "wrong shape"],
)
def test_an_exception_fails_all_members_and_no_other_request(llama, prompts, change, error):
    engine = Engine(llama, elastic=True)
    other = engine.outputs(engine.add_request([7, 8, 9], GREEDY))[0]
    outputs = run(engine, prompts, Recorder(change))
    assert all(isinstance(output.error, error) for output in outputs)
    assert other.finish_reason == "length"


def test_an_aborted_member_does_not_hold_the_others(llama, prompts):
    engine, lockstep = Engine(llama, elastic=True, max_num_batched_tokens=4), Recorder()
    ids = [engine.add_request(prompt, GREEDY, lockstep=lockstep) for prompt in prompts]
    outputs = [engine.outputs(request_id)[0] for request_id in ids]
    engine.step()
    engine.abort(ids[-1])
    while engine.has_unfinished_requests():
        engine.step()
    assert [output.finish_reason for output in outputs] == ["length"] * 5 + ["abort"]


class ByArrival(KeyedPolicy):
    """The base of policies that would part the members of a lockstep."""

    def key(self, request):
        return request.order


class OneAtATime(ByArrival):
    def candidates(self, now):
        if not self.running:
            yield from super().candidates(now)

    running = False

    def remove(self, request):
        super().remove(request)
        self.running = self.running or not request.is_waiting

    def on_finished(self, request, now):
        self.running = False


class OthersFirst(ByArrival):
    def key(self, request):
        return request.metadata is not None, request.order


class SetsAside(ByArrival):
    """Sets anybody aside for anybody, and members first when memory runs out."""

    def preempts(self, candidate, running, now):
        return running[0]

    def victim(self, running, now):
        return max(running, key=lambda request: (request.metadata is not None, request.order))


class Nobody(ByArrival):
    def candidates(self, now):
        return iter(())


POLICIES = {
    "static": ("static", {"batch": 4}),
    "window": ("window", {"batch": 4, "window_ms": 1}),
    "one at a time": (OneAtATime, {}),
    "others first": (OthersFirst, {}),
    "sets aside": (SetsAside, {}),
    "nobody": (Nobody, {}),
}


@pytest.mark.parametrize("memory", [None, 150_000], ids=["room for all", "little room"])
@pytest.mark.parametrize(("scheduler", "options"), POLICIES.values(), ids=POLICIES)
def test_no_policy_parts_members_for_ever(llama, prompts, expected, scheduler, options, memory):
    engine = Engine(
        llama, block_size=4, max_num_seqs=8, kv_cache_memory=memory, scheduler=scheduler, scheduler_options=options
    )
    others = [engine.outputs(engine.add_request([n, 8, 9], GREEDY))[0] for n in range(3, 6)]
    lockstep = Recorder()
    ids = [engine.add_request(prompt, GREEDY, lockstep=lockstep, metadata="member") for prompt in prompts[:3]]
    others += [engine.outputs(engine.add_request([n, 8, 9], GREEDY))[0] for n in range(6, 9)]
    ids += [engine.add_request(prompt, GREEDY, lockstep=lockstep, metadata="member") for prompt in prompts[3:]]
    outputs = [engine.outputs(request_id)[0] for request_id in ids]
    run(engine, [], lockstep)
    assert lockstep.calls == [[step] * len(prompts) for step in range(NUM_TOKENS)]
    assert all(output.finish_reason == "length" for output in others)
    for prompt, output, tokens in zip(prompts, outputs, expected, strict=True):
        assert_greedy(llama, prompt, output.token_ids, tokens)


@pytest.mark.parametrize("scheduler", ["fifo", "static", SetsAside, Nobody])
def test_two_locksteps_that_do_not_fit_side_by_side_run_one_after_the_other(llama, prompts, scheduler):
    engine = Engine(llama, elastic=True, max_num_seqs=5, scheduler=scheduler)
    locksteps = [Recorder(), Recorder()]
    for prompt in prompts[:4]:
        for lockstep in locksteps:
            engine.add_request(prompt, GREEDY, lockstep=lockstep)
    run(engine, [], None)
    assert [lockstep.calls for lockstep in locksteps] == [[[step] * 4 for step in range(NUM_TOKENS)]] * 2


def test_a_batch_goes_on_until_the_last_member_that_joined_it_is_over(llama, prompts):
    engine = Engine(llama, elastic=True, scheduler="static", scheduler_options={"batch": 2})
    lockstep = Recorder()
    for prompt in prompts:
        engine.add_request(prompt, GREEDY, lockstep=lockstep, stop_condition=lambda r: r.num_prompt_tokens != 40)
    later = engine.outputs(engine.add_request([7, 8, 9], GREEDY))[0]
    run(engine, [], None)
    assert [len(call) for call in lockstep.calls] == [6] + [1] * (NUM_TOKENS - 1)
    assert later.metrics.first_scheduled_time > max(m.output.metrics.finished_time for m in lockstep.members)


def test_whether_requests_run_at_once_is_known_beforehand(llama):
    assert Engine(llama, elastic=True, max_num_seqs=3).runs_at_once([1000] * 3)
    assert not Engine(llama, elastic=True, max_num_seqs=3).runs_at_once([10] * 4)
    engine = Engine(llama, kv_cache_memory=60_000)
    assert engine.runs_at_once([16] * 2)
    assert not engine.runs_at_once([100] * 2)
    (prefix,) = draw_prompts([16])
    engine.pin_prefix(prefix)
    engine.generate([*prefix, 5], SamplingParams(max_tokens=1))
    assert not engine.runs_at_once([16] * 2)
