"""`nori reload-weights MODEL FOLDER`: other weights for every group of a model, while the others serve."""

from pathlib import Path
from typing import Annotated

import typer

from nori_cluster.cli.admin import connect
from nori_cluster.cli.flags import Admin, Json
from nori_cluster.cli.operations import finish, to_json
from nori_cluster.config import InFlightPolicy, existing_folder

app = typer.Typer(add_completion=False)


@app.command()
def reload_weights(
    model: Annotated[str, typer.Argument(help="Name of the model.")],
    folder: Annotated[Path, typer.Argument(help="Checkpoint folder that differs from the served one in its weights.")],
    policy: Annotated[
        InFlightPolicy,
        typer.Option(
            "--in-flight-policy",
            help="Running requests: wait for them, let them continue in a group that still holds their weights, or "
            "abort them.",
        ),
    ] = "wait",
    version: Annotated[
        str, typer.Option("--weight-version", help="Label of the new weights.", show_default="the next number")
    ] = "",
    max_unavailable: Annotated[
        int, typer.Option("--max-unavailable", min=1, help="Groups out of service at a time.")
    ] = 1,
    grace: Annotated[
        float | None,
        typer.Option(
            "--grace", min=0, help="Seconds for running requests to end.", show_default="the cluster's drain timeout"
        ),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Return when all hold them, or at once.")] = True,
    timeout: Annotated[float, typer.Option("--timeout", min=0, help="Seconds to wait at most.")] = 1800.0,
    as_json: Json = False,
    admin: Admin = "127.0.0.1:8001",
) -> None:
    """Replace the weights of every group in place, one after another, without a restart.

    No request ever mixes two versions. The first group that fails ends it; the error says which group has which
    version, and the same command goes on from there.

    Example: nori reload-weights smollm2-135m /models/step-200 --in-flight-policy continue
    """
    path = str(existing_folder(str(folder)).resolve())
    with connect(admin) as client:
        operation = client.reload(
            model, path, version=version, policy=policy, max_unavailable=max_unavailable, grace=grace
        )
        if wait:
            operation = finish(client, operation, timeout, f"the reload of {model}")
    if as_json:
        typer.echo(to_json(operation))
    else:
        done = "holds the weights" if operation.done else "is loading the weights"
        typer.echo(f"every group of {model} {done} of {path}")
