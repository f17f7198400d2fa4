"""Intake: builds checked requests out of what callers hand in, or says what is wrong with it."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import operator
import os
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from functools import partial
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import nn

from paged_backend.checks import describe
from paged_backend.engine.model_loader import ModelLoader
from paged_backend.engine.request_table import RequestTable
from paged_backend.errors import ConfigError, ContextOverflow, RequestRefused
from paged_backend.policy.plugin_manager import PluginManager
from paged_backend.policy.policy_errors import ErrorHandler
from paged_backend.request.options import request_fields
from paged_backend.request.request import Request
from paged_backend.sampling.detokenizer import decode_without, hidden_token_ids, tokenizer_lock
from paged_backend.sampling.stopping import check_stop
from paged_backend.sampling.structured import check_constraint
from paged_backend.sampling_params import SamplingParams
from paged_backend.stats import EngineStats

Prompt = str | Sequence[int] | torch.Tensor | np.ndarray
Params = SamplingParams | Mapping[str, Any] | None


class Intake:
    """Builds the requests of one engine, from any thread. Refused ones leave everything as it was."""

    def __init__(self, tokenizer: Any, loader: ModelLoader, table: RequestTable) -> None:
        self._tokenizer = tokenizer
        self._loader = loader
        self._table = table
        self._orders: Iterator[int] = itertools.count()

    def build_all(self, prompts: Sequence[Any], params: Any, options: Mapping[str, Any], now: float) -> list[Request]:
        """``build`` for each of ``prompts``, with the same params or a sequence of one each."""
        each = list(params) if isinstance(params, (list, tuple)) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise RequestRefused(f"{len(prompts)} prompts came with {len(each)} sampling params; give one, or one each")
        if options.get("request_id") is not None and len(prompts) > 1:
            raise RequestRefused(f"{len(prompts)} prompts cannot share request_id={describe(options['request_id'])}")
        request_fields(options, now)
        requests = []
        for index, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
            try:
                requests.append(self.build(prompt, one, options, now))
            except (RequestRefused, ConfigError) as error:
                raise type(error)(f"prompt {index}: {error}") from error
        return requests

    def build(self, prompt: Any, params: Any, options: Mapping[str, Any], now: float) -> Request:
        """A checked request that is not queued yet, with its forks; its seconds count from ``now``.

        Raises RequestRefused (ContextOverflow when it could never fit), and ConfigError for a mapping of parameters
        of which one cannot be used.
        """
        served = self._loader.served
        fields = request_fields(options, now)
        token_ids = self.token_ids(prompt)
        own = 0
        if fields.get("prompt_embeds") is None:
            own = served.blocks.num_pinned_of(token_ids, fields.get("cache_salt"))
        params = self._default_params(len(token_ids), own) if params is None else sampling_params(params)
        params.validate_for(served.twin.vocab_size)
        _check_prompt_embeds(fields.get("prompt_embeds"), len(token_ids), served.twin.embedding_dim)
        check_stop(params, self._tokenizer)
        check_constraint(params, self._tokenizer)
        if params.n > served.num_seats:
            raise RequestRefused(f"n={params.n} samples cannot run at once; {served.seat_limit}")
        self.check_length(len(token_ids), params.max_tokens, own)
        request_id = fields.pop("request_id", None)
        if request_id is not None:
            self._table.check_free(request_id)
        first = next(self._orders)
        while request_id is None and str(first) in self._table:
            # A caller has used the number as a name.
            first = next(self._orders)
        name = str(first) if request_id is None else request_id
        samples = [Request(name, token_ids, params, now, first, **fields)]
        for index in range(1, params.n):
            samples.append(Request(name, token_ids, params, now, next(self._orders), index=index, **fields))
        hidden = hidden_token_ids(self._tokenizer, params.shown_special_tokens)
        for sample in samples:
            # Outputs keep this, and must not keep the model or the cache with it.
            sample.output.decode = partial(_decode, self._tokenizer, hidden)
        samples[0].forks = tuple(samples[1:])
        return samples[0]

    def token_ids(self, prompt: Any) -> list[int]:
        """The token ids of a text, a sequence of ints, or a 1-D tensor or array; RequestRefused for anything else."""
        ids = self._as_ids(prompt)
        if not ids:
            raise RequestRefused("the prompt is empty; give at least one token")
        low, high, size = min(ids), max(ids), self._loader.served.twin.vocab_size
        if low < 0 or high >= size:
            raise RequestRefused(
                f"token id {low if low < 0 else high} is outside the vocabulary, whose ids are 0 to {size - 1}"
            )
        return ids

    def check_length(self, num_prompt_tokens: int, max_tokens: int, num_own_pinned: int) -> None:
        """Raise ContextOverflow for a request that could never fit the model's positions or the cache, as it is now.

        num_own_pinned: pinned blocks that it begins with.
        """
        served, total = self._loader.served, num_prompt_tokens + max_tokens
        what = f"a prompt of {num_prompt_tokens} tokens and max_tokens={max_tokens}"
        if served.max_model_len is not None and total > served.max_model_len:
            reason = served.twin.why_positions_end
            why = f" ({reason})" if reason else ""
            raise ContextOverflow(
                f"{what} come to {total}, beyond the {served.max_model_len} positions of the model or of "
                f"max_model_len{why}; shorten the prompt, or lower max_tokens (max_new_tokens in generate)"
            )
        shortage = served.blocks.shortage(total, num_own_pinned)
        if shortage is not None and not served.elastic:
            raise ContextOverflow(
                f"{what} can never fit: {shortage}; shorten the prompt, lower max_tokens (max_new_tokens in generate) "
                "or raise kv_cache_memory"
            )

    def _as_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise RequestRefused("a text prompt needs a tokenizer; pass one to the engine, or pass token ids")
            try:
                prompt.encode()
            except UnicodeEncodeError as error:
                raise RequestRefused(f"a text prompt holds half of a surrogate pair: {error}") from error
            with tokenizer_lock(self._tokenizer):
                ids: list[int] = self._tokenizer(prompt)["input_ids"]
            return ids
        if isinstance(prompt, np.ndarray):
            if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
                raise RequestRefused(f"a prompt array must be 1-D with integer ids, got {prompt.shape} {prompt.dtype}")
            return prompt.tolist()
        if isinstance(prompt, torch.Tensor):
            if prompt.ndim != 1 or prompt.is_floating_point() or prompt.is_complex() or prompt.dtype == torch.bool:
                raise RequestRefused(
                    f"a prompt tensor must be 1-D with integer token ids, got {tuple(prompt.shape)} {prompt.dtype}"
                )
            return prompt.tolist()
        _refuse_unordered(prompt)
        try:
            return [token if type(token) is int else _as_int(token) for token in prompt]
        except TypeError as error:
            raise RequestRefused(f"a prompt is text or token ids, got {describe(prompt)}") from error

    def _default_params(self, num_prompt_tokens: int, num_own_pinned: int) -> SamplingParams:
        """Greedy, with as many tokens as the model's positions and the cache leave, up to the default."""
        served, most = self._loader.served, SamplingParams.max_tokens
        blocks = served.blocks
        if served.max_model_len is not None:
            most = min(most, served.max_model_len - num_prompt_tokens)
        if not served.elastic:
            lengths = range(num_prompt_tokens + 1, num_prompt_tokens + most + 1)
            most = bisect.bisect_left(
                lengths, True, key=lambda length: blocks.shortage(length, num_own_pinned) is not None
            )
        return SamplingParams(max_tokens=max(1, most))


