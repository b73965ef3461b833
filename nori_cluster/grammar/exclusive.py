"""Whether alternatives of a oneOf exclude each other, so that it means the same as anyOf.

llguidance sees this for types and constants written in place, but not through $ref: the tagged unions that
libraries generate. Everything here errs on one side: what is not seen to be exclusive counts as overlapping.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Resolve = Callable[[str], Any]  # $ref → the schema it names; raises GrammarError

KINDS = frozenset({"null", "boolean", "number", "string", "array", "object"})
MAX_ALTERNATIVES = 64  # all pairs are looked at
MAX_DEPTH = 8


@dataclass
class Shape:
    """What every instance of a schema fulfils. literals None = any value; closed: names beyond are forbidden."""

    kinds: frozenset[str] = KINDS
    literals: frozenset[str] | None = None
    required: set[str] = field(default_factory=set)
    properties: dict[str, list[Any]] = field(default_factory=dict)
    closed: list[frozenset[str]] = field(default_factory=list)

    def narrow(self, values: list[Any]) -> None:
        literals = frozenset(map(canonical, values))
        self.literals = literals if self.literals is None else self.literals & literals
        self.kinds &= {kind_of(value) for value in values}

    def forbids(self, name: str) -> bool:
        return any(name not in names for names in self.closed)


class Alternatives:
    """Looks through $ref and allOf. siblings: whether keywords beside a $ref count (since 2019-09)."""

    def __init__(self, resolve: Resolve, siblings: bool) -> None:
        self._resolve = resolve
        self._siblings = siblings

    def exclude_each_other(self, schemas: list[Any]) -> bool:
        if len(schemas) > MAX_ALTERNATIVES:
            return False
        shapes = [self._shape(schema) for schema in schemas]
        return all(self._disjoint(one, other, 0) for at, one in enumerate(shapes) for other in shapes[at + 1 :])

    def _disjoint(self, one: Shape, other: Shape, depth: int) -> bool:
        common = one.kinds & other.kinds
        if not common:
            return True
        if one.literals is not None and other.literals is not None and not one.literals & other.literals:
            return True
        if common != {"object"} or depth > 2:
            return False
        for name in one.required | other.required:
            if one.forbids(name) or other.forbids(name):
                return True
            for left in one.properties.get(name, ()):
                for right in other.properties.get(name, ()):
                    if self._disjoint(self._shape(left), self._shape(right), depth + 1):
                        return True
        return False

    def _shape(self, schema: Any) -> Shape:
        shape = Shape()
        self._add(schema, shape, 0)
        return shape

    def _add(self, schema: Any, shape: Shape, depth: int) -> None:
        if schema is False:
            shape.kinds = frozenset()
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return
        reference = schema.get("$ref")
        if isinstance(reference, str):
            self._add(self._resolve(reference), shape, depth + 1)
            if not self._siblings:
                return
        for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
            self._add(part, shape, depth + 1)
        types = schema.get("type")
        if isinstance(types, str | list):
            listed = [types] if isinstance(types, str) else [kind for kind in types if isinstance(kind, str)]
            shape.kinds &= {"number" if kind == "integer" else kind for kind in listed}
        if "const" in schema:
            shape.narrow([schema["const"]])
        if isinstance(schema.get("enum"), list):
            shape.narrow(schema["enum"])
        self._add_object(schema, shape)

    def _add_object(self, schema: dict[str, Any], shape: Shape) -> None:
        names = schema.get("properties")
        names = names if isinstance(names, dict) else {}
        for name, inner in names.items():
            shape.properties.setdefault(name, []).append(inner)
        required = schema.get("required")
        if isinstance(required, list):
            shape.required |= {name for name in required if isinstance(name, str)}
        if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
            shape.closed.append(frozenset(names))


def kind_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def canonical(value: Any) -> str:
    """Equal for values that JSON schema holds equal: 1 and 1.0, objects in any order."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{canonical(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(canonical, value)) + "]"
    return json.dumps(value)
