"""Does the mask of a JSON schema admit exactly its instances? Counted on public suites, which are not kept here.

    git clone https://github.com/json-schema-org/JSON-Schema-Test-Suite
    make schema-suite ARGS="--suite JSON-Schema-Test-Suite"
    git clone https://github.com/guidance-ai/jsonschemabench
    make schema-suite ARGS="--suite JSON-Schema-Test-Suite --bench jsonschemabench --sample 1000"

wrong: the mask admits an instance that the schema forbids (must be 0: the exit status says so).
narrow: it refuses a valid instance of a schema that was accepted. refused: the schema gets a 400.
An instance is written compactly and with json.dumps' spaces, in its own order and in the schema's.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from nori_cluster import env
from nori_cluster.frontend.constraint_checker import CompilerProcess
from nori_cluster.frontend.tokenizer import Tokenizer
from nori_cluster.grammar import compile_matcher, load_tokenizer
from nori_cluster.types import Constraint

IN_PLACE = ("allOf", "anyOf", "oneOf")
OLD_DRAFTS = {  # their tests do not say $schema
    f"draft{n}": f"http://json-schema.org/draft-0{n}/schema#" for n in (3, 4, 6, 7)
}
MASKED = 400  # tokens of an instance up to which every mask is looked at, not only whether tokens are consumed


@dataclass
class Counts:
    """Of one suite. narrow_by, refused_by: counts by cause; *_list: where."""

    schemas: int = 0
    refused: int = 0
    valid: int = 0
    invalid: int = 0
    wrong: int = 0
    narrow: int = 0
    refused_by: Counter[str] = field(default_factory=Counter)
    narrow_by: Counter[str] = field(default_factory=Counter)
    wrong_list: list[str] = field(default_factory=list)
    narrow_list: list[str] = field(default_factory=list)
    compile_ms: list[float] = field(default_factory=list)
    mask_us: list[float] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        out: dict[str, Any] = {
            name: getattr(self, name) for name in ("schemas", "refused", "valid", "invalid", "wrong", "narrow")
        }
        out["narrow_percent"] = round(100 * self.narrow / max(self.valid, 1), 2)
        for name in ("compile_ms", "mask_us"):
            values = getattr(self, name)
            if values:
                out[name] = {
                    f"p{q}": round(float(np.percentile(values, q)), 3 if name == "compile_ms" else 1) for q in (50, 99)
                } | {"max": round(max(values), 1), "count": len(values)}
        out |= {"refused_by": dict(self.refused_by.most_common()), "narrow_by": dict(self.narrow_by.most_common())}
        return out | {"wrong_list": self.wrong_list[:50], "narrow_list": self.narrow_list[:100]}


class Judge:
    """Compiles schemas and walks instances under their masks."""

    def __init__(self, definition: str) -> None:
        self.eos = 0
        self.tokenizer = load_tokenizer(definition, 0, (self.eos,))
        self.process = CompilerProcess(Tokenizer(definition, eos_token_ids=(self.eos,)))
        self.row = np.zeros((1, (self.tokenizer.vocab_size + 31) // 32), np.int32)

    def compiled(self, schema: Any, counts: Counts) -> llguidance.LLMatcher | None:
        counts.schemas += 1
        constraint = Constraint("json_schema", json.dumps(schema, ensure_ascii=False))
        reason = self.process.verdict(constraint)
        if reason:
            counts.refused += 1
            counts.refused_by[cause_of_refusal(reason)] += 1
            return None
        began = time.perf_counter()
        matcher = compile_matcher(self.tokenizer, constraint)
        counts.compile_ms.append((time.perf_counter() - began) * 1e3)
        return matcher

    def admits(self, matcher: llguidance.LLMatcher, text: str, counts: Counts) -> bool:
        walk = matcher.deep_copy()
        ids = self.tokenizer.tokenize_bytes(text.encode())
        if len(ids) > MASKED:
            return walk.try_consume_tokens(ids) == len(ids) and walk.is_accepting()
        for id_ in [*ids, self.eos]:
            began = time.perf_counter()
            fill_next_token_bitmask(walk, self.row)
            counts.mask_us.append((time.perf_counter() - began) * 1e6)
            if not self.row[0, id_ // 32] >> (id_ % 32) & 1:
                return False
            if id_ != self.eos and not walk.consume_token(id_):
                return False
        return True

    def judge(self, schema: Any, tests: list[dict[str, Any]], where: str, counts: Counts) -> None:
        matcher = self.compiled(schema, counts)
        if matcher is None:
            return
        for test in tests:
            at = f"{where} / {test.get('description', '')}"
            admitted = any(self.admits(matcher, text, counts) for text in spellings(schema, test["data"]))
            if test["valid"]:
                counts.valid += 1
                if not admitted:
                    counts.narrow += 1
                    cause = cause_of_narrow(schema, test["data"])
                    counts.narrow_by[cause] += 1
                    counts.narrow_list.append(f"{cause}: {at}"[:200])
            else:
                counts.invalid += 1
                if admitted:
                    counts.wrong += 1
                    counts.wrong_list.append(
                        f"{at}: {json.dumps(schema)[:300]} admits {json.dumps(test['data'])[:200]}"
                    )


def spellings(schema: Any, instance: Any) -> list[str]:
    """JSON texts of one instance."""
    texts = []
    for value in (in_order(instance, [schema], schema), instance):
        texts.append(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
        texts.append(json.dumps(value, ensure_ascii=False))
    return list(dict.fromkeys(texts))


def in_order(instance: Any, schemas: list[Any], root: Any) -> Any:
    """The instance with the properties of its objects in the order of the schemas that apply to it."""
    if isinstance(instance, dict):
        known: dict[str, list[Any]] = {}
        rest: list[Any] = []
        for node in applied(schemas, root, set()):
            for name, inner in (node.get("properties") or {}).items():
                known.setdefault(name, []).append(inner)
            for name in node.get("required") or ():
                known.setdefault(name, []) if isinstance(name, str) else None
            rest += [node.get("additionalProperties"), *(node.get("patternProperties") or {}).values()]
        names = [name for name in known if name in instance] + [name for name in instance if name not in known]
        return {name: in_order(instance[name], known.get(name) or rest, root) for name in names}
    if isinstance(instance, list):
        nodes = list(applied(schemas, root, set()))
        out = []
        for i, item in enumerate(instance):
            inner = []
            for node in nodes:
                for key in ("prefixItems", "items", "additionalItems"):
                    value = node.get(key)
                    inner += [value] if not isinstance(value, list) else value[i : i + 1]
            out.append(in_order(item, inner, root))
        return out
    return instance


def applied(schemas: list[Any], root: Any, seen: set[int]) -> Iterator[dict[str, Any]]:
    """The schema objects that apply to one instance in place, in order of appearance."""
    for schema in schemas:
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        inner = [schema[key] for key in schema if key in (*IN_PLACE, "$ref", "properties")]
        own = {key: value for key, value in schema.items() if key not in (*IN_PLACE, "$ref")}
        if "properties" not in schema:
            yield own
        for value in inner:
            if value is schema.get("properties"):
                yield own
            elif isinstance(value, str):
                yield from applied([pointed(root, value)], root, seen)
            else:
                yield from applied(value, root, seen)


def pointed(root: Any, reference: str) -> Any:
    found = root
    for part in reference.partition("#")[2].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, dict) else None
    return found


def cause_of_refusal(reason: str) -> str:
    keyword = re.match(r"(?:uses|has) (?:a |an )?'([^']+)'(?: (\"[^\"]*\"))?", reason)
    if keyword is None:
        return re.sub(r"[\d]+|\"[^\"]*\"|/.*", "…", reason)[:90]
    return f"{keyword[1]} {keyword[2]}" if keyword[1] == "format" else keyword[1]


def cause_of_narrow(schema: Any, instance: Any) -> str:
    text, written = json.dumps(instance), json.dumps(schema)
    if re.search(r"\d\.0\b|\de[+-]?\d", text):
        return "a number written as 1.0 or with an exponent"
    if '"format"' in written:
        return "a format that is enforced"
    if re.search(r"\\u00[01]|\x7f", text):
        return "a control character"
    if "patternProperties" in written or "additionalProperties" in written:
        return "property names or their order"
    return "other"


def test_suite(judge: Judge, folder: Path, pattern: str) -> Counts:
    counts = Counts()
    for file in sorted(folder.glob(pattern)):
        for group in json.loads(file.read_text()):
            schema = group["schema"]
            if isinstance(schema, dict) and folder.name in OLD_DRAFTS:
                schema.setdefault("$schema", OLD_DRAFTS[folder.name])
            judge.judge(schema, group["tests"], f"{file.stem} / {group['description']}", counts)
    return counts


def bench(judge: Judge, folder: Path, sample: int) -> Counts:
    counts = Counts()
    files = sorted((folder / "maskbench" / "data").glob("*.json"))
    random.Random(0).shuffle(files)
    for file in files[:sample]:
        content = json.loads(file.read_text())
        judge.judge(content["schema"], content.get("tests", []), file.stem, counts)
    return counts


def byte_tokenizer() -> str:
    """One token per byte and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Library(models.BPE(vocab={text: i for i, text in enumerate(["</s>", *alphabet])}, merges=[]))
    library.add_special_tokens(["</s>"])
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    return str(library.to_str())


