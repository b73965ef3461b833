"""What a bench verb shows on a terminal: a bar while it runs, a table of the Summary after it."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from nori_cluster.bench.records import Percentiles, Summary

LATENCIES = ("ttft", "tpot", "itl", "e2e")


class LoadBar:
    """A runner.Show, drawn; in a log one line per phase."""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
        )
        self._bars = Progress(*columns, console=console)
        self._task: TaskID | None = None
        self._phase = ""

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bars.stop()

    def __call__(self, phase: str, ended: int, failed: int, total: int | None) -> None:
        count = (
            f"{ended}{f'/{total}' if total else ''} requests{f', {failed} failed' if failed else ''}" if ended else ""
        )
        if phase != self._phase:
            if self._task is not None:
                self._bars.remove_task(self._task)
            self._phase, self._task = phase, self._bars.add_task(phase, total=total, count=count)
        elif self._task is not None:
            self._bars.update(self._task, completed=ended, total=total, count=count)


def latencies(summary: Summary) -> Table:
    table = Table("ms", "p50", "p90", "p99", "max", "mean", "samples", box=None, pad_edge=False)
    for name in (*LATENCIES, "send_lag"):
        values: Percentiles | None = getattr(summary, name)
        if values is not None:
            numbers = (values.p50, values.p90, values.p99, values.max, values.mean)
            label = name.upper() if name in LATENCIES else "sent late"
            table.add_row(label, *(f"{number:,.1f}" for number in numbers), f"{values.count}")
    return table


def show_summary(summary: Summary, console: Console) -> None:
    """Latencies and the window they are of, the client's part, then what went wrong. Rates are shown by the report."""
    s = summary
    span = f"{s.window_start:.1f} s to {s.window_end:.1f} s"
    console.print(f"window {span} ({s.steady_rule}); whole run {s.run_output_tok_s:,.1f} tok/s in {s.run_s:.1f} s")
    console.print(latencies(s))
    console.print(f"client: {s.client_cpu:.0%} of a core at most, {s.client_events_s:,.0f} events/s")
    if s.client_cpu > 0.7:
        console.print("the client was busy: its own times are in the figures; use more --processes", style="yellow")
    if s.short_outputs:
        console.print(f"{s.short_outputs} outputs were shorter than asked for (ignore_eos not served?)", style="yellow")
    if s.mismatched is not None:
        console.print(f"{s.mismatched} requests differ from the reference", style="red" if s.mismatched else "green")
    for kind, count in s.failures.items():
        console.print(f"{count} × {kind}", style="red")
    for example in s.failure_examples:
        console.print(Text(f"  {example}", style="red"))
