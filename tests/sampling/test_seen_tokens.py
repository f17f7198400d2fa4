"""The tokens a request holds are found once each, in order, and counted where the output holds them."""

from __future__ import annotations

from paged_backend.sampling.seen_tokens import SeenTokens


def test_distinct_tokens_are_seen_in_order_and_counted_in_the_output_only() -> None:
    seen, tokens = SeenTokens(vocab_size=10), [3, 5, 3, 12, 7]
    ids, counts = seen.update(tokens, num_prompt_tokens=3)
    # 12 is none that logits are given for.
    assert (ids.tolist(), counts.tolist()) == ([3, 5, 7], [0, 0, 1])
    ids, counts = seen.update([*tokens, 5, 7, 1], num_prompt_tokens=3)
    assert (ids.tolist(), counts.tolist()) == ([3, 5, 7, 1], [0, 1, 2, 1])


def test_more_distinct_tokens_than_there_was_room_for_are_all_seen() -> None:
    seen, tokens = SeenTokens(vocab_size=1000), [*range(300)]
    for count in (10, 64, 65, 300):
        ids, counts = seen.update(tokens[:count], num_prompt_tokens=2)
        assert ids.tolist() == tokens[:count]
        assert counts.tolist() == [0, 0, *[1] * (count - 2)]
