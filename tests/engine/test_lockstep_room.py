"""A lockstep whose members could never run at the same time is refused with the numbers, and no other is."""

from __future__ import annotations

import pytest
from oracle import draw_prompts
from recurrent_models import make_recurrent
from tiny_models import make_tiny

from paged_backend import Engine, Lockstep, SamplingParams
from paged_backend.errors import RequestRefused

# Of 60,000 bytes the tiny model's cache makes 4 blocks of 16 tokens.
FOUR_BLOCKS = {"kv_cache_memory": 60_000}


class Unchanged(Lockstep):
    def process(self, requests, scores):
        return scores


@pytest.fixture(scope="module")
def llama():
    return make_tiny("llama")


def params(max_tokens: int, **fields) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **fields)


def finish_reasons(engine: Engine, request_ids: list[str]) -> list[str | None]:
    outputs = [output for request_id in request_ids for output in engine.outputs(request_id)]
    for _ in range(300):
        if not engine.has_unfinished_requests():
            break
        engine.step(drain=True)
    return [output.finish_reason for output in outputs]


@pytest.mark.parametrize(
    ("options", "max_tokens", "numbers"),
    [
        (
            {"max_num_seqs": 2},
            5,
            "3 members of one lockstep would have to run at once, and max_num_seqs is 2; raise it",
        ),
        (FOUR_BLOCKS, 21, "3 members .* need 6 blocks of 16 tokens in the full attention group, which has 4 that are"),
    ],
    ids=["seats", "memory"],
)
def test_the_member_that_is_one_too_many_is_refused_and_the_others_go_on(llama, options, max_tokens, numbers):
    assert_one_too_many_is_refused(Engine(llama, **options), max_tokens, numbers)


def test_the_member_whose_recurrent_state_finds_no_memory_is_refused_and_the_others_go_on():
    model = make_recurrent("qwen3_next")
    with Engine(model) as engine:
        # Of each request two, in half of the memory.
        memory = 2 * 2 * 2 * engine.runner.states.bytes_per_slot
    numbers = "3 members .* at once, and kv_cache_memory holds the states of 2; raise it"
    assert_one_too_many_is_refused(Engine(model, kv_cache_memory=memory), 5, numbers)


def assert_one_too_many_is_refused(engine: Engine, max_tokens: int, numbers: str) -> None:
    lockstep = Unchanged()
    prompts = draw_prompts([3, 3, 3])
    # A member that is over takes no room.
    before = engine.add_request(prompts[2], params(max_tokens), lockstep=lockstep)
    assert finish_reasons(engine, [before]) == ["length"]
    members = [engine.add_request(prompt, params(max_tokens), lockstep=lockstep) for prompt in prompts[:2]]
    with pytest.raises(RequestRefused, match=numbers):
        engine.add_request(prompts[2], params(max_tokens), lockstep=lockstep)
    assert finish_reasons(engine, members) == ["length"] * 2


def test_samples_of_one_request_count_as_members(llama):
    engine, lockstep = Engine(llama, max_num_seqs=3), Unchanged()
    engine.add_request([5, 6], params(4), lockstep=lockstep)
    with pytest.raises(RequestRefused, match="4 members of one lockstep"):
        engine.add_request([5, 6], params(4, n=3, temperature=1.0), lockstep=lockstep)


@pytest.mark.parametrize("length", [16, 17, 35], ids=lambda length: f"{length} tokens")
def test_members_with_equal_beginnings_need_its_blocks_once(llama, length):
    engine, lockstep = Engine(llama, **FOUR_BLOCKS), Unchanged()
    (prompt,) = draw_prompts([length])
    members = [engine.add_request(prompt, params(5), lockstep=lockstep) for _ in range(2)]
    assert finish_reasons(engine, members) == ["length"] * 2
    engine = Engine(llama, enable_prefix_caching=False, **FOUR_BLOCKS)
    lockstep = Unchanged()
    engine.add_request(prompt, params(5), lockstep=lockstep)
    if length < 33:
        engine.add_request(prompt, params(5), lockstep=lockstep)
    else:
        with pytest.raises(RequestRefused, match="need 6 blocks"):
            engine.add_request(prompt, params(5), lockstep=lockstep)


def test_members_that_just_fit_are_taken_and_run(llama):
    engine, lockstep = Engine(llama, **FOUR_BLOCKS), Unchanged()
    # The last of 33 tokens is never stored.
    members = [engine.add_request(prompt, params(30), lockstep=lockstep) for prompt in draw_prompts([3, 3])]
    assert finish_reasons(engine, members) == ["length"] * 2


def test_a_prefix_whose_pin_would_keep_a_lockstep_from_running_is_refused(llama):
    engine, lockstep = Engine(llama, **FOUR_BLOCKS), Unchanged()
    members = [engine.add_request(prompt, params(30), lockstep=lockstep) for prompt in draw_prompts([3, 3])]
    (prefix,) = draw_prompts([16], seed=1)
    with pytest.raises(RequestRefused, match=r"2 members .* need 4 blocks .* which has 3 that are not pinned"):
        engine.pin_prefix(prefix)
    assert not engine.unpin_prefix(prefix)
    assert finish_reasons(engine, members) == ["length"] * 2
    assert engine.pin_prefix(prefix) == 16


def test_members_of_a_lockstep_find_room_in_the_pinned_blocks_that_they_begin_with(llama):
    engine, lockstep = Engine(llama, **FOUR_BLOCKS), Unchanged()
    (prompt,) = draw_prompts([20])
    # One block for what they share, one for each.
    members = [engine.add_request(prompt, params(10), lockstep=lockstep) for _ in range(3)]
    assert engine.pin_prefix(prompt) == 16
    assert finish_reasons(engine, members) == ["length"] * 3
    members = [engine.add_request(prompt, params(10), lockstep=lockstep) for _ in range(3)]
    assert finish_reasons(engine, members) == ["length"] * 3
    engine.add_request(prompt, params(10), lockstep=lockstep, cache_salt="apart")
    with pytest.raises(RequestRefused, match=r"need 4 blocks .* which has 3 that are not pinned"):
        engine.add_request(prompt, params(10), lockstep=lockstep, cache_salt="apart too")
