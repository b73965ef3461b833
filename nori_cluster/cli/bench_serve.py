"""`nori bench serve`: a load against a served model, over HTTP or gRPC, and what came of it."""

from pathlib import Path

import msgspec
import typer
from rich.console import Console

from nori_cluster import env
from nori_cluster.bench.metrics import summarize
from nori_cluster.bench.reference import write_tokens
from nori_cluster.bench.runner import run_load
from nori_cluster.bench.workload import Workload
from nori_cluster.cli import bench_load as flags
from nori_cluster.cli.bench_show import LoadBar, show_summary
from nori_cluster.cli.flags import Json
from nori_cluster.errors import ConfigError

app = typer.Typer(add_completion=False)


@app.command()
def serve(
    context: typer.Context,
    url: flags.Url = "http://127.0.0.1:8000",
    model: flags.Model = None,
    endpoint: flags.Endpoint = "completions",
    api_key: flags.ApiKey = None,
    arrival: flags.Arrival = None,
    concurrency: flags.Concurrency = None,
    rate: flags.Rate = None,
    burstiness: flags.Burstiness = None,
    trace: flags.Trace = None,
    trace_format: flags.TraceFormat = None,
    trace_speed: flags.TraceSpeed = None,
    requests: flags.Requests = None,
    duration: flags.Duration = None,
    warmup: flags.Warmup = 2,
    seed: flags.Seed = 0,
    input: flags.Input = None,
    output: flags.Output = None,
    max_input: flags.MaxInput = None,
    max_output: flags.MaxOutput = None,
    shared_prefix: flags.SharedPrefix = 0,
    vocab_size: flags.VocabSize = 32_000,
    temperature: flags.Temperature = 0.0,
    sampling: flags.Sampling = None,
    ignore_eos: flags.IgnoreEos = True,
    processes: flags.Processes = 1,
    timeout: flags.Timeout = 600.0,
    slo_ttft: flags.SloTtft = "500ms",
    slo_tpot: flags.SloTpot = "30ms",
    slo_e2e: flags.SloE2e = "none",
    reference: flags.Reference = None,
    save_tokens: flags.SaveTokens = None,
    json: Json = False,
) -> None:
    """Send a load to a server and report latencies, throughput, goodput and failures.

    The last line on stdout is one JSON object. Exit code 1 when no request ended well or tokens differ.
    """
    spec, slo = flags.spec_of(context.params), flags.slo_of(slo_ttft, slo_tpot, slo_e2e)
    check_writable(save_tokens)
    notes = Console(stderr=True, highlight=False)
    with LoadBar(notes) as bar:
        result = run_load(
            url,
            model,
            spec,
            api_key=api_key or env.api_key(),
            reference=reference,
            with_ids=save_tokens is not None,
            progress=bar,
        )
    summary = summarize(result.records, spec, slo, result.cpus, reference=reference is not None)
    if not json:
        show_summary(summary, notes)
    if save_tokens is not None:
        count = write_tokens(save_tokens, result.model, Workload(spec), result.records)
        notes.print(f"tokens of {count} requests are in {save_tokens}", markup=False)
    line = {"kind": "serve", "url": url, "model": result.model, "started": result.started, "load": spec, "slo": slo}
    typer.echo(msgspec.json.encode({**line, "summary": summary}))
    raise typer.Exit(0 if summary.completed and not summary.mismatched else 1)


def check_writable(path: Path | None) -> None:
    """Raises ConfigError before the run rather than after it."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(f"--save-tokens {path}: not a file in a folder that exists")
