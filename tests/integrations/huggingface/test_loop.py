"""Processors, criteria and streamers are called as stock calls them: with all rows, step by step."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from block_checks import assert_all_blocks_are_back
from stock_equality import (
    LENGTH,
    RAGGED,
    assert_equals_stock,
    assert_same_cache,
    assert_same_scores,
    engine_of,
    left_padded,
    paged,
    tokens_drawn_early,
)
from tiny_models import make_tiny
from tiny_tokenizers import byte_level_bpe
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    TextIteratorStreamer,
    TextStreamer,
    WatermarkingConfig,
)

from paged_backend.errors import SamplingFailed, UnsupportedCall

# Processors and criteria


def bias_even_tokens(input_ids, scores):
    scores = scores.clone()
    scores[:, ::2] += 1.0
    return scores


PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.4},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.4},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram": {"encoder_no_repeat_ngram_size": 1},
    "bad_words": {"bad_words_ids": [[7], [229, 229]]},
    "sequence_bias": {"sequence_bias": {(7,): 4.0, (229, 143): -5.0}},
    "forced_eos": {"forced_eos_token_id": 9},
    "suppress": {"suppress_tokens": [229, 251]},
    "begin_suppress": {"begin_suppress_tokens": [229, 251]},
    "decay": {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 17},
    "renormalize": {"renormalize_logits": True, "remove_invalid_values": True},
    "prefix": {"prefix_allowed_tokens_fn": lambda row, tokens: [20 + row, 30 + row, 40 + len(tokens)]},
    "guidance": {"guidance_scale": 1.7},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="selfhash", context_width=2)},
    "synthid": {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[5, 4, 3, 2], ngram_len=3)},
    "minimum and ngram": {"min_new_tokens": 9, "no_repeat_ngram_size": 2, "eos_token_id": [229, 17, 251]},
    "user": {"logits_processor": LogitsProcessorList([bias_even_tokens])},
}


@pytest.mark.parametrize("options", PROCESSORS.values(), ids=PROCESSORS.keys())
def test_a_processor_acts_on_every_row_as_in_stock(llama, options):
    assert_equals_stock(llama, RAGGED, **{**LENGTH, **options})


@pytest.mark.parametrize(
    "name", ["encoder_repetition_penalty", "encoder_no_repeat_ngram", "prefix", "repetition_penalty"]
)
def test_a_processor_that_knows_the_rows_follows_their_expansion_as_in_stock(llama, name):
    options = {**LENGTH, "do_sample": True, "top_k": 1, "num_return_sequences": 2, **PROCESSORS[name]}
    assert_equals_stock(llama, RAGGED, **options, logits_processor=LogitsProcessorList([bias_even_tokens]))


def test_negative_prompts_guide_as_in_stock(llama):
    negative = left_padded([4, 4, 2, 4, 3], seed=5)
    assert_equals_stock(
        llama,
        RAGGED,
        **LENGTH,
        guidance_scale=1.5,
        negative_prompt_ids=negative["input_ids"],
        negative_prompt_attention_mask=negative["attention_mask"],
    )


class Spy:
    """Remembers what it is called with, as a processor, a criterion or a streamer."""

    def __init__(self, answer=None):
        self.calls = []
        self.answer = answer

    def __call__(self, input_ids, scores):
        self.calls.append((input_ids.clone(), scores if scores is None else scores.clone()))
        return scores if self.answer is None else self.answer

    def put(self, tokens):
        self.calls.append((tokens, None))

    def end(self):
        self.calls.append("end")


def assert_same_calls(ours, stocks):
    assert len(ours.calls) == len(stocks.calls)
    for mine, theirs in zip(ours.calls, stocks.calls, strict=True):
        if theirs == "end":
            assert mine == "end"
            continue
        assert torch.equal(mine[0], theirs[0])
        assert mine[0].dtype == theirs[0].dtype
        assert (mine[1] is None) == (theirs[1] is None)
        if mine[1] is not None:
            torch.testing.assert_close(mine[1], theirs[1], rtol=1e-4, atol=1e-3)


# With a prefill budget of 5 tokens the rows come to their first token one after another.
@pytest.mark.parametrize("paged_config", [None, {"max_num_batched_tokens": 5}], ids=str)
@pytest.mark.parametrize("ends", [False, True], ids=["to the end", "rows end early"])
def test_processors_and_criteria_and_streamers_are_called_exactly_as_stock_calls_them(llama, paged_config, ends):
    options = {**LENGTH, "eos_token_id": tokens_drawn_early(llama, 4) if ends else None, "pad_token_id": 9}
    spies = []
    for way in ({}, {"cache_impl": "paged", "paged_config": paged_config}):
        processor, criterion, streamer = Spy(), Spy(answer=False), Spy()
        llama.generate(
            **RAGGED,
            **options,
            **way,
            logits_processor=LogitsProcessorList([processor]),
            stopping_criteria=StoppingCriteriaList([criterion]),
            streamer=streamer,
        )
        spies.append((processor, criterion, streamer))
    for theirs, ours in zip(*spies, strict=True):
        assert_same_calls(ours, theirs)


def test_a_processor_that_mixes_rows_acts_as_in_stock(llama):
    def lean_towards_the_others(input_ids, scores):
        return scores + 0.5 * scores.mean(dim=0, keepdim=True)

    processors = LogitsProcessorList([lean_towards_the_others])
    eos = tokens_drawn_early(llama, 3)
    assert_equals_stock(llama, RAGGED, **{**LENGTH, "eos_token_id": eos}, logits_processor=processors)
    assert_equals_stock(
        llama, RAGGED, **LENGTH, logits_processor=processors, paged_config={"max_num_batched_tokens": 5}
    )


def rewrite_last(input_ids, scores, **kwargs):
    """Puts another token in the place of the last one."""
    input_ids[:, -1] = (input_ids[:, -1] * 7 + 3) % 250
    return False


def rewrite_earlier(input_ids, scores, **kwargs):
    """Changes what is shown of the tokens before the last one."""
    input_ids[:, -3:-1] += 1
    return False


@pytest.mark.parametrize("rewrite", [rewrite_last, rewrite_earlier])
@pytest.mark.parametrize("as_what", ["criterion", "processor"])
def test_tokens_that_are_written_over_in_place_are_shown_and_fed_as_in_stock(llama, rewrite, as_what):
    def process(input_ids, scores):
        rewrite(input_ids, scores)
        return scores

    options = {"return_dict_in_generate": True, "output_scores": True}
    if as_what == "criterion":
        options["stopping_criteria"] = StoppingCriteriaList([rewrite])
    else:
        options["logits_processor"] = LogitsProcessorList([process])
    inputs = left_padded([9, 5, 12])
    # Both ways may change the prompts that they are given.
    theirs = llama.generate(**{name: value.clone() for name, value in inputs.items()}, **LENGTH, **options)
    ours = paged(llama, {name: value.clone() for name, value in inputs.items()}, **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert_same_scores(ours.scores, theirs.scores)
    assert_same_cache(ours.cache, theirs.cache)


def test_a_token_that_is_written_over_without_a_cache_is_refused_where_stock_feeds_it_again(llama):
    last, earlier = StoppingCriteriaList([rewrite_last]), StoppingCriteriaList([rewrite_earlier])
    assert_equals_stock(llama, left_padded([9]), **LENGTH, stopping_criteria=last, use_cache=False)
    with pytest.raises(UnsupportedCall, match="writes over earlier tokens while use_cache=False"):
        paged(llama, left_padded([9]), stopping_criteria=earlier, use_cache=False)


def test_a_token_outside_the_vocabulary_that_a_criterion_writes_fails_its_call_alone(fresh):
    def spoil(input_ids, scores):
        input_ids[:, -1] = 256
        return False

    with pytest.raises(SamplingFailed, match="token 256"):
        paged(fresh, stopping_criteria=StoppingCriteriaList([spoil]))
    assert_all_blocks_are_back(engine_of(fresh))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float64, torch.float16])
def test_a_processor_of_values_of_another_type_acts_as_in_stock(llama, dtype):
    def process(input_ids, scores):
        return (scores * 1000).clamp(-30000, 30000).to(dtype)

    assert_equals_stock(llama, left_padded([9, 5]), **LENGTH, logits_processor=LogitsProcessorList([process]))


def test_a_processor_with_a_state_of_its_own_acts_as_in_stock(llama):
    class Alternates(LogitsProcessor):
        def __init__(self):
            self.calls = 0

        def __call__(self, input_ids, scores):
            self.calls += 1
            return -scores if self.calls % 2 else scores

    stock = llama.generate(**RAGGED, **LENGTH, logits_processor=LogitsProcessorList([Alternates()]))
    out = paged(llama, logits_processor=LogitsProcessorList([Alternates()]), paged_config={"block_size": 7})
    assert torch.equal(out, stock)


def test_a_criterion_that_answers_for_the_whole_batch_acts_as_in_stock(llama):
    token = int(llama.generate(**RAGGED, **LENGTH)[2, 44])

    def first_row_decides(input_ids, scores):
        return bool(input_ids[2, -1] == token)

    stops = StoppingCriteriaList([first_row_decides])
    out = assert_equals_stock(
        llama, RAGGED, **LENGTH, stopping_criteria=stops, paged_config={"max_num_batched_tokens": 9}
    )
    assert out.shape[1] == 45


class StopAt(StoppingCriteria):
    """Ends a row at a token."""

    def __init__(self, *tokens):
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids, scores, **kwargs):
        return torch.isin(input_ids[:, -1], self.tokens)


def test_a_criterion_of_the_caller_ends_rows_as_in_stock(llama):
    stops = StoppingCriteriaList([StopAt(*tokens_drawn_early(llama, 3))])
    assert_equals_stock(llama, RAGGED, **{**LENGTH, "eos_token_id": 2}, stopping_criteria=stops)


def test_without_an_end_of_sequence_token_finished_rows_go_on_as_in_stock(llama):
    new = llama.generate(**RAGGED, **LENGTH)[:, 40:]
    stops = StoppingCriteriaList([StopAt(*(int(row[4]) for row in new))])
    out = assert_equals_stock(llama, RAGGED, **LENGTH, stopping_criteria=stops)
    assert out.shape[1] < 56
    assert_equals_stock(llama, RAGGED, **LENGTH, stopping_criteria=stops, paged_config={"max_num_batched_tokens": 9})


def test_rows_that_have_to_run_at_once_get_the_seats_for_it_unless_the_caller_forbids(llama):
    inputs = left_padded([1 + n % 3 for n in range(300)])
    options = {**LENGTH, "max_new_tokens": 2, "no_repeat_ngram_size": 1}
    assert_equals_stock(llama, inputs, **options)
    for paged_config in ({"max_num_seqs": 299}, {"kv_cache_memory": 400_000, "max_num_seqs": 300}):
        with pytest.raises(UnsupportedCall, match=r"300 rows.*max_num_seqs or kv_cache_memory"):
            paged(llama, inputs, **options, paged_config=paged_config)


@pytest.mark.parametrize("scheduler", ["static", "window"])
def test_rows_in_step_equal_stock_whatever_batches_the_scheduler_makes(fresh, scheduler):
    options = {**LENGTH, "max_new_tokens": 4, "no_repeat_ngram_size": 2}
    paged_config = {"scheduler": scheduler, "scheduler_options": {"batch": 2}}
    assert_equals_stock(fresh, left_padded([3, 1, 5, 2, 4]), **options, paged_config=paged_config)
    # Beside other calls too, with fewer rows than the batch.
    calls = [(left_padded([3 + n, 2, 7], seed=n), options if n % 2 else LENGTH) for n in range(6)]
    expected = [fresh.generate(**inputs, **own) for inputs, own in calls]
    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(paged, fresh, inputs, paged_config=paged_config, **own) for inputs, own in calls]
        assert all(map(torch.equal, [future.result(60) for future in futures], expected))


def test_max_time_ends_the_call(llama):
    out = paged(llama, max_new_tokens=200, max_time=0.05)
    assert 41 <= out.shape[1] < 240


def test_an_exception_of_a_processor_is_raised_and_the_engine_goes_on(fresh):
    def fail(input_ids, scores):
        if input_ids.shape[1] == 42:
            raise ZeroDivisionError("mine")
        return scores

    with pytest.raises(ZeroDivisionError, match="mine"):
        paged(fresh, logits_processor=LogitsProcessorList([fail]))
    assert_all_blocks_are_back(engine_of(fresh))
    assert_equals_stock(fresh, RAGGED, **LENGTH)


def test_an_exception_of_a_criterion_is_raised_and_the_engine_goes_on(fresh):
    def fail(input_ids, scores, **kwargs):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        paged(fresh, stopping_criteria=StoppingCriteriaList([fail]))
    assert_all_blocks_are_back(engine_of(fresh))


class Quits(BaseException):
    """What ends a thread, as asyncio.CancelledError does."""


@pytest.mark.parametrize("error", [SystemExit(3), Quits("mine")], ids=repr)
@pytest.mark.parametrize("place", ["criterion", "processor"])
def test_an_exit_in_a_callback_is_raised_in_its_own_call_alone(fresh, error, place):
    def leave(input_ids, scores):
        raise error

    options = {"stopping_criteria": [leave]} if place == "criterion" else {"logits_processor": [leave]}
    expected = paged(fresh)
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(paged, fresh) for _ in range(2)]
        with pytest.raises(type(error)) as caught:
            paged(fresh, **options)
        assert all(torch.equal(other.result(60), expected) for other in others)
    assert caught.value is error
    assert_all_blocks_are_back(engine_of(fresh))


def test_scores_that_leave_no_token_are_refused_where_stock_fails_too(llama):
    def nothing(input_ids, scores):
        return torch.full_like(scores, -torch.inf)

    assert_equals_stock(llama, RAGGED, **LENGTH, logits_processor=LogitsProcessorList([nothing]))
    with pytest.raises(SamplingFailed):
        paged(llama, do_sample=True, logits_processor=LogitsProcessorList([nothing]))


@pytest.mark.parametrize("place", ["streamer", "criterion", "processor"])
def test_ctrl_c_in_the_middle_leaves_a_usable_engine(fresh, place):
    class Interrupts:
        calls = 0

        def put(self, tokens):
            self(tokens, None)

        def end(self):
            raise AssertionError("the stream ended")

        def __call__(self, input_ids, scores):
            self.calls += 1
            if self.calls == 4:
                raise KeyboardInterrupt
            return scores if place == "processor" else False

    interrupts = Interrupts()
    options = {
        "streamer": {"streamer": interrupts},
        "criterion": {"stopping_criteria": StoppingCriteriaList([interrupts])},
        "processor": {"logits_processor": LogitsProcessorList([interrupts])},
    }[place]
    inputs = left_padded([9]) if place == "streamer" else RAGGED
    with pytest.raises(KeyboardInterrupt):
        paged(fresh, inputs, **options)
    assert_all_blocks_are_back(engine_of(fresh))
    assert_equals_stock(fresh, RAGGED, **LENGTH)


def test_text_streams_as_from_stock(llama, capsys):
    tokenizer = byte_level_bpe(256 + 1)
    model = make_tiny("llama", vocab_size=len(tokenizer))
    inputs = left_padded([9])
    for skip_prompt in (True, False):
        model.generate(**inputs, **LENGTH, streamer=TextStreamer(tokenizer, skip_prompt=skip_prompt))
        expected = capsys.readouterr().out
        paged(model, inputs, streamer=TextStreamer(tokenizer, skip_prompt=skip_prompt))
        assert capsys.readouterr().out == expected
    with pytest.raises(ValueError, match="batch size 1"):
        paged(model, streamer=TextStreamer(tokenizer))


def test_an_iterator_streams_while_another_thread_generates(llama):
    tokenizer = byte_level_bpe(256 + 1)
    model = make_tiny("llama", vocab_size=len(tokenizer))
    inputs = left_padded([9])
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(paged, model, inputs, streamer=streamer)
        text = "".join(streamer)
        assert text == tokenizer.decode(future.result()[0, 9:])


# Stop strings


@pytest.mark.parametrize("length", [1, 2, 3])
def test_stop_strings_cut_where_stock_cuts(length):
    tokenizer = byte_level_bpe()
    model = make_tiny("llama", vocab_size=len(tokenizer), tie_word_embeddings=False)
    inputs = left_padded([7, 1, 23, 12], vocab_size=len(tokenizer))
    new = model.generate(**inputs, **LENGTH)[:, 23:]
    texts = [tokenizer.decode(row[2 * n + 1 : 2 * n + 1 + length]) for n, row in enumerate(new)]
    stops = [text for text in texts if text.isascii() and text.strip()]
    assert stops
    options = {**LENGTH, "stop_strings": stops, "tokenizer": tokenizer}
    assert_equals_stock(model, inputs, **options)
    assert_equals_stock(model, inputs, **options, paged_config={"max_num_batched_tokens": 5})
    # With an end-of-sequence token a row that was cut is padded.
    out = assert_equals_stock(model, inputs, **options | {"eos_token_id": 0})
    assert int((out[:, -1] == 0).sum()) == len(stops)
