"""GGUF files: models whose linear layers and embeddings keep their weights in the few bits that the file has."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.hub import cached_file

from paged_backend.errors import ConfigError, ModelNotFound
from paged_backend.kernels import cpu
from paged_backend.model.quantised_tensor import QuantisedTensor

# How a file is named, and how a model is made of its configuration; what else from_pretrained takes is left to it.
_PLACES = ("revision", "token", "trust_remote_code", "subfolder", "cache_dir", "local_files_only")
_SETTINGS = ("dtype", "torch_dtype", "attn_implementation")
_CPU = (None, "cpu", {"": "cpu"}, torch.device("cpu"))


class NotPacked(Exception):
    """A file cannot be kept as it is, and its weights have to be widened; the message says why."""


def load_gguf(name: str, model_kwargs: Mapping[str, Any]) -> PreTrainedModel:
    """The model of a GGUF file on the CPU, its weights in the blocks that the file has, rearranged for C++.

    The modules are transformers' own; weights of linear layers and embeddings are QuantisedTensors, and the attribute
    ``widened`` of the model tells of those that the file has in few bits and that had to be widened, by name, why.

    Raises NotPacked for what transformers must load, ModelNotFound for a file that is not there, ConfigError for one
    that cannot be read. What transformers raises for an architecture that it does not know is passed on.
    """
    others = sorted(set(model_kwargs) - {"gguf_file", "device_map", *_PLACES, *_SETTINGS})
    if others:
        raise NotPacked(f"{others[0]} was given, which only transformers follows")
    if model_kwargs.get("device_map") not in _CPU:
        raise NotPacked("it is not for the CPU")
    if not cpu.is_available():
        raise NotPacked("the C++ operations are not in use")
    path = _path_of(name, model_kwargs)
    reader = _read(path)
    places = {key: model_kwargs[key] for key in _PLACES if key in model_kwargs}
    config = AutoConfig.from_pretrained(name, gguf_file=model_kwargs["gguf_file"], **places)
    config.name_or_path = name
    settings = {key: model_kwargs[key] for key in ("attn_implementation", "trust_remote_code") if key in model_kwargs}
    dtype = _dtype_of(model_kwargs.get("dtype", model_kwargs.get("torch_dtype")))
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **settings)
    model.widened = _fill(model, reader, dtype)
    model.tie_weights()
    absent = [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]
    if absent:
        raise NotPacked(f"it holds no {absent[0]}")
    return model.eval()


def _path_of(name: str, model_kwargs: Mapping[str, Any]) -> str:
    file = os.fsdecode(model_kwargs["gguf_file"])
    if not os.path.isdir(name):
        places = {key: model_kwargs[key] for key in _PLACES if key in model_kwargs and key != "trust_remote_code"}
        return str(cached_file(name, file, **places))
    folder = Path(name, model_kwargs.get("subfolder", ""))
    if not (folder / file).is_file():
        there = ", ".join(sorted(found.name for found in folder.glob("*.gguf"))) or "none"
        raise ModelNotFound(f"the folder {str(folder)!r} has no file {file!r}; the GGUF files there: {there}")
    return str(folder / file)


def _read(path: str) -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(
            f"{path!r} cannot be read without the package gguf; install it with `pip install 'paged-backend[gguf]'`"
        ) from error
    try:
        # Copied when written, which nobody does; torch takes no memory that cannot be written.
        return gguf.GGUFReader(path, "c")
    except OSError:
        raise
    except Exception as error:
        # What the library raises for bytes that it does not expect may be anything.
        if "GGMLQuantizationType" in str(error):
            raise ConfigError(
                f"{path!r} holds weights of a type that the package gguf does not know ({error}); update gguf, or take "
                "a file of another type"
            ) from error
        raise ConfigError(
            f"{path!r} is not a whole GGUF file, it may be cut short ({type(error).__name__}: {error}); fetch it again"
        ) from error


def _dtype_of(asked: Any) -> torch.dtype:
    """float32 unless another is asked for, as in transformers: the dtype of files that were rounded is not told."""
    if asked is None or asked == "auto":
        return torch.float32
    dtype = getattr(torch, asked, None) if isinstance(asked, str) else asked
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise NotPacked(f"its dtype is to be {asked}")
    return dtype


def _fill(model: PreTrainedModel, reader: Any, dtype: torch.dtype) -> dict[str, str]:
    """Give the model the weights of the file; returns why some were widened, by name."""
    import gguf

    try:
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
            read_field,
        )
    except ImportError as error:
        raise NotPacked(f"this version of transformers reads such files otherwise: {error}") from error
    (architecture,) = read_field(reader, "general.architecture")
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    # Without its children, of which each would be gone through anew; a model whose names they tell is not packed.
    alone = SimpleNamespace(config=model.config, state_dict=model.state_dict, named_children=lambda: ())
    try:
        names = get_gguf_hf_weights_map(alone, processor)
    except NotImplementedError as error:
        raise NotPacked(str(error)) from error
    arena, widened = cpu.Arena(), {}
    for tensor in reader.tensors:
        name = names.get(tensor.name)
        if name is None:
            continue
        module, leaf = _owner(model, name)
        kind, is_weight = tensor.tensor_type.name, isinstance(module, (nn.Linear, nn.Embedding)) and leaf == "weight"
        fmt = cpu.FORMATS.get(kind)
        order = _order(processor, tensor) if fmt is not None and is_weight else None
        if fmt is not None and order is not None:
            rows = torch.arange(len(order))
            blocks = torch.from_numpy(tensor.data)
            packed = cpu.from_gguf(blocks, fmt, None if torch.equal(order, rows) else order, arena)
            value: torch.Tensor = QuantisedTensor(packed, dtype)
        else:
            if kind not in ("F32", "F16", "BF16"):
                why = "its rows are rearranged" if fmt is not None and is_weight else f"C++ cannot multiply by {kind}"
                widened[name] = why if is_weight else "it is no weight of a linear layer or an embedding"
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            value = torch.tensor(_processed(processor, values, tensor.name)).to(dtype)
        shape = tuple(getattr(module, leaf).shape)
        if tuple(value.shape) != shape:
            raise ConfigError(f"{name} of the file is {tuple(value.shape)}, and {shape} by its own configuration")
        if leaf in module._buffers:
            module._buffers[leaf] = value
        else:
            module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    return widened


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    parent, _, leaf = name.rpartition(".")
    return model.get_submodule(parent), leaf


def _processed(processor: Any, values: Any, name: str) -> Any:
    """What transformers makes of a tensor of the file."""
    result = processor.process(weights=values, name=name, tensor_key_mapping={}, parsed_parameters={"tensors": {}})
    if result.name != name:
        raise NotPacked(f"transformers takes {name} apart")
    return result.weights


def _order(processor: Any, tensor: Any) -> torch.Tensor | None:
    """In which order transformers takes the rows of a weight, int64; None where it does more than order them."""
    rows = torch.arange(tensor.data.shape[0])
    numbers = torch.stack((rows, rows + len(rows)), 1)
    try:
        moved = torch.tensor(_processed(processor, numbers.numpy(), tensor.name))
    except (ValueError, TypeError):
        return None
    if moved.shape != numbers.shape or not torch.equal(moved[:, 1], moved[:, 0] + len(rows)):
        return None
    return moved[:, 0] if torch.equal(moved[:, 0].sort().values, rows) else None
