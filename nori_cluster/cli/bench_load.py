"""The flags of a load, shared by the bench verbs, and what their texts mean: LoadSpec and Slo from the command line."""

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from nori_cluster.bench.records import Lengths, LoadSpec, Slo
from nori_cluster.bench.workload import check_slo, check_spec
from nori_cluster.cli.options import json_object
from nori_cluster.errors import ConfigError

ARRIVAL, REQUESTS, BOUNDS, SERVER = "When requests arrive", "What they ask for", "Service level", "Server"
TOKENS = "Tokens"
NAMED = {  # medians and means of the Azure LLM inference trace of 2023, input and output
    "azure-conversation": ((1020, 1155.0), (129, 211.0)),
    "azure-code": ((1469, 2048.0), (13, 28.0)),
}
FACTORS = {"": 1.0, "ms": 1.0, "s": 1000.0, "us": 0.001}
DEFAULT_REQUESTS = 8  # per client of a closed loop, when nothing else ends the run
DEFAULT_LENGTH = "128"
DEFAULT_SECONDS = 60.0  # of an open loop


def lengths(text: str, side: str, minimum: int = 1, maximum: int | None = None) -> Lengths:
    """128 (fixed), 1020:1155 (lognormal of this median and mean), or a name. Raises ConfigError naming --side."""
    if text in NAMED:
        median, mean = NAMED[text][side == "output"]
        return Lengths(kind="lognormal", median=median, mean=mean, minimum=minimum, maximum=maximum)
    match = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}(?:\.\d+)?))?", text.strip())
    if match is None:
        names = ", ".join(NAMED)
        raise ConfigError(
            f"--{side} {text!r} is no length: write 128 (fixed), 1020:1155 (median:mean), or one of {names}"
        )
    if match[2] is None:
        return Lengths(median=int(match[1]), minimum=minimum, maximum=maximum)
    return Lengths(kind="lognormal", median=int(match[1]), mean=float(match[2]), minimum=minimum, maximum=maximum)


def milliseconds(text: str, flag: str) -> float | None:
    """500ms, 0.5s, 500; none = no bound. Raises ConfigError naming the flag."""
    if text.strip().lower() in {"none", "off"}:
        return None
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)\s*(ms|s|us|)", text.strip())
    if match is None or not math.isfinite(value := float(match[1]) * FACTORS[match[2]]):
        raise ConfigError(f"{flag} {text!r} is no duration: write 500ms, 0.5s, or none for no bound")
    return value


def slo_of(ttft: str, tpot: str, e2e: str) -> Slo:
    """Raises ConfigError."""
    slo = Slo(
        ttft=milliseconds(ttft, "--slo-ttft"), tpot=milliseconds(tpot, "--slo-tpot"), e2e=milliseconds(e2e, "--slo-e2e")
    )
    check_slo(slo)
    return slo


def spec_of(given: dict[str, Any]) -> LoadSpec:
    """The load that flags describe (by the names below; None = not given), checked. Raises ConfigError.

    The arrival follows from what is given: --trace → trace, --rate → poisson (gamma with --burstiness), else closed.
    """
    values = {name: value for name, value in given.items() if name in LoadSpec.__struct_fields__ and value is not None}
    values["input"] = lengths(
        given["input"] or DEFAULT_LENGTH, "input", given.get("min_input") or 1, given.get("max_input")
    )
    values["output"] = lengths(
        given["output"] or DEFAULT_LENGTH, "output", given.get("min_output") or 1, given.get("max_output")
    )
    values["sampling"] = {"temperature": given.get("temperature") or 0.0, **(given.get("sampling") or {})}
    values.setdefault("arrival", _arrival(values))
    _refuse_unused(values["arrival"], given)
    if values.get("requests") is None and values.get("duration") is None:
        if values["arrival"] == "closed":
            values["requests"] = DEFAULT_REQUESTS * max(1, values.get("concurrency", LoadSpec().concurrency))
        elif values["arrival"] != "trace":
            values["duration"] = DEFAULT_SECONDS
    try:
        spec = msgspec.convert(values, LoadSpec)
    except msgspec.ValidationError as error:
        raise ConfigError(_flag_error(str(error))) from error
    check_spec(spec)
    return spec


def _arrival(values: dict[str, Any]) -> str:
    if "trace" in values:
        return "trace"
    if "rate" not in values:
        return "closed"
    return "gamma" if values.get("burstiness", 1.0) != 1.0 else "poisson"


def _refuse_unused(arrival: str, given: dict[str, Any]) -> None:
    """Raises ConfigError for a flag that this kind of load would ignore."""
    unused = {"concurrency": arrival != "closed", "trace_speed": arrival != "trace", "trace_format": arrival != "trace"}
    unused |= dict.fromkeys(("input", "output"), arrival == "trace")
    for name, useless in unused.items():
        if useless and given.get(name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} does not go with {arrival} arrivals")


def _flag_error(text: str) -> str:
    reason, _, field = text.partition(" - at `$.")
    return f"--{field.rstrip('`').replace('_', '-')}: {reason}" if field else reason


