"""$NORI_HOME/models: one folder per converted model, complete or absent.

A folder is made under a temporary name by whoever holds the model's lock, and renamed when it is whole.
"""

import fcntl
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nori_cluster import env
from nori_cluster.errors import ModelUnavailable

TEMPORARY = ".making-"


def models_folder() -> Path:
    return env.home() / "models"


def get_or_make(name: str, make: Callable[[Path], None]) -> Path:
    """The folder called `name`; when absent, `make` fills an empty folder that becomes it. One maker at a time:
    another process waits here and then finds the result. What a killed maker left behind is removed first."""
    final = models_folder() / name
    if final.is_dir():
        return final
    try:
        models_folder().mkdir(parents=True, exist_ok=True)
        with _locked(models_folder() / f".{name}.lock"):
            if not final.is_dir():
                _make(final, make)
    except OSError as error:
        raise ModelUnavailable(f"cannot write {error.filename or final}: {error.strerror} (set NORI_HOME)") from error
    return final


def _make(final: Path, make: Callable[[Path], None]) -> None:
    temporary = final.parent / f"{TEMPORARY}{final.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        make(temporary)
        temporary.rename(final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """An advisory lock that the system frees when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