def commit(folder: Path) -> str:
    done = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", type=Path, help="JSON-Schema-Test-Suite")
    parser.add_argument("--suite-commit", help="when the folder has no .git")
    parser.add_argument("--draft", default="draft2020-12")
    parser.add_argument("--bench", type=Path, help="jsonschemabench")
    parser.add_argument("--bench-commit")
    parser.add_argument("--sample", type=int, default=1000, help="schemas of jsonschemabench (all: 20000)")
    parser.add_argument(
        "--tokenizer", type=Path, help="tokenizer.json (default: the demo model's, else one token per byte)"
    )
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args = parser.parse_args()
    if args.suite is None or not (args.suite / "tests" / args.draft).is_dir():
        print(f"skipped: --suite names no JSON-Schema-Test-Suite ({args.suite}); see the top of {__file__}")
        return 0
    demo = env.home() / "models" / "smollm2-135m" / "tokenizer.json"
    path = args.tokenizer or (demo if demo.is_file() else None)
    judge, of_bytes = Judge(path.read_text() if path else byte_tokenizer()), Judge(byte_tokenizer())
    tests = args.suite / "tests" / args.draft
    result: dict[str, Any] = {
        "llguidance": llguidance.__version__ if hasattr(llguidance, "__version__") else "",
        "tokenizer": path.parent.name if path else "one token per byte",
        "suite_commit": args.suite_commit or commit(args.suite),
        args.draft: test_suite(of_bytes, tests, "*.json").report(),
        f"{args.draft} optional formats": test_suite(of_bytes, tests, "optional/format/*.json").report(),
        f"{args.draft} optional": test_suite(of_bytes, tests, "optional/*.json").report(),
    }
    if args.bench is not None:
        result["bench_commit"] = args.bench_commit or commit(args.bench)
        result[f"jsonschemabench, {args.sample} schemas"] = bench(judge, args.bench, args.sample).report()
    text = json.dumps(result, indent=1, ensure_ascii=False)
    if args.out is not None:
        args.out.write_text(text + "\n")
    print(text)
    wrong = sum(part["wrong"] for part in result.values() if isinstance(part, dict))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
