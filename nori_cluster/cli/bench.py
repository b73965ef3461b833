"""`nori bench`: measurements, each verb a file of its own, imported when it is called."""

import typer

from nori_cluster.cli.lazy import lazy_group
from nori_cluster.registry import Registry

VERBS = Registry(
    "bench command",
    {
        "serve": "nori_cluster.cli.bench_serve:app",
        "sweep": "nori_cluster.cli.bench_sweep:app",
        "throughput": "nori_cluster.cli.bench_engine:throughput_app",
        "latency": "nori_cluster.cli.bench_engine:latency_app",
        "startup": "nori_cluster.cli.bench_engine:startup_app",
        "compare": "nori_cluster.cli.bench_reports:compare_app",
        "verify": "nori_cluster.cli.bench_reports:verify_app",
        "headline": "nori_cluster.cli.bench_reports:headline_app",
        "schema": "nori_cluster.cli.bench_reports:schema_app",
        "peers": "nori_cluster.cli.bench_peers:app",
        "null": "nori_cluster.cli.bench_null:app",
    },
)
SUMMARIES = {
    "serve": "Send a load to a served model: latencies, throughput, goodput, failures.",
    "sweep": "Latency against throughput, and the highest load within an SLO.",
    "throughput": "Tokens per second of the engine in this process.",
    "latency": "Milliseconds of one batch shape in this process.",
    "startup": "From a fresh process to its first token, phase by phase.",
    "compare": "Ratios of two reports, and the conditions in which they differ.",
    "verify": "Run a report's load again: does it reproduce?",
    "headline": "The one sentence of a report that may be quoted.",
    "schema": "The JSON schema of reports.",
    "peers": "Other servers and ours under the same load, in turn.",
    "null": "What the load client itself can take.",
}


app = typer.Typer(cls=lazy_group(VERBS, SUMMARIES), no_args_is_help=True, add_completion=False)


@app.callback(help="Measure: a served model, the engine in this process, the client itself.")
def bench() -> None:
    """For the help text."""
