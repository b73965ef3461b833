"""`nori bench serve`: a load against a served model, over HTTP or gRPC, and what came of it."""

from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.console import Console

from nori_cluster import env
from nori_cluster.bench.reference import write_tokens
from nori_cluster.bench.runner import LoadResult, run_load
from nori_cluster.bench.served import serve_report
from nori_cluster.bench.workload import Workload
from nori_cluster.cli import bench_load as flags
from nori_cluster.cli import bench_output as output_flags
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
    window: flags.WindowChoice = "auto",
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
    rounds: output_flags.Rounds = 1,
    server_info: output_flags.ServerInfo = None,
    admin: output_flags.Admin = None,
    prices: output_flags.PriceFile = None,
    label: output_flags.Label = "",
    out: output_flags.Out = None,
    json: Json = False,
) -> None:
    """Send a load to a server and report latencies, throughput, goodput and failures.

    Each further round has the next seed, so that no cache knows its prompts. The last line on stdout is one JSON
    object. Exit code 1 when no request ended well or tokens differ.
    """
    raise typer.Exit(measure(context.params))


def measure(given: dict[str, Any]) -> int:
    """given: the parameters of `serve` by name. Returns the exit code."""
    spec = flags.spec_of(given)
    slo = flags.slo_of(given["slo_ttft"], given["slo_tpot"], given["slo_e2e"])
    told = output_flags.told_by(given)
    reference, save_tokens = given["reference"], given["save_tokens"]
    check_files(reference, save_tokens, given["rounds"])
    notes = Console(stderr=True, highlight=False)
    results: list[LoadResult] = []
    for number in range(given["rounds"]):
        with LoadBar(notes) as bar:
            result = run_load(
                given["url"],
                given["model"],
                msgspec.structs.replace(spec, seed=spec.seed + number),
                api_key=given["api_key"] or env.api_key(),
                reference=reference,
                with_ids=save_tokens is not None,
                progress=bar,
            )
        results.append(result)
    if save_tokens is not None:
        count = write_tokens(save_tokens, results[0].model, Workload(spec), results[0].records)
        notes.print(f"tokens of {count} requests are in {save_tokens}", markup=False)
    report = serve_report(results, spec, slo, told, reference=reference is not None)
    summary = report.summary
    assert summary is not None, "a load has a summary"
    if not given["json"]:
        show_summary(summary, notes)
    output_flags.finish(report, given["out"], given["json"])
    return 0 if summary.completed and not summary.mismatched else 1


def check_files(reference: Path | None, save_tokens: Path | None, rounds: int) -> None:
    """Raises ConfigError before the run rather than after it."""
    if save_tokens is not None and (save_tokens.is_dir() or not save_tokens.absolute().parent.is_dir()):
        raise ConfigError(f"--save-tokens {save_tokens}: not a file in a folder that exists")
    if reference is not None and rounds > 1:
        raise ConfigError("--reference goes with one round: every further round has other prompts")
