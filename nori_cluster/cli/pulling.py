"""Making a model source local, with progress bars. Used by `nori serve`, `nori demo` and `nori models`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from nori_cluster.checkpoint.source import resolve
from nori_cluster.cli.served import require_served


class Bars:
    """checkpoint.progress.Progress, drawn on a console; in a log one line per finished task."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @contextmanager
    def task(self, label: str, total: int | None) -> Iterator[Callable[[int], None]]:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console) as bars:
            task = bars.add_task(label, total=total)
            yield lambda count: bars.advance(task, count)


def pull(source: str, console: Console) -> Path:
    """The local checkpoint folder of a source, fetched and converted where needed: one that is served, see
    require_served and checkpoint.source.resolve."""
    return resolve(source, progress=Bars(console), accept=require_served)
