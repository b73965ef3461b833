"""`nori demo`, what `make run` calls: serve the demo model, ask it one question over HTTP, keep serving."""

import typer
from rich.console import Console

from nori_cluster.cli import flags
from nori_cluster.cli.answer import ask, client
from nori_cluster.cli.options import ServeOptions, resolve_options
from nori_cluster.cli.running import RunningCluster, launch
from nori_cluster.config import ClusterConfig

app = typer.Typer(add_completion=False)
MODEL = "smollm2-135m"
QUESTION = "What is the capital of France, and what is it known for?"


def ask_once(config: ClusterConfig, cluster: RunningCluster) -> None:
    typer.echo(f"\n> {QUESTION}")
    body = {
        "model": config.group.model.name,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 96,
        "temperature": 0,
    }
    with client(cluster.http_url, config.api_key) as http:
        answer = ask(http, body, lambda text: typer.echo(text, nl=False))
    typer.echo(f"\n{answer.figures()}\n")


@app.command()
def demo(
    context: typer.Context,
    host: flags.Host = None,
    port: flags.Port = None,
    grpc_port: flags.GrpcPort = None,
    router_port: flags.RouterPort = None,
    data_plane_port: flags.DataPlanePort = None,
    admin_port: flags.AdminPort = None,
    metrics_port: flags.MetricsPort = None,
) -> None:
    """Serve the demo model (SmolLM2-135M-Instruct), ask it one question, and keep serving until Ctrl-C."""
    given = {name: value for name, value in context.params.items() if name in ServeOptions.__struct_fields__}
    options = resolve_options({**given, "model": MODEL}, None)
    raise typer.Exit(launch(options, Console(stderr=True, highlight=False), ask_once))
