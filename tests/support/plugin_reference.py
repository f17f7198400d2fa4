"""The reference part of plugins/README.md, from the docstrings it documents; run as a script it rewrites that part."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paged_backend import hookspecs, kernels, policies

README = Path(__file__).parents[2] / "plugins" / "README.md"
BEGIN, END = "<!-- reference: begin -->\n", "<!-- reference: end -->\n"

HOOKS = [value for value in vars(hookspecs).values() if hasattr(value, f"{hookspecs.PROJECT}_spec")]
CLASSES = [
    policies.SchedulingPolicy,
    policies.KeyedPolicy,
    policies.EvictionPolicy,
    policies.KeyedEviction,
    policies.RequestView,
    policies.CachedBlock,
    policies.ModelShape,
    policies.BlockSize,
    policies.ReplicaView,
    policies.RoutingPolicy,
    kernels.LayerCache,
    kernels.Sequences,
    kernels.AttentionVariant,
    kernels.MaskRule,
]


def signature(function: Any) -> str:
    """Name, arguments and types as they are written, without self."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    returns = inspect.signature(function).return_annotation
    return f"{function.__name__}({', '.join(map(str, parameters))}) -> {returns}".replace("'", "")


def methods(cls: type) -> Iterator[Any]:
    """What a class itself defines for others to call or write."""
    for name, value in vars(cls).items():
        if inspect.isfunction(value) and (not name.startswith("_") or name == "__len__"):
            yield value


def _hook(function: Any) -> str:
    options = getattr(function, f"{hookspecs.PROJECT}_spec")
    first = " The first answer that is not None counts." if options["firstresult"] else ""
    return f"```python\n{signature(function)}\n```\n{inspect.getdoc(function)}{first}\n"


def _class(cls: type) -> str:
    lines = [f"### {cls.__name__}\n", f"{inspect.getdoc(cls)}\n"]
    fields = [f"{n}: {t}".replace("'", "") for n, t in cls.__annotations__.items() if not n.startswith("_")]
    fields += [
        f"{n}: {inspect.signature(p.fget).return_annotation}".replace("'", "")
        for n, p in vars(cls).items()
        if isinstance(p, property) and inspect.isfunction(p.fget)
    ]
    if fields:
        lines.append("```python\n" + "\n".join(fields) + "\n```\n")
    for method in methods(cls):
        must = " *(a policy writes this)*" if getattr(method, "__isabstractmethod__", False) else ""
        text = inspect.getdoc(method) or ""
        lines.append(f"```python\n{signature(method)}\n```\n{text}{must}\n")
    return "\n".join(lines)


def reference() -> str:
    """Markdown for every hook and every class that plugins are written against."""
    version = f"These are the hooks of `HOOK_API_VERSION = {hookspecs.HOOK_API_VERSION}`.\n"
    parts = ["### Hooks\n", version, *map(_hook, HOOKS), *map(_class, CLASSES)]
    parts.append("### BlockSizeRule\n\n```python\nBlockSizeRule = Callable[[ModelShape, torch.device], int]\n```\n")
    return "\n".join(parts)


def main() -> None:
    """Rewrite the reference part of the README."""
    before, rest = README.read_text().split(BEGIN)
    after = rest.split(END)[1]
    README.write_text(f"{before}{BEGIN}\n{reference()}\n{END}{after}")


if __name__ == "__main__":
    main()
