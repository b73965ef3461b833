"""Flags that several verbs take, as typer annotations. None = not given; defaults are in options.ServeOptions."""

from typing import Annotated

import typer

PORTS = "Listening"

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
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
