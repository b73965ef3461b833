"""Our own walk of a JSON schema: every keyword is either enforced by llguidance, an annotation, or refused by name.

The walk writes a second schema that holds only what is enforced, in the 2020-12 dialect, with each $ref target under
$defs. llguidance sees nothing but that one, so its own leniencies (x-guidance, draft guesses, ignored keywords) never
meet a request. What it enforces was found by experiment: scripts/schema_suite.py repeats them.
"""

import json
from typing import Any
from urllib.parse import unquote

from nori_cluster.grammar import regex
from nori_cluster.grammar.exclusive import Alternatives
from nori_cluster.grammar.finite import has_finite_instance
from nori_cluster.grammar.formats import FORMATS
from nori_cluster.grammar.limits import MAX_DEPTH, MAX_ENTRIES, MAX_NODES, GrammarError

Schema = dict[str, Any] | bool

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
EXACT = 1 << 53  # integers above are not exact as float64, which llguidance computes with
# Asserting keywords of any draft (3 to 2020-12) and of ajv that are not enforced, whatever their value.
REFUSED = frozenset(
    {
        "not", "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas", "dependencies",
        "$dynamicRef", "$recursiveRef", "extends", "disallow", "divisibleBy", "formatMinimum", "formatMaximum",
        "formatExclusiveMinimum", "formatExclusiveMaximum", "patternRequired", "uniqueItemProperties", "instanceof",
        "range", "exclusiveRange", "regexp", "transform", "select", "selectCases", "$merge", "$patch", "$data",
    }
)  # fmt: skip
MEANS_NOTHING_WITHOUT_VALUE = frozenset(
    {
        "items", "prefixItems", "additionalItems", "unevaluatedItems", "format", "additionalProperties",
        "unevaluatedProperties", "propertyNames", "uniqueItems",
    }
)  # fmt: skip
ASSERTED_IN_DRAFT_7 = ("contentEncoding", "contentMediaType")  # annotations since
IN_PLACE = ("anyOf", "oneOf", "allOf", "$ref")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


class Walk:
    """One schema document. `paths`: $ref target → its name in $defs; targets are walked once, cycles end there."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.draft = draft_of(root)
        self.alternatives = Alternatives(lambda ref: self._resolve(self._pointer(ref, ""), ref, ""), self.draft >= 2019)
        self.names: dict[str, str] = {"": "#"}
        self.pending: list[tuple[str, str, Any]] = []
        self.in_place: dict[str, set[str]] = {}  # $ref target → targets that apply to the same instance
        self.nodes = self.entries = 0

    def run(self) -> Schema:
        """The schema to compile. Raises GrammarError."""
        out = self.schema(self.root, "", "#")
        definitions = {}
        while self.pending:
            pointer, name, target = self.pending.pop()
            definitions[name] = self.schema(target, pointer, name)
        check_progress(self.in_place)
        if definitions and isinstance(out, dict):
            out["$defs"] = definitions
        if out is not False and not has_finite_instance(out):
            raise GrammarError("can be met by no finite value: something required contains itself, or is false")
        return out

    def schema(self, schema: Any, path: str, owner: str | None, depth: int = 0) -> Schema:
        """owner: the $ref target that this subschema applies in place of; None = it applies to a part."""
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise GrammarError(f"has too many subschemas: more than {MAX_NODES}")
        if depth > MAX_DEPTH:
            raise GrammarError(f"is nested too deeply at {show(path)}: more than {MAX_DEPTH} levels")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise GrammarError(f"has {brief(schema)} at {show(path)}, where a schema (an object or a boolean) must be")
        if self.draft < 2019 and "$ref" in schema:
            schema = {"$ref": schema["$ref"]}  # older drafts ignore what stands beside it
        self._refuse(schema, path)
        return Node(self, schema, path, owner, depth).write()

    def _refuse(self, schema: dict[str, Any], path: str) -> None:
        for keyword, value in schema.items():
            if value is None and keyword in MEANS_NOTHING_WITHOUT_VALUE:
                raise GrammarError(f"has {keyword!r} at {show(path)} = null")
            if keyword in REFUSED or (self.draft == 7 and keyword in ASSERTED_IN_DRAFT_7):
                raise GrammarError(f"uses {keyword!r} at {show(path)}, which is not supported")
        if "if" in schema and ("then" in schema or "else" in schema):
            raise GrammarError(f"uses 'if' at {show(path)}, which is not supported")
        if schema.get("uniqueItems", False) is not False and schema.get("maxItems") not in (0, 1):
            raise GrammarError(f"uses 'uniqueItems' at {show(path)}, which is not supported")
        names = schema.get("propertyNames", True)
        if names is not True and names not in ({}, {"type": "string"}):
            raise GrammarError(f"uses 'propertyNames' at {show(path)}, which is not supported")

    def target(self, reference: Any, path: str) -> str:
        """The name of a $ref's target, which is queued to be walked."""
        if not isinstance(reference, str):
            raise GrammarError(f"has a '$ref' at {show(path)} that is no string")
        pointer = self._pointer(reference, path)
        if pointer not in self.names:
            self.names[pointer] = name = f"r{len(self.names)}"
            self.pending.append((pointer, name, self._resolve(pointer, reference, path)))
        return self.names[pointer]

    def _pointer(self, reference: str, path: str) -> str:
        base = self.root.get("$id", self.root.get("id"))
        if isinstance(base, str) and base and reference.startswith(base.rstrip("#")):
            reference = "#" + reference[len(base.rstrip("#")) :].removeprefix("#")
        if reference == "#":
            return ""
        if not reference.startswith("#/"):
            raise GrammarError(
                f"uses '$ref' to {brief(reference)} at {show(path)}: only #/… of the same schema is read"
            )
        return unquote(reference[1:])

    def _resolve(self, pointer: str, reference: str, path: str) -> Any:
        found = self.root
        if not pointer:
            return found
        for number, part in enumerate(pointer[1:].split("/")):
            key = part.replace("~1", "/").replace("~0", "~")
            if number and isinstance(found, dict) and isinstance(found.get("$id"), str):
                raise GrammarError(
                    f"uses '$ref' through a subschema with '$id' at {show(path)}, which is not supported"
                )
            if isinstance(found, dict) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                raise GrammarError(f"has a '$ref' at {show(path)} to {brief(reference)}, which is not there")
        return found


