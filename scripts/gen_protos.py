"""Compile protos/ into nori_cluster/rpc/generated.

protoc writes `from nori.x.v1 import y`, a top-level package that does not exist in the wheel; the imports are
rewritten to the package the files live in. `--check` compares with what is committed and writes nothing.
"""

import argparse
import filecmp
import re
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
TARGET = ROOT / "nori_cluster" / "rpc" / "generated"
IMPORT = re.compile(r"^(from|import) nori\.", re.MULTILINE)


def generate(target: Path) -> None:
    files = sorted(str(p.relative_to(PROTOS)) for p in PROTOS.rglob("*.proto"))
    well_known = Path(protoc.__file__).parent / "_proto"
    outs = [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
    code = protoc.main(["protoc", f"-I{PROTOS}", f"-I{well_known}", *outs, *files])
    if code:
        raise SystemExit(code)
    for path in target.rglob("*.py*"):
        text = path.read_text()
        path.write_text(IMPORT.sub(r"\1 nori_cluster.rpc.generated.nori.", text))
    for folder in [target, *(p for p in target.rglob("*") if p.is_dir())]:
        (folder / "__init__.py").write_text("")


def same(left: Path, right: Path) -> bool:
    pairs = filecmp.dircmp(left, right, ignore=["__pycache__"])
    if pairs.left_only or pairs.right_only:
        return False
    _, differ, broken = filecmp.cmpfiles(left, right, pairs.common_files, shallow=False)
    return not differ and not broken and all(same(left / d, right / d) for d in pairs.common_dirs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when the committed files are out of date")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        generate(fresh)
        if check:
            if not same(fresh, TARGET):
                sys.exit("nori_cluster/rpc/generated is out of date: run `make protos`")
            return
    generate(TARGET)


if __name__ == "__main__":
    main()