Url = Annotated[
    str,
    typer.Option("--url", help="http://host:port, or host:port with --endpoint grpc.", rich_help_panel=SERVER),
]
Model = Annotated[
    str | None,
    typer.Option("--model", help="Model id.", show_default="the first one served", rich_help_panel=SERVER),
]
Endpoint = Annotated[
    Literal["completions", "chat", "grpc"],
    typer.Option(
        "--endpoint",
        help="completions (token ids), chat (text), or grpc (Nori's own API).",
        rich_help_panel=SERVER,
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", help="Bearer token.", show_default="$NORI_API_KEY", rich_help_panel=SERVER),
]
Timeout = Annotated[
    float, typer.Option("--timeout", help="Seconds after which a request has failed.", rich_help_panel=SERVER)
]
Arrival = Annotated[
    Literal["closed", "poisson", "gamma", "constant", "trace"] | None,
    typer.Option(
        "--arrival",
        help="Closed loop, open loop, or as recorded.",
        show_default="by the other flags",
        rich_help_panel=ARRIVAL,
    ),
]
Concurrency = Annotated[
    int | None,
    typer.Option("--concurrency", "-c", help="Clients of a closed loop.", show_default="8", rich_help_panel=ARRIVAL),
]
Rate = Annotated[
    float | None,
    typer.Option("--rate", help="Requests/s of an open loop.", show_default=False, rich_help_panel=ARRIVAL),
]
Burstiness = Annotated[
    float | None,
    typer.Option(
        "--burstiness", help="Shape of gamma gaps; below 1 burstier.", show_default="1", rich_help_panel=ARRIVAL
    ),
]
Trace = Annotated[
    str | None,
    typer.Option("--trace", help="Recorded arrivals and lengths.", show_default=False, rich_help_panel=ARRIVAL),
]
TraceFormat = Annotated[
    Literal["azure", "mooncake", "burstgpt"] | None,
    typer.Option(
        "--trace-format", help="How it is written.", show_default="by its first line", rich_help_panel=ARRIVAL
    ),
]
TraceSpeed = Annotated[
    float | None,
    typer.Option("--trace-speed", help="Plays it so many times faster.", show_default="1", rich_help_panel=ARRIVAL),
]
Requests = Annotated[
    int | None,
    typer.Option("--requests", "-n", help="Ends the run.", show_default="8 per client", rich_help_panel=ARRIVAL),
]
Duration = Annotated[
    float | None,
    typer.Option(
        "--duration", help="Seconds in which requests start.", show_default="60, open loop", rich_help_panel=ARRIVAL
    ),
]
Warmup = Annotated[int, typer.Option("--warmup", help="Requests sent before, not counted.", rich_help_panel=ARRIVAL)]
WindowChoice = Annotated[
    Literal["auto", "steady", "run"],
    typer.Option(
        "--window",
        help="What figures are of; auto: the whole run of a closed loop, the steady part of others.",
        rich_help_panel=ARRIVAL,
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Same seed, same requests.", rich_help_panel=ARRIVAL)]
Input = Annotated[
    str | None,
    typer.Option(
        "--input",
        help="Prompt tokens: 128, median:mean (lognormal), azure-conversation.",
        show_default=DEFAULT_LENGTH,
        rich_help_panel=REQUESTS,
    ),
]
Output = Annotated[
    str | None,
    typer.Option(
        "--output", help="Output tokens, the same way.", show_default=DEFAULT_LENGTH, rich_help_panel=REQUESTS
    ),
]
MaxInput = Annotated[
    int | None,
    typer.Option(
        "--max-input", help="Longer prompts are cut (traces too).", show_default=False, rich_help_panel=REQUESTS
    ),
]
MaxOutput = Annotated[
    int | None,
    typer.Option("--max-output", help="Longer outputs are cut.", show_default=False, rich_help_panel=REQUESTS),
]
SharedPrefix = Annotated[
    int, typer.Option("--shared-prefix", help="Leading tokens that all prompts share.", rich_help_panel=REQUESTS)
]
VocabSize = Annotated[
    int, typer.Option("--vocab-size", help="Prompts are of ids from 100 to below this.", rich_help_panel=REQUESTS)
]
Temperature = Annotated[float, typer.Option("--temperature", help="Of every request.", rich_help_panel=REQUESTS)]
Sampling = Annotated[
    Any,
    typer.Option(
        "--sampling",
        help='More request fields, JSON: {"top_p": 0.9}.',
        show_default="none",
        parser=json_object,
        metavar="<json>",
        rich_help_panel=REQUESTS,
    ),
]
IgnoreEos = Annotated[
    bool,
    typer.Option("--ignore-eos/--no-ignore-eos", help="Every output has its full length.", rich_help_panel=REQUESTS),
]
Reference = Annotated[
    Path | None,
    typer.Option("--reference", help="Compare tokens with this file.", show_default=False, rich_help_panel=TOKENS),
]
SaveTokens = Annotated[
    Path | None,
    typer.Option("--save-tokens", help="Write them to this file.", show_default=False, rich_help_panel=TOKENS),
]
Processes = Annotated[
    int, typer.Option("--processes", help="Client processes that share the load.", rich_help_panel=SERVER)
]
SloTtft = Annotated[str, typer.Option("--slo-ttft", help="Bound on TTFT; none = no bound.", rich_help_panel=BOUNDS)]
SloTpot = Annotated[str, typer.Option("--slo-tpot", help="Bound on TPOT.", rich_help_panel=BOUNDS)]
SloE2e = Annotated[str, typer.Option("--slo-e2e", help="Bound on the whole request.", rich_help_panel=BOUNDS)]