def _decode(tokenizer: Any, hidden: Collection[int] | None, token_ids: Sequence[int]) -> str:
    if tokenizer is None:
        return ""
    with tokenizer_lock(tokenizer):
        return decode_without(hidden, tokenizer.decode, token_ids)


def _as_int(token: Any) -> int:
    if isinstance(token, bool):
        raise TypeError(f"{token!r} is no token id")
    return operator.index(token)


def _refuse_unordered(prompt: Any) -> None:
    """Refuse what can be iterated but holds no token ids in order."""
    if isinstance(prompt, Mapping):
        raise RequestRefused(f"a prompt is text or token ids, got a {type(prompt).__name__}; give its input_ids")
    if isinstance(prompt, (bytes, bytearray, memoryview)):
        raise RequestRefused(f"a prompt is text or token ids, got {describe(prompt)}; decode it to a text")
    if isinstance(prompt, Set):
        raise RequestRefused(f"a prompt is text or token ids, got {describe(prompt)}, which has no order")


def _check_prompt_embeds(embeds: Any, num_tokens: int, width: int | None) -> None:
    """Raise RequestRefused unless ``embeds`` is None or what the model can be fed in place of ``num_tokens`` tokens."""
    if embeds is None:
        return
    if width is None:
        raise RequestRefused("this model takes no embeddings in place of tokens; give token ids alone")
    if not isinstance(embeds, torch.Tensor) or not embeds.is_floating_point():
        raise RequestRefused(f"prompt_embeds must be a tensor of floats, got {type(embeds).__name__}")
    if embeds.shape != (num_tokens, width):
        raise RequestRefused(
            f"prompt_embeds of a prompt of {num_tokens} tokens must be of shape {(num_tokens, width)}, "
            f"got {tuple(embeds.shape)}"
        )


