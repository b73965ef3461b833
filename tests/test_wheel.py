"""The wheel: built from this tree, installed into an empty environment, and imported without the server packages."""

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.contract

ROOT = Path(__file__).resolve().parent.parent
PROBE = """
import sys
BLOCKED = {"ray", "fastapi", "starlette", "uvicorn", "grpc", "sqlalchemy"}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
for name in BLOCKED:
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    sys.exit(f"{name} is not blocked: the test proves nothing")
import nori_cluster
from nori_cluster import LLM, SamplingParams
print(nori_cluster.__file__)
"""


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, with the setuptools that is installed: no network, nothing left in the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    source, target = folder / "source", folder / "dist"
    source.mkdir()
    run(
        "cp",
        "-r",
        *(ROOT / name for name in ("nori_cluster", "kernels", "pyproject.toml", "README.md", "LICENSE")),
        source,
        cwd=folder,
    )
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", target, source, cwd=folder)
    (built,) = target.glob("*.whl")
    return built


def test_the_wheel_holds_what_it_must(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for service in ("admin/v1/admin", "dataplane/v1/worker_group", "inference/v1/inference", "router/v1/router"):
        for suffix in ("pb2.py", "pb2.pyi", "pb2_grpc.py"):
            assert f"nori_cluster/rpc/generated/nori/{service}_service_{suffix}" in names
    assert "nori_cluster/py.typed" in names
    assert "nori_cluster/bench/report.schema.json" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    packaged = {name for name in names if name.endswith(".py")}
    packages = (ROOT / "nori_cluster", ROOT / "kernels" / "nori_kernels")
    tree = {p.relative_to(package.parent).as_posix() for package in packages for p in package.rglob("*.py")}
    assert packaged == tree


def test_llm_imports_from_the_wheel_without_the_server_packages(wheel: Path, tmp_path: Path) -> None:
    """The new environment sees this one's packages, but not this checkout: what is imported came out of the wheel."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    (site / "outer.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")  # a plain path: its own .pth are not read
    origin = run(python, "-c", PROBE, cwd=tmp_path).strip()
    assert Path(origin).is_relative_to(site)
