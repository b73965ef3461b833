"""Whether a walked schema has a finite instance at all: one that has none would be generated until max_tokens.

Errs on one side: a schema that has an instance is never said to have none.
"""

from typing import Any

SCALARS = frozenset({"null", "boolean", "integer", "number", "string"})


def has_finite_instance(schema: Any) -> bool:
    """schema: as the walk writes it. False for one that can only be met by nesting for ever."""
    definitions = schema.get("$defs", {}) if isinstance(schema, dict) else {}
    targets = {"#": schema, **{f"#/$defs/{name}": target for name, target in definitions.items()}}
    known: set[str] = set()
    while True:
        found = {name for name, target in targets.items() if name not in known and _ends(target, known)}
        if not found:
            return "#" in known
        known |= found


def _ends(schema: Any, known: set[str]) -> bool:
    """With the instances of the targets in `known` as building blocks."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema and schema["$ref"] not in known:
        return False
    if not all(_ends(part, known) for part in schema.get("allOf", ())):
        return False
    if not all(any(_ends(part, known) for part in schema[key]) for key in ("anyOf", "oneOf") if key in schema):
        return False
    types = schema.get("type")
    if types is None or "const" in schema or "enum" in schema:
        return True
    kinds = {types} if isinstance(types, str) else set(types)
    return (
        bool(kinds & SCALARS)
        or ("object" in kinds and _object_ends(schema, known))
        or ("array" in kinds and _array_ends(schema, known))
    )


def _object_ends(schema: dict[str, Any], known: set[str]) -> bool:
    properties = schema.get("properties", {})
    return all(_ends(properties.get(name, True), known) for name in schema.get("required", ()))


def _array_ends(schema: dict[str, Any], known: set[str]) -> bool:
    least, prefix = schema.get("minItems", 0), schema.get("prefixItems", [])
    if not all(_ends(item, known) for item in prefix[:least]):
        return False
    return least <= len(prefix) or _ends(schema.get("items", True), known)
