"""The positions at which a model may begin to compute otherwise."""

from __future__ import annotations

from transformers import LlamaConfig

from paged_backend.model.position_limit import far_positions

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 700}


def test_far_positions_are_the_last_the_powers_of_two_and_the_numbers_of_the_configuration() -> None:
    config = LlamaConfig(max_position_embeddings=900, rope_parameters=YARN, floor_scale=600, vocab_size=800)
    assert far_positions(config, 2000, 9) == [1999, 1024, 900, 899, 700, 699, 600, 599, 512]


def test_every_token_gets_one_where_there_are_fewer_than_tokens() -> None:
    assert far_positions(LlamaConfig(max_position_embeddings=6), 6, 6) == [5, 4, 2, 1, 5, 4]