class Node:
    """One schema object: `write` copies what is enforced."""

    def __init__(self, walk: Walk, schema: dict[str, Any], path: str, owner: str | None, depth: int) -> None:
        self.walk = walk
        self.schema = schema
        self.path = path
        self.owner = owner
        self.depth = depth
        self.extra: list[Schema] = []  # conjuncts that have no keyword of their own

    def write(self) -> Schema:
        """Simple keywords stay in one group, placed where `properties` stands: that fixes the order of properties."""
        self._check_base()
        simple = self._simple()
        before: dict[str, Any] = {}
        after: dict[str, Any] = {}
        seen_properties = "properties" not in self.schema
        for keyword, value in self.schema.items():
            seen_properties |= keyword == "properties"
            if keyword in IN_PLACE:
                written = self._in_place(keyword, value)
                place = after if seen_properties else before
                if keyword == "oneOf" and self.walk.alternatives.exclude_each_other(value):
                    if "anyOf" in self.schema:
                        self.extra.append({"anyOf": written})
                    else:
                        place["anyOf"] = written
                else:
                    place[keyword] = written
        for keyword in ("const", "enum"):
            if keyword in self.schema:
                after[keyword] = self._literal(keyword, self.schema[keyword])
        out = {**before, **simple, **after}
        if self.extra:
            conjuncts = [*out.pop("allOf", []), *self.extra]
            out["allOf"] = conjuncts
        return out

    def _check_base(self) -> None:
        """A subschema with its own $id starts a new document, which we do not follow."""
        base = self.schema.get("$id")
        inner = self.path != "" and isinstance(base, str) and not base.startswith("#")
        if inner and '"$ref"' in json.dumps(self.schema):
            raise GrammarError(f"uses '$id' at {show(self.path)} around a '$ref', which is not supported")

    def _sub(self, value: Any, *keys: str | int) -> Schema:
        return self.walk.schema(value, below(self.path, *keys), None, self.depth + 1)

    def _fail(self, keyword: str, must: str) -> GrammarError:
        return GrammarError(
            f"has {keyword!r} at {show(self.path)} = {brief(self.schema[keyword])}, which must be {must}"
        )

    def _in_place(self, keyword: str, value: Any) -> Any:
        owner = self.owner
        if keyword == "$ref":
            name = self.walk.target(value, self.path)
            if owner is not None:
                self.walk.in_place.setdefault(owner, set()).add(name)
            return "#" if name == "#" else f"#/$defs/{name}"
        if not isinstance(value, list) or not value:
            raise self._fail(keyword, "a list of at least one schema")
        return [
            self.walk.schema(item, below(self.path, keyword, i), owner, self.depth + 1) for i, item in enumerate(value)
        ]

    def _simple(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        if "type" in self.schema:
            out["type"] = self._types()
        for keyword in _NUMBERS:
            if keyword in self.schema:
                out[keyword] = self._number(keyword, self.schema[keyword])
        for keyword in _COUNTS:
            if keyword in self.schema:
                out[keyword] = self._count(keyword, self.schema[keyword])
        self._string(out)
        self._array(out)
        self._object(out)
        return out

    def _types(self) -> Any:
        types = self.schema["type"]
        listed = [types] if isinstance(types, str) else types
        if not isinstance(listed, list) or not listed or not all(isinstance(t, str) and t in TYPES for t in listed):
            raise self._fail("type", "one or more of " + ", ".join(sorted(TYPES)))
        if "number" in listed:
            listed = [t for t in listed if t != "integer"]
        return listed[0] if len(listed) == 1 else list(dict.fromkeys(listed))

    def _may_be(self, kind: str) -> bool:
        types = self.schema.get("type")
        return types is None or kind == types or (isinstance(types, list) and kind in types)

    def _number(self, keyword: str, value: Any) -> Any:
        if isinstance(value, bool) and keyword.startswith("exclusive"):
            return value  # draft 4
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._fail(keyword, "a number")
        check_number(value, keyword, self.path)
        if keyword == "multipleOf" and value <= 0:
            raise self._fail(keyword, "a number above 0")
        return value

    def _count(self, keyword: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != value // 1:
            raise self._fail(keyword, "a non-negative integer")
        if value > 1 << 31:
            raise self._fail(keyword, "less than 2³¹")
        return int(value)

    def _string(self, out: dict[str, Any]) -> None:
        if "pattern" in self.schema:
            out["pattern"] = self._pattern(self.schema["pattern"], "pattern")
        kind = self.schema.get("format")
        if kind is None or not self._may_be("string"):
            return
        if not isinstance(kind, str) or kind not in FORMATS:
            raise GrammarError(
                f"uses 'format' {brief(kind)} at {show(self.path)}, which is not supported; supported are "
                + ", ".join(FORMATS)
            )
        form = f"^(?:{FORMATS[kind]})$"
        if "pattern" in out:
            self.extra.append({"pattern": form})
        else:
            out["pattern"] = form

    def _pattern(self, pattern: Any, keyword: str) -> str:
        if not isinstance(pattern, str):
            raise self._fail(keyword, "a regular expression")
        try:
            return regex.rewrite(pattern)
        except GrammarError as error:
            raise GrammarError(
                f"has {keyword!r} at {show(self.path)} = {brief(pattern)}: the regular expression {error}"
            ) from error

    def _array(self, out: dict[str, Any]) -> None:
        """prefixItems and items of any draft, as in 2020-12."""
        items, prefix = self.schema.get("items"), self.schema.get("prefixItems")
        key: str | int = "prefixItems"
        rest_key = "items"
        if isinstance(items, list):
            prefix, items, key, rest_key = items, self.schema.get("additionalItems"), "items", "additionalItems"
        elif self.walk.draft < 2020 and prefix is not None:
            raise GrammarError(f"uses 'prefixItems' at {show(self.path)}, which its draft ($schema) does not know")
        if prefix is not None:
            if not isinstance(prefix, list):
                raise self._fail("prefixItems", "a list of schemas")
            out["prefixItems"] = [self._sub(item, key, i) for i, item in enumerate(prefix)]
        if items is not None:
            out["items"] = self._sub(items, rest_key)
        if (rest := self._unevaluated("unevaluatedItems")) is not None and "items" not in out:
            out["items"] = self._sub(rest, "unevaluatedItems")

    def _unevaluated(self, keyword: str) -> Any:
        """A schema for what is left over, where no other keyword beside it could evaluate items or properties."""
        rest = self.schema.get(keyword)
        if rest is None or rest is True or rest == {}:
            return None
        if any(other in self.schema for other in (*IN_PLACE, "if")):
            raise GrammarError(f"uses {keyword!r} at {show(self.path)} beside $ref, allOf, anyOf, oneOf or if, "
                               "which is not supported")  # fmt: skip
        return rest

    def _object(self, out: dict[str, Any]) -> None:
        for keyword in ("properties", "patternProperties"):
            value = self.schema.get(keyword, {})
            if not isinstance(value, dict):
                raise self._fail(keyword, "an object of schemas")
            if value:
                out[keyword] = {}
            for name, schema in value.items():
                written = self._pattern(name, keyword) if keyword == "patternProperties" else name
                if written in out[keyword]:
                    raise GrammarError(f"has two equal patterns in {keyword!r} at {show(self.path)}: {brief(name)}")
                out[keyword][written] = self._sub(schema, keyword, name)
        rest = self.schema.get("additionalProperties", self._unevaluated("unevaluatedProperties"))
        if rest is not None:
            out["additionalProperties"] = self._sub(rest, "additionalProperties")
        required = self.schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise self._fail("required", "a list of strings")
        if required:
            out["required"] = list(dict.fromkeys(required))
        self._least_properties(out)

    def _least_properties(self, out: dict[str, Any]) -> None:
        """llguidance counts a name that is written twice as two properties: only a minimum of one is exact."""
        least = out.get("minProperties", 0)
        if least <= len(out.get("required", ())):
            out.pop("minProperties", None)
        elif least > 1 and self._may_be("object"):
            raise GrammarError(f"uses 'minProperties' {least} at {show(self.path)}, above 1 and above the number of "
                               "required names, which is not supported")  # fmt: skip

    def _literal(self, keyword: str, value: Any) -> Any:
        entries = value if keyword == "enum" else [value]
        if not isinstance(entries, list) or not entries:
            raise self._fail(keyword, "a list of at least one value")
        self.walk.entries += len(entries)
        if self.walk.entries > MAX_ENTRIES:
            raise GrammarError(f"has too many enum entries: more than {MAX_ENTRIES}")
        for entry in entries:
            check_literal(entry, keyword, self.path)
        return value


def check_literal(value: Any, keyword: str, path: str) -> None:
    """Refuse values that llguidance cannot write exactly."""
    if isinstance(value, str) and any((char < " " and char not in "\b\t\n\f\r") or char == "\x7f" for char in value):
        raise GrammarError(f"has a control character in {keyword!r} at {show(path)}, which is not supported")
    if isinstance(value, int | float) and not isinstance(value, bool):
        check_number(value, keyword, path)
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        check_literal(part, keyword, path)


def check_number(value: float, keyword: str, path: str) -> None:
    exact = -EXACT <= value <= EXACT and (value == 0 or abs(value) >= 1e-6)
    if not exact:
        raise GrammarError(f"has {brief(value)} in {keyword!r} at {show(path)}: numbers beyond ±2⁵³, and below 10⁻⁶, "
                           "are not supported")  # fmt: skip


def check_progress(edges: dict[str, set[str]]) -> None:
    """Refuse $refs that come back to themselves without entering a property or an item."""
    done: set[str] = set()
    for start in edges:
        stack, on_path = [(start, iter(sorted(edges[start])))], [start]
        while stack:
            node, targets = stack[-1]
            target = next(targets, None)
            if target is None:
                done.add(node)
                stack.pop()
                on_path.pop()
            elif target in on_path:
                raise GrammarError("has a '$ref' that comes back to itself without entering a property or an item")
            elif target not in done:
                stack.append((target, iter(sorted(edges.get(target, ())))))
                on_path.append(target)


def draft_of(root: Any) -> int:
    """3, 4, 6, 7, 2019 or 2020 by $schema; 2020 where it says nothing we know."""
    uri = root.get("$schema") if isinstance(root, dict) else None
    for draft in (3, 4, 6, 7):
        if isinstance(uri, str) and f"draft-0{draft}" in uri:
            return draft
    return 2019 if isinstance(uri, str) and "2019-09" in uri else 2020


def below(path: str, *keys: str | int) -> str:
    return path + "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)


def show(path: str) -> str:
    return "#" + (path if len(path) <= 120 else path[:117] + "…")


def brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"


def enforced(root: Any) -> Schema:
    """The part of a parsed schema that is enforced, ready to compile. Raises GrammarError naming keyword and path."""
    return Walk(root).run()
