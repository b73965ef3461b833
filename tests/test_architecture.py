"""The checks that keep the tree in shape: who may import whom, how long things may be, what is forbidden outright.

Every rule is a function of one source file and yields problems; BAD holds, per rule, a snippet it must refuse.
Raising a limit is an edit of a table here, with its reason in the commit.
"""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {"file": 500, "function": 60, "kernel function": 120, "engine code": 1300}  # lines
FLOOR = {"types", "errors", "config", "env", "hashing", "registry", "telemetry", "version", "grammar"}
BELOW_WORKER = {"models", "layers", "attention", "quant", "device"}
MAY_IMPORT: dict[str, set[str]] = {  # besides the floor and itself
    **{name: set() for name in FLOOR | {"engine", "checkpoint", "device", "routing"}},
    "quant": {"device"},
    "attention": {"device"},
    "layers": {"attention", "quant", "device"},
    "models": BELOW_WORKER,
    "worker": BELOW_WORKER | {"checkpoint"},
    "frontend": {"checkpoint"},
    "rpc": {"frontend", "engine", "routing"},
    "gateway": {"frontend", "rpc"},
    "cluster": {"worker", "device", "engine", "routing", "rpc", "checkpoint"},
    "planning": {"engine", "routing"},
    "llm": {"engine", "worker", "frontend", "checkpoint"},
    "__init__": {"llm"},
}
IMPURE = {"torch", "ray", "asyncio", "time", "datetime", "threading", "multiprocessing", "socket", "subprocess", "grpc"}
FORBIDDEN: dict[str, set[str]] = {  # path prefix → packages; every prefix that matches counts
    "nori_cluster/engine/": IMPURE,
    "nori_cluster/routing/": IMPURE,
    "nori_cluster/planning/": IMPURE,
    **{f"nori_cluster/{part}/": {"torch"} for part in ("checkpoint", "frontend", "rpc", "gateway", "cli")},
    **{f"nori_cluster/{module}.py": {"torch"} for module in FLOOR},
    "nori_cluster/grammar/": {"torch"},
    "nori_cluster/worker/channel.py": {"torch"},
    "kernels/nori_kernels/": {"nori_cluster", "ray", "grpc", "fastapi"},
}
VAGUE = {"utils", "util", "helpers", "common", "misc", "manager2"}
MACHINE_PATHS = re.compile(r"/(?:work/(?:main|shared|\.library|\.mirror)|opt/(?:wheels|pypi))\b")

Source = tuple[str, str, ast.Module]  # path from the root, text, syntax tree
Rule = Callable[[Source], Iterator[str]]


def part_of(module: str) -> str | None:
    """The folder or top-level module of nori_cluster that a dotted name belongs to."""
    names = module.split(".")
    return (names[1] if len(names) > 1 else "__init__") if names[0] == "nori_cluster" else None


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{a.name}" if module == "nori_cluster" else module) for a in node.names)


def import_arrows(source: Source) -> Iterator[str]:
    path, _, tree = source
    own = part_of(path.removesuffix(".py").replace("/", "."))
    allowed = MAY_IMPORT.get(own or "", set()) | FLOOR | {own}
    for line, module in imports(tree):
        if module.startswith("."):
            yield f"{line}: relative import"
        target = part_of(module)
        if own not in (None, "cli", "bench") and target is not None and target not in allowed:
            yield f"{line}: {own} must not import {target}"


def forbidden_packages(source: Source) -> Iterator[str]:
    path, _, tree = source
    banned = set().union(*(names for prefix, names in FORBIDDEN.items() if path.startswith(prefix)))
    if path.startswith("nori_cluster/") and not path.startswith("nori_cluster/cluster/"):
        banned.add("ray")
    for line, module in imports(tree):
        if module.split(".")[0] in banned:
            yield f"{line}: imports {module}"


def imports_at_the_top(source: Source) -> Iterator[str]:
    path, _, tree = source
    if path == "nori_cluster/registry.py":
        return
    for function in functions(tree):
        yield from (f"{line}: {module} imported inside a function" for line, module in imports(function))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in {"import_module", "__import__"}:
            yield f"{node.lineno}: only registry.py imports by name"


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def environment(source: Source) -> Iterator[str]:
    path, _, tree = source
    for node in ast.walk(tree):
        name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        taken = isinstance(node, ast.ImportFrom) and node.module == "os" and {a.name for a in node.names}
        if path != "nori_cluster/env.py" and (
            name in {"os.environ", "os.environb", "os.getenv", "os.putenv"} or (taken and taken & {"environ", "getenv"})
        ):
            yield f"{getattr(node, 'lineno', 0)}: the environment is read in env.py only"


def forbidden_names(source: Source) -> Iterator[str]:
    path, _, tree = source
    for name in VAGUE & set(path.removesuffix(".py").split("/")):
        yield f"0: a place called {name!r} says nothing"
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield f"{node.lineno}: global"
        if isinstance(node, ast.ClassDef) and node.name.endswith("Mixin"):
            yield f"{node.lineno}: mixin {node.name}"


