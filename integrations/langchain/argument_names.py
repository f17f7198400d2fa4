"""What to say about an argument that is unknown: how it is called here, or where it belongs."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable

# What other packages call it.
OTHER_NAMES = {
    **dict.fromkeys(("max_completion_tokens", "max_new_tokens", "max_output_tokens", "num_predict"), "max_tokens"),
    **dict.fromkeys(("request_timeout", "timeout_s"), "timeout"),
    **dict.fromkeys(("stop_sequences", "stop_strings"), "stop"),
    **dict.fromkeys(("model_name", "model_id"), "model"),
    "do_sample": "temperature",
    "eos_token_id": "stop_token_ids",
    "num_return_sequences": "n",
    "random_seed": "seed",
    "repeat_penalty": "repetition_penalty",
}
# Arguments of from_pretrained that people look for here.
LOADING = frozenset(
    (
        *("dtype", "torch_dtype", "device", "device_map", "attn_implementation", "quantization_config"),
        *("trust_remote_code", "revision", "token", "gguf_file", "subfolder", "cache_dir", "local_files_only"),
    )
)


def hint(name: str, known: Iterable[str], elsewhere: Iterable[str] = ()) -> str:
    """The end of an error message about ``name``; ``elsewhere`` are those that the constructor takes."""
    from paged_backend import EngineConfig

    known = set(known)
    if OTHER_NAMES.get(name) in known:
        return f"; did you mean {OTHER_NAMES[name]!r}?"
    if name in elsewhere:
        return "; it is an argument of the constructor"
    if name in LOADING:
        wanted = {"torch_dtype": "dtype", "device": "device_map"}.get(name, name)
        return f"; loading takes it, in the constructor: engine_kwargs={{'model_kwargs': {{{wanted!r}: ...}}}}"
    if name == "plugins" or name in {field.name for field in dataclasses.fields(EngineConfig)}:
        return f"; the engine takes it, in the constructor: engine_kwargs={{{name!r}: ...}}"
    # Names that are less alike would only mislead.
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(known))}"
