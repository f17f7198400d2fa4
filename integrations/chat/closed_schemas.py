"""Closed schemas: JSON schemas whose objects hold nothing but what is named."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import permutations
from typing import Any
from urllib.parse import unquote

from paged_backend.integrations.chat.schema_references import references, target

_DEFINITIONS = ("$defs", "definitions")
# What stands in a schema without saying what the value may be.
_NOTES = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"}
    | {*_DEFINITIONS, "$schema", "$id", "$comment"}
)
# Schemas that stand for themselves nowhere: each says a part of what the value or its properties are.
_PARTS = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "patternProperties")
# With these, what else an object holds, or how much, is settled.
_SETTLING = ("additionalProperties", "unevaluatedProperties", "propertyNames", "minProperties")


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy whose objects allow no properties beyond those they name, unless they say otherwise.

    JSON Schema allows any, which a model would be free to make up. Where several descriptions hold for one object, it
    may have what any of them names; they themselves stay open, for whoever else refers to them too.
    """
    open_places: set[str] = set()
    while True:
        closing = _Closing(schema, frozenset(open_places))
        copy: dict[str, Any] = closing.close(schema, "#")
        if closing.parts <= open_places:
            return copy
        open_places |= closing.parts


class _Closing:
    """One pass over the whole. ``parts``: the places that it found to be referred to by what stays open."""

    def __init__(self, root: Mapping[str, Any], open_places: frozenset[str]) -> None:
        self._root = root
        self._open_places = open_places
        self.parts: set[str] = set()

    def close(self, schema: Any, place: str) -> Any:
        """A copy of the schema that stands at ``place``, where no other describes the same value."""
        if not isinstance(schema, Mapping) or place in self._open_places:
            return self._left_open(schema)
        said = schema.keys() - _NOTES
        if said == {"$ref"}:
            closed = {}
        elif said == {"anyOf"} or (said == {"oneOf"} and self._exclude_each_other(schema)):
            closed = {key: self._close_each(schema[key], f"{place}/{key}") for key in said}
        else:
            closed = self._close_described(schema, place)
        definitions = {
            key: self._close_properties(schema[key], f"{place}/{key}") for key in _DEFINITIONS if key in schema
        }
        return {**schema, **definitions, **closed}

    def _close_described(self, schema: Mapping[str, Any], place: str) -> dict[str, Any]:
        """What to replace in a schema that does more than to refer to another or to leave a choice."""
        self._left_open({key: schema[key] for key in _PARTS if key in schema})
        descriptions = list(_descriptions(self._root, schema))
        named_again = {name for other in descriptions[1:] for name in _names(other)}
        if "patternProperties" in schema:
            named_again.update(schema.get("properties", ()))
        closed = {}
        for key in schema.keys() & {"items", "prefixItems", "additionalProperties"}:
            is_alone = len(descriptions) == 1
            closed[key] = self._close_each(schema[key], f"{place}/{key}") if is_alone else self._left_open(schema[key])
        if "properties" in schema:
            closed["properties"] = self._close_properties(schema["properties"], f"{place}/properties", named_again)
        has_names = any("properties" in description for description in descriptions)
        if has_names and not any(key in description for description in descriptions for key in _SETTLING):
            own = closed.get("properties", {})
            others = {name for description in descriptions for name in _names(description)} - own.keys()
            closed["properties"] = {**own, **dict.fromkeys(sorted(others), True)}
            closed["additionalProperties"] = False
        return closed

    def _close_properties(self, properties: Any, place: str, left: Collection[str] = ()) -> Any:
        """Every schema of a mapping from names, but for those that are ``left`` open."""
        return {
            name: self._left_open(inner) if name in left else self.close(inner, f"{place}/{_escaped(name)}")
            for name, inner in properties.items()
        }

    def _close_each(self, schemas: Any, place: str) -> Any:
        """A schema, or every one of a list."""
        if isinstance(schemas, list):
            return [self.close(inner, f"{place}/{index}") for index, inner in enumerate(schemas)]
        return self.close(schemas, place)

    def _left_open(self, fragment: Any) -> Any:
        self.parts.update(map(unquote, references(fragment)))
        return fragment

    def _exclude_each_other(self, schema: Mapping[str, Any]) -> bool:
        """Whether no choice of ``oneOf``, once closed, also allows what another does while it is open."""
        if "discriminator" in schema:
            return True
        choices = [next(_descriptions(self._root, choice), {}) for choice in schema["oneOf"]]
        choices = [target(self._root, choice["$ref"]) if "$ref" in choice else choice for choice in choices]
        return all(_excludes(one, other) for one, other in permutations(choices, 2))


def _excludes(one: Any, other: Any) -> bool:
    """Whether nothing that ``one`` allows by name is an ``other``."""
    if not isinstance(one, Mapping) or not isinstance(other, Mapping) or not {*one, *other}.isdisjoint(_PARTS):
        return False
    kinds = [_kinds(one), _kinds(other)]
    if kinds[0].isdisjoint(kinds[1]) and not {None, "number"} & (kinds[0] | kinds[1]):
        return True
    needed, has, wants = other.get("required", ()), one.get("properties", {}), other.get("properties", {})
    return any(name not in has or _differ(has[name], wants.get(name, {})) for name in needed)


def _kinds(schema: Mapping[str, Any]) -> set[Any]:
    """The types that a schema allows; None where it does not say."""
    kind = schema.get("type")
    return set(kind) if isinstance(kind, list) else {kind}


def _differ(one: Any, other: Any) -> bool:
    """Whether both are of a few values, none of them the same."""
    first, second = ([each["const"]] if "const" in each else each.get("enum") for each in (one, other))
    return first is not None and second is not None and not any(value in second for value in first)


def _descriptions(
    root: Mapping[str, Any], schema: Any, seen: frozenset[str] = frozenset()
) -> Iterator[Mapping[str, Any]]:
    """The schema, and whichever in it or behind its references describe the same value."""
    if not isinstance(schema, Mapping):
        return
    yield schema
    parts = [each for key in ("allOf", "anyOf", "oneOf") for each in schema.get(key, ())]
    parts += [schema[key] for key in ("then", "else") if key in schema]
    parts += schema.get("dependentSchemas", {}).values()
    for part in parts:
        yield from _descriptions(root, part, seen)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        yield from _descriptions(root, target(root, reference), seen | {reference})


def _names(schema: Mapping[str, Any]) -> set[str]:
    return {*schema.get("properties", ()), *schema.get("required", ())}


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
