"""The references in a JSON schema: which there are, what they point to, and how they change when it moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

# Keywords whose value maps names to schemas, and such whose value is data.
_MAPS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_DATA = ("const", "default", "enum", "examples", "required", "dependentRequired")


def references(schema: Any) -> list[str]:
    """All references within a schema."""
    found: list[str] = []

    def note(reference: str) -> str:
        found.append(reference)
        return reference

    _with_references(schema, note)
    return found


def target(root: Mapping[str, Any], reference: str) -> Any:
    """What stands where ``reference`` points; None if that is nowhere in ``root``."""
    found: Any = root
    for step in unquote(reference.removeprefix("#")).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(name)] if isinstance(found, list) else found[name]
        except (LookupError, TypeError, ValueError):
            return None
    return found


def refers_to_itself(schema: Mapping[str, Any]) -> bool:
    """Whether its references lead round in a circle."""
    done: set[str] = set()

    def leads_round(reference: str, above: tuple[str, ...]) -> bool:
        if reference in above or reference in done:
            return reference in above
        done.add(reference)
        return any(leads_round(each, (*above, reference)) for each in references(target(schema, reference)))

    return leads_round("#", ())


def moved(schema: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The schema as a part of a larger one, where it stands at ``place``, a reference."""

    def change(reference: str) -> str:
        return place + reference[1:] if reference == "#" or reference.startswith("#/") else reference

    copy: dict[str, Any] = _with_references(schema, change)
    # A name of its own would make it a document of its own.
    copy.pop("$id", None)
    return copy


def _with_references(schema: Any, change: Callable[[str], str]) -> Any:
    """A copy in which every reference is what ``change`` makes of it."""
    if isinstance(schema, list):
        return [_with_references(item, change) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    copy: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str):
            copy[key] = change(value)
        elif key in _MAPS and isinstance(value, Mapping):
            copy[key] = {name: _with_references(inner, change) for name, inner in value.items()}
        else:
            copy[key] = value if key in _DATA else _with_references(value, change)
    return copy
