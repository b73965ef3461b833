"""Flags that several verbs take, as typer annotations. None = not given; defaults are in options.ServeOptions."""

from typing import Annotated, Any

import typer

from nori_cluster.cli.options import human_int, json_object

PORTS = "Listening"
SCHEDULING = "Scheduling"
SAMPLING = "Sampling"

Host = Annotated[
    str | None, typer.Option("--host", help="Address to listen on.", show_default="127.0.0.1", rich_help_panel=PORTS)
]
Port = Annotated[
    int | None, typer.Option("--port", help="HTTP (OpenAI API).", show_default="8000", rich_help_panel=PORTS)
]
GrpcPort = Annotated[
    int | None, typer.Option("--grpc-port", help="Public gRPC.", show_default="50051", rich_help_panel=PORTS)
]
RouterPort = Annotated[
    int | None,
    typer.Option("--router-port", help="Gateways and groups → router.", show_default="50052", rich_help_panel=PORTS),
]
DataPlanePort = Annotated[
    int | None,
    typer.Option(
        "--data-plane-port",
        help="Of the first group; the next ones follow.",
        show_default="50100",
        rich_help_panel=PORTS,
    ),
]
AdminPort = Annotated[
    int | None, typer.Option("--admin-port", help="`nori status`.", show_default="8001", rich_help_panel=PORTS)
]
MetricsPort = Annotated[
    int | None,
    typer.Option("--metrics-port", help="Prometheus metrics.", show_default="9090", rich_help_panel=PORTS),
]
Admin = Annotated[str, typer.Option("--admin", help="Address of the cluster's admin service.")]
ChatTemplate = Annotated[
    str | None,
    typer.Option(
        "--chat-template", help="File or text that replaces the model's template.", show_default="the model's"
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", help="Bearer token that clients must send.", show_default="$NORI_API_KEY or none"),
]
HeartbeatTimeout = Annotated[
    float | None,
    typer.Option(
        "--heartbeat-timeout",
        help="Seconds without a sign of life after which a process ends its group.",
        show_default="5",
    ),
]
CollectiveTimeout = Annotated[
    float | None,
    typer.Option("--collective-timeout", help="Seconds that one step or collective may take.", show_default="30"),
]
DrainTimeout = Annotated[
    float | None,
    typer.Option("--drain-timeout", help="Seconds running requests get at the end.", show_default="30"),
]
PrefixCaching = Annotated[
    bool | None,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Reuse the KV blocks of equal prompt beginnings.",
        show_default="on",
        rich_help_panel=SCHEDULING,
    ),
]
AsyncScheduling = Annotated[
    bool | None,
    typer.Option(
        "--async-scheduling/--no-async-scheduling",
        help="Plan a step while the one before runs.",
        show_default="on with CUDA",
        rich_help_panel=SCHEDULING,
    ),
]
QueuedRequests = Annotated[
    int | None,
    typer.Option(
        "--max-num-queued-reqs",
        help="Requests that may wait for a group; more are refused with 503.",
        show_default="4096",
        rich_help_panel=SCHEDULING,
    ),
]
QueuedTokens = Annotated[
    int | None,
    typer.Option(
        "--max-num-queued-tokens",
        help="Prompt tokens that may wait for a group.",
        show_default="any",
        parser=human_int,
        metavar="<size>",
        rich_help_panel=SCHEDULING,
    ),
]
PriorityAging = Annotated[
    float | None,
    typer.Option(
        "--priority-aging",
        help="Seconds of waiting that outweigh one level of a request's priority.",
        show_default="10",
        rich_help_panel=SCHEDULING,
    ),
]
MaxLogprobs = Annotated[
    int | None,
    typer.Option(
        "--max-logprobs",
        help="Most likeliest tokens a request may ask for beside each token.",
        show_default="20",
        rich_help_panel=SAMPLING,
    ),
]
LogprobsMode = Annotated[
    str | None,
    typer.Option(
        "--logprobs-mode",
        help="raw: of the model's logits; processed: of what penalties, temperature and filters left.",
        show_default="raw",
        rich_help_panel=SAMPLING,
    ),
]
BatchInvariant = Annotated[
    bool | None,
    typer.Option(
        "--batch-invariant/--no-batch-invariant",
        help="The same bits for a request whatever runs beside it; slower.",
        show_default="off",
        rich_help_panel=SAMPLING,
    ),
]
AttentionBackend = Annotated[
    str | None,
    typer.Option(
        "--attention-backend",
        help="auto (by device), cpu_paged, cpu_invariant, reference or triton_paged.",
        show_default="auto",
        rich_help_panel=SAMPLING,
    ),
]
Speculative = Annotated[
    Any,
    typer.Option(
        "--speculative-config",
        help='Speculation, JSON: {"method": "ngram", "num_speculative_tokens": 4}.',
        show_default="none",
        parser=json_object,
        metavar="<json>",
        rich_help_panel=SAMPLING,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