def sampling_params(params: Any) -> SamplingParams:
    """The params themselves, or made from a mapping of their fields."""
    if isinstance(params, SamplingParams):
        return params
    if isinstance(params, Mapping):
        known = [field.name for field in dataclasses.fields(SamplingParams)]
        if unknown := [name for name in params if name not in known]:
            raise RequestRefused(f"unknown sampling parameter {unknown[0]!r}; choose from {', '.join(known)}")
        return SamplingParams(**params)
    raise RequestRefused(f"sampling parameters are a SamplingParams or a mapping of its fields, got {describe(params)}")


def as_prompts(prompts: Any) -> list[Any]:
    """One prompt, or a sequence of them, as a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    _refuse_unordered(prompts)
    if isinstance(prompts, torch.Tensor) or (isinstance(prompts, np.ndarray) and prompts.dtype.kind in "iuf"):
        return [prompts] if prompts.ndim < 2 else list(prompts)
    try:
        many = list(prompts)
    except TypeError as error:
        raise RequestRefused(f"prompts are texts or sequences of token ids, got {describe(prompts)}") from error
    return [many] if many and all(isinstance(item, Integral) for item in many) else many


def check_model(model: Any) -> None:
    """Raise ConfigError, which says how to get one, for what is no model at all."""
    if isinstance(model, (str, os.PathLike)):
        raise ConfigError(f"a model is wanted, got its name; Engine.from_pretrained({os.fspath(model)!r}) loads it")
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"a transformers model is wanted, got {describe(model)}; load one with "
            "AutoModelForCausalLM.from_pretrained, or use Engine.from_pretrained"
        )


def check_tokenizer(tokenizer: Any) -> None:
    """Raise ConfigError unless ``tokenizer`` is None or can turn text into token ids and back."""
    if tokenizer is not None and not (callable(tokenizer) and callable(getattr(tokenizer, "decode", None))):
        raise ConfigError(
            f"a transformers tokenizer or None is wanted, got {describe(tokenizer)}; load one with "
            "AutoTokenizer.from_pretrained"
        )


def admit_by_hook(plugins: PluginManager, on_error: ErrorHandler, request: Request, stats: EngineStats) -> None:
    """Raise RequestRefused if a plugin refuses ``request``, with its reason."""
    answer, plugin = plugins.first_opinion(
        "admit_request", on_error, lambda value: isinstance(value, (bool, str)), request=request.view, stats=stats
    )
    if answer is False or isinstance(answer, str):
        raise RequestRefused(answer or f"admit_request of plugin {plugin} refused the request, without a reason")