def lengths(source: Source) -> Iterator[str]:
    path, text, tree = source
    if (lines := text.count("\n")) > LIMITS["file"]:
        yield f"0: {lines} lines, at most {LIMITS['file']}"
    limit = LIMITS["kernel function" if path.startswith("kernels/") else "function"]
    for function in functions(tree):
        if (lines := (function.end_lineno or 0) - function.lineno + 1) > limit:
            yield f"{function.lineno}: {function.name} has {lines} lines, at most {limit}"


def code_lines(text: str) -> int:
    """Lines that hold code: not blank, not only a comment, not part of a docstring."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


RULES: list[Rule] = [import_arrows, forbidden_packages, imports_at_the_top, environment, forbidden_names, lengths]
BAD: list[tuple[Rule, str, str]] = [
    (import_arrows, "nori_cluster/engine/core.py", "from nori_cluster.worker.inline import InlineExecutor"),
    (import_arrows, "nori_cluster/errors.py", "import nori_cluster.rpc.public"),
    (import_arrows, "nori_cluster/rpc/public.py", "from nori_cluster import gateway"),
    (import_arrows, "nori_cluster/engine/core.py", "from . import scheduler"),
    (forbidden_packages, "nori_cluster/engine/core.py", "import time"),
    (forbidden_packages, "nori_cluster/worker/channel.py", "from torch import nn"),
    (forbidden_packages, "nori_cluster/cli/serve.py", "import ray.util"),
    (forbidden_packages, "kernels/nori_kernels/norm.py", "import nori_cluster.types"),
    (imports_at_the_top, "nori_cluster/llm.py", "def f():\n    import torch"),
    (imports_at_the_top, "nori_cluster/llm.py", "import importlib\nx = importlib.import_module('torch')"),
    (environment, "nori_cluster/cli/main.py", "import os\nx = os.environ['HOME']"),
    (environment, "nori_cluster/cli/main.py", "from os import getenv"),
    (forbidden_names, "nori_cluster/engine/core.py", "def f():\n    global x\n    x = 1"),
    (forbidden_names, "nori_cluster/engine/core.py", "class QueueMixin: ..."),
    (forbidden_names, "nori_cluster/engine/utils.py", ""),
    (lengths, "nori_cluster/engine/core.py", "x = 1\n" * 501),
    (lengths, "nori_cluster/engine/core.py", "def f():\n" + "    x = 1\n" * 60),
    (lengths, "kernels/nori_kernels/norm.py", "def f():\n" + "    x = 1\n" * 120),
]


def sources(*folders: str) -> Iterator[Source]:
    for path in sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith("nori_cluster/rpc/generated/"):
            text = path.read_text()
            yield name, text, ast.parse(text, name)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule: Rule) -> None:
    problems = [f"{s[0]}:{problem}" for s in sources("nori_cluster", "kernels") for problem in rule(s)]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(("rule", "path", "text"), BAD, ids=lambda value: getattr(value, "__name__", None))
def test_rule_can_fail(rule: Rule, path: str, text: str) -> None:
    assert list(rule((path, text, ast.parse(text))))
    assert not list(rule(("nori_cluster/cli/main.py", "import sys\n", ast.parse("import sys\n"))))


def test_engine_stays_small() -> None:
    counted = {path: code_lines(text) for path, text, _ in sources("nori_cluster/engine")}
    assert sum(counted.values()) <= LIMITS["engine code"], counted


def test_code_lines_leaves_out_comments_blanks_and_docstrings() -> None:
    assert (
        code_lines(
            '"""Doc\nstring."""\n\n# why\nx = [\n    1,\n]  # end\n\ndef f():\n    """Doc."""\n    return """\n"""\n'
        )
        == 6
    )


def machine_paths(files: Iterable[Path]) -> list[str]:
    found = []
    for path in files:
        text = path.read_text(errors="replace") if path.is_file() else ""
        found += [
            f"{path}:{n}: {line.strip()[:80]}"
            for n, line in enumerate(text.splitlines(), 1)
            if MACHINE_PATHS.search(line)
        ]
    return found


def test_no_path_of_one_machine_is_tracked(tmp_path: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert machine_paths(ROOT / name for name in listed.split("\0") if name) == []
    bad = tmp_path / "notes.md"
    bad.write_text("see /opt" + "/wheels/x.whl\n")
    assert len(machine_paths([bad])) == 1


def test_every_test_file_has_a_marker() -> None:
    """`make test` runs the suite marker by marker: a file without one would never run."""
    marked = re.compile(
        r"^pytestmark = .*pytest\.mark\.(unit|contract|e2e|drill|gpu)|^@pytest\.mark\.(unit|contract|e2e|drill|gpu)",
        re.M,
    )
    unmarked = [p for p in sorted((ROOT / "tests").rglob("test_*.py")) if not marked.search(p.read_text())]
    assert unmarked == []
