"""`nori bench throughput`, `latency`, `startup`: the engine in this process, or in fresh ones."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from nori_cluster.bench import inprocess
from nori_cluster.bench.cost import read_prices
from nori_cluster.bench.environment import busy_share, machine
from nori_cluster.bench.report import Batch, Kind, build_in_process
from nori_cluster.checkpoint.source import model_name
from nori_cluster.cli import bench_output as output
from nori_cluster.cli import flags
from nori_cluster.cli.flags import Json
from nori_cluster.cli.options import human_int
from nori_cluster.errors import ConfigError
from nori_cluster.llm import LLM

throughput_app, latency_app, startup_app = (typer.Typer(add_completion=False) for _ in range(3))
ENGINE = "Engine"
ENGINE_FLAGS = ("dtype", "device", "threads", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
                "batch_invariant", "speculative_config")  # fmt: skip
NEW_PROMPTS = "prefix caches empty of these prompts: none was sent before"
WARM_FILES = "weights in the page cache of the system unless this is its first start; no compiled code is kept"

Model = Annotated[str, typer.Argument(help="smollm2-135m, a checkpoint folder, a .gguf file or a Hugging Face id.")]
Size = Annotated[int, typer.Option("--batch-size", min=1, help="Prompts at once.")]
Input = Annotated[int, typer.Option("--input", min=1, help="Prompt tokens.")]
Output = Annotated[int, typer.Option("--output", min=1, help="Output tokens.")]
Rounds = Annotated[int, typer.Option("--rounds", min=2, max=100, help="Repetitions; the median counts.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Same seed, same prompts.")]
Dtype = Annotated[str | None, typer.Option("--dtype", show_default="auto", help="As of serve.", rich_help_panel=ENGINE)]
Device = Annotated[
    str | None, typer.Option("--device", show_default="auto", help="cpu or cuda.", rich_help_panel=ENGINE)
]
Threads = Annotated[
    int | None, typer.Option("--threads", show_default="all cores", help="CPU threads.", rich_help_panel=ENGINE)
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        "--max-model-len", parser=human_int, metavar="<size>", show_default="the model's", rich_help_panel=ENGINE,
        help="Longest context.",
    ),
]  # fmt: skip
MaxSeqs = Annotated[
    int | None,
    typer.Option("--max-num-seqs", help="Sequences per step.", show_default="64", rich_help_panel=ENGINE),
]
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-num-batched-tokens", help="Tokens per step.", show_default="by device", rich_help_panel=ENGINE),
]


def settings_of(given: dict[str, Any]) -> dict[str, Any]:
    """The keywords of LLM that were given."""
    return {name: given[name] for name in ENGINE_FLAGS if given.get(name) is not None}


def bar(what: str, done: int, total: int) -> None:
    output.NOTES.print(f"{what}: {done + 1} of {total}", markup=False, style="dim")


def check_prices(prices: Path | None) -> None:
    """Raises ConfigError before minutes are spent."""
    if prices is not None:
        read_prices(prices)


def run(kind: Kind, given: dict[str, Any], batch: Batch) -> None:
    """throughput or latency, to its report."""
    check_prices(given["prices"])
    host = machine(busy_share())
    started = datetime.now(UTC).isoformat(timespec="seconds")
    llm = LLM(given["model"], progress=True, **settings_of(given))
    if kind == "throughput":
        rounds = inprocess.throughput(llm, batch, given["rounds"], bar)
    else:
        rounds = inprocess.latency(llm, batch, given["repeats"], given["rounds"], bar)
    found = inprocess.conditions(llm.spec, llm.config, host, NEW_PROMPTS)
    prices = None if given["prices"] is None else read_prices(given["prices"])
    report = build_in_process(
        kind=kind,
        batch=batch,
        rounds=rounds,
        conditions=found,
        started=started,
        host=host,
        prices=prices,
        label=given["label"],
    )
    output.finish(report, given["out"], given["json"])


@throughput_app.command()
def throughput(
    context: typer.Context,
    model: Model = "smollm2-135m",
    prompts: Annotated[int, typer.Option("--prompts", "-n", min=1, help="Given at once.")] = 64,
    input: Input = 128,
    output_tokens: Output = 128,
    rounds: Rounds = 3,
    seed: Seed = 0,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxSeqs = None,
    max_num_batched_tokens: MaxTokens = None,
    batch_invariant: flags.BatchInvariant = None,
    speculative_config: flags.Speculative = None,
    prices: output.PriceFile = None,
    label: output.Label = "",
    out: output.Out = None,
    json: Json = False,
) -> None:
    """Tokens per second of the engine in this process: no sockets, no arrivals, no service level.

    Example: nori bench throughput smollm2-135m --prompts 64 --input 128 --output 64
    """
    run("throughput", context.params, Batch(size=prompts, input=input, output=output_tokens, seed=seed))


@latency_app.command()
def latency(
    context: typer.Context,
    model: Model = "smollm2-135m",
    batch_size: Size = 1,
    input: Input = 32,
    output_tokens: Output = 128,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Calls per round.")] = 10,
    rounds: Rounds = 3,
    seed: Seed = 0,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxSeqs = None,
    max_num_batched_tokens: MaxTokens = None,
    batch_invariant: flags.BatchInvariant = None,
    speculative_config: flags.Speculative = None,
    prices: output.PriceFile = None,
    label: output.Label = "",
    out: output.Out = None,
    json: Json = False,
) -> None:
    """Milliseconds of one batch shape in this process, over and over: P50, P90, P99.

    Example: nori bench latency smollm2-135m --batch-size 8 --input 32 --output 128
    """
    run("latency", context.params, Batch(size=batch_size, input=input, output=output_tokens, seed=seed))


@startup_app.command()
def startup(
    context: typer.Context,
    model: Model = "smollm2-135m",
    input: Input = 32,
    rounds: Rounds = 3,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxSeqs = None,
    max_num_batched_tokens: MaxTokens = None,
    batch_invariant: flags.BatchInvariant = None,
    prices: output.PriceFile = None,
    label: output.Label = "",
    out: output.Out = None,
    json: Json = False,
) -> None:
    """From a fresh process to its first token, phase by phase: process, import, load, first token.

    Example: nori bench startup smollm2-135m --rounds 5
    """
    check_prices(prices)
    if not model_name(model):
        raise ConfigError("name a model")
    host = machine(busy_share())
    started = datetime.now(UTC).isoformat(timespec="seconds")
    job = inprocess.StartJob(model=model, settings=settings_of(context.params), input=input)
    times, last = inprocess.startup(job, rounds, bar)
    found = inprocess.conditions(last.spec, last.config, host, WARM_FILES)
    batch = Batch(size=1, input=input, output=1, warmup=0)
    report = build_in_process(
        kind="startup", batch=batch, rounds=times, conditions=found, started=started, host=host, label=label
    )
    output.finish(report, out, json)
