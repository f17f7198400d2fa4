"""QuantisedTensor: a parameter that modules see as a weight of floats, and that holds it in a few bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import embedding, linear
from torch.utils._pytree import tree_map

from paged_backend.kernels import cpu


class QuantisedTensor(torch.Tensor):
    """A weight ``[num_columns, depth]`` of a linear layer or an embedding, in the dtype that a model computes in.

    ``linear`` multiplies by it as it is, and ``embedding`` widens the rows that it looks up. Every other operation gets
    a widened copy. It cannot be trained or written, and no module that holds it moves to another device or dtype.
    """

    quantised: cpu.QuantisedWeight

    @staticmethod
    def __new__(cls, quantised: cpu.QuantisedWeight, dtype: torch.dtype) -> QuantisedTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls, (quantised.num_columns, quantised.depth), dtype=dtype, device=quantised.packed.device
        )

    def __init__(self, quantised: cpu.QuantisedWeight, dtype: torch.dtype) -> None:
        self.quantised = quantised

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"QuantisedTensor({list(self.shape)}, {self.quantised.format.name}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantisedTensor:
        old = self.quantised
        packed = cpu.QuantisedWeight(old.packed.clone(), old.format, old.num_columns, old.depth)
        copy = torch.nn.Parameter(QuantisedTensor(packed, self.dtype), requires_grad=False)
        memo[id(self)] = copy
        return copy  # type: ignore[return-value]

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["packed"], (self.quantised.format, self.quantised.num_columns, self.quantised.depth, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], rest: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> QuantisedTensor:
        *fields, dtype = rest
        return QuantisedTensor(cpu.QuantisedWeight(inner["packed"], *fields), dtype)

    @property
    def packed(self) -> torch.Tensor:
        """The memory that holds it."""
        return self.quantised.packed

    def widened(self) -> torch.Tensor:
        """The weight in its dtype."""
        return self.quantised.widened(self.dtype)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is linear and (result := _linear(*args, **kwargs)) is not None:
            return result
        if func is embedding and (result := _embedding(*args, **kwargs)) is not None:
            return result
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            # How modules are moved to another device or dtype.
            weight, value = args
            if isinstance(value, QuantisedTensor) and value.dtype == weight.dtype:
                return None
            raise RuntimeError(
                f"a weight that is stored in {weight.quantised.format.name} cannot become one of {value.dtype} on "
                f"{value.device}; load the model so, or with quantization_config=GgufConfig(dequantize=True)"
            )
        # Unlike the default, which would make a QuantisedTensor of what is none.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _ALIASES:
            return QuantisedTensor(args[0].quantised, args[0].dtype)
        widened = tree_map(lambda x: x.widened() if isinstance(x, QuantisedTensor) else x, (args, kwargs or {}))
        if func._schema.is_mutable and isinstance(args[0], QuantisedTensor):
            raise RuntimeError(
                f"{func} would write a weight that is stored in {args[0].quantised.format.name}; load the model with "
                "quantization_config=GgufConfig(dequantize=True) to change its weights"
            )
        return func(*widened[0], **widened[1])


_ALIASES = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """The product in C++, or None where it cannot be had."""
    plain = x.device.type == "cpu" and x.dtype in _DTYPES and not isinstance(x, QuantisedTensor)
    if not isinstance(weight, QuantisedTensor) or not plain or x.requires_grad or not cpu.is_available():
        return None
    return cpu.QuantisedLinear((weight.quantised,), (None if bias is None else bias.float(),))(x)


def _embedding(ids: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
    """The rows looked up, or None where C++ cannot be had. What else an embedding may do is for training."""
    plain = ids.device.type == "cpu" and not any(args[1:]) and not kwargs.get("max_norm")
    if not isinstance(weight, QuantisedTensor) or not plain or not cpu.is_available():
        return None
    return weight.quantised.columns(ids).to(weight.dtype)


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def weight_bytes(module: torch.nn.Module) -> dict[str, int]:
    """Bytes of a model's parameters by what they are stored in: the name of a dtype, or of a format of few bits."""
    sizes: dict[str, int] = {}
    for parameter in module.parameters():
        if isinstance(parameter, QuantisedTensor):
            kind, size = parameter.quantised.format.name, parameter.quantised.num_bytes
        else:
            kind, size = str(parameter.dtype).removeprefix("torch."), parameter.numel() * parameter.element_size()
        sizes[kind] = sizes.get(kind, 0) + size
    return sizes
