"""GenerateCall: a call of ``generate`` that asks for the paged engine, or why it cannot have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from paged_backend import EngineConfig
from paged_backend.errors import ConfigError, RequestRefused, UnsupportedCall

CACHE_IMPLS = ("paged",)
# What models call their cache, in one version of transformers or another.
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")


class GenerateCall:
    """What one call of ``generate`` asks of the paged engine.

    config, plugins: from its ``paged_config``. reached: whether the decoding loop that the engine stands in for was
    entered.
    """

    def __init__(self, model: Any, paged_config: EngineConfig | Mapping[str, Any] | None) -> None:
        options = {} if paged_config is None else paged_config
        if not isinstance(options, (EngineConfig, Mapping)):
            raise ConfigError(f"paged_config must be a mapping of engine options or an EngineConfig, got {options!r}")
        plugins: Any = ()
        if isinstance(options, Mapping):
            options = dict(options)
            plugins = options.pop("plugins", None) or ()
            if not isinstance(plugins, (list, tuple)):
                raise ConfigError(f"paged_config['plugins'] must be a list of modules or objects, got {plugins!r}")
        self.model = model
        # Rows bring the starts of their random streams along, so that no engine is needed for each seed.
        self.config = replace(EngineConfig.from_options(options), seed=None)
        self.plugins = tuple(plugins)
        self._limits_rows = isinstance(options, EngineConfig) or "max_num_seqs" in options
        self.reached = False

    def config_for(self, num_rows: int) -> EngineConfig:
        """The configuration for rows that have to run at the same time, which none of the caller's forbids."""
        if self._limits_rows or num_rows <= self.config.max_num_seqs:
            return self.config
        # Rounded up to a power of two, so that calls of many sizes share an engine.
        return EngineConfig.from_options(self.config, max_num_seqs=1 << (num_rows - 1).bit_length())

    @classmethod
    def read(cls, model: Any, arguments: Mapping[str, Any]) -> GenerateCall | None:
        """The call that ``arguments`` of ``model.generate`` make, or None when they ask for stock.

        ``cache_impl`` and ``paged_config`` are taken from the arguments, from ``generation_config`` among them, or from
        ``model.generation_config``, in this order; ``cache_impl=None`` as an argument asks for stock.

        Raises ConfigError for values that mean nothing, UnsupportedCall for a kind of generation that the engine does
        not do, and RequestRefused for inputs without a prompt.
        """
        cache_impl = _setting("cache_impl", model, arguments)
        given = arguments.get("paged_config")
        if given is None and "cache_impl" not in arguments:
            given = getattr(arguments.get("generation_config"), "paged_config", None)
        if cache_impl is None:
            if given is not None:
                raise ConfigError(f"paged_config={given!r} means nothing without cache_impl='paged'; give both or none")
            return None
        if not isinstance(cache_impl, str) or cache_impl not in CACHE_IMPLS:
            allowed = ", ".join(map(repr, CACHE_IMPLS))
            raise ConfigError(
                f"cache_impl={cache_impl!r} is unknown; choose from {allowed}, or leave it out for stock generate "
                "(whose own caches are chosen by cache_implementation)"
            )
        call = cls(model, _setting("paged_config", model, arguments))
        _refuse_other_kinds(model, arguments)
        _check_shapes(arguments)
        return call


def refuse(what: str, instead: str = "drop it") -> UnsupportedCall:
    """The error for something that ``generate`` does and the paged engine does not."""
    return UnsupportedCall(
        f"{what} is not served by cache_impl='paged'; {instead}, or leave cache_impl out to run stock generate"
    )


def _setting(name: str, model: Any, arguments: Mapping[str, Any]) -> Any:
    """What stock takes ``name`` to be, None where it takes its own default."""
    if name in arguments:
        return arguments[name]
    for config in (arguments.get("generation_config"), getattr(model, "generation_config", None)):
        value = getattr(config, name, None)
        if value is not None:
            return value
    return None


def _refuse_other_kinds(model: Any, arguments: Mapping[str, Any]) -> None:
    """Raise UnsupportedCall, naming the first argument that asks for anything but greedy search or sampling."""

    def setting(name: str) -> Any:
        return _setting(name, model, arguments)

    def given(name: str, kind: str, instead: str = "drop it") -> None:
        value = setting(name)
        if value is not None and value is not False:
            raise refuse(f"{name} ({kind})", instead)

    for name in ("constraints", "force_words_ids"):
        given(name, "constrained beam search", "use a logits processor")
    num_beams = setting("num_beams")
    if num_beams is not None and num_beams != 1:
        raise refuse(f"num_beams={num_beams} (beam search)", "set num_beams=1")
    # Without sampling, and with a top_k above 1, whose default is 50.
    penalty_alpha = setting("penalty_alpha") or 0
    if penalty_alpha > 0 and setting("do_sample") is not True and setting("top_k") not in (0, 1):
        raise refuse(f"penalty_alpha={penalty_alpha} (contrastive search)", "set penalty_alpha=0")
    for name in ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp"):
        given(name, "assisted generation")
    use_cache = setting("use_cache")
    if not use_cache and use_cache is not False and (use_cache is not None or "use_cache" in arguments):
        # Stock takes it for a cache whose positions nobody keeps.
        raise refuse(f"use_cache={use_cache!r}", "give True or False")
    given("dola_layers", "DoLa generation")
    given("custom_generate", "custom decoding")
    given("synced_gpus", "ranks that step together")
    for name in CACHE_ARGUMENTS:
        if arguments.get(name) is not None:
            raise refuse(f"{name} (a cache of the caller's)", "drop it: equal beginnings of prompts are reused anyway")
    # One that a config brings along changes no result, and many checkpoints do; one in the call is a contradiction.
    if arguments.get("cache_implementation") is not None:
        raise refuse(f"cache_implementation={arguments['cache_implementation']!r} (another cache)")


def _check_shapes(arguments: Mapping[str, Any]) -> None:
    """Raise where no row is given, or a mask that is not of the inputs, before stock makes something else of them."""
    given = (arguments.get(name) for name in ("inputs_embeds", "input_ids", "inputs"))
    inputs = next((value for value in given if value is not None), None)
    # Stock has its own words for what is no batch at all.
    if not isinstance(inputs, Tensor) or inputs.dim() < 2:
        return
    if len(inputs) == 0:
        raise RequestRefused(f"inputs of shape {tuple(inputs.shape)} hold no prompt; give at least one row")
    mask = arguments.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return
    shape = tuple(inputs.shape[:2])
    # One row that hides nothing goes for all in stock.
    if mask.shape != shape and not (mask.shape == (1, shape[1]) and bool((mask == 1).all())):
        raise refuse(
            f"an attention_mask of shape {tuple(mask.shape)} for inputs of {shape}", "give both the same shape"
        )
