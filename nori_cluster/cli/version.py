"""`nori version`."""

import json

import typer

from nori_cluster.cli.flags import Json
from nori_cluster.version import __version__

app = typer.Typer(add_completion=False)


@app.command()
def version(as_json: Json = False) -> None:
    """Print the version."""
    typer.echo(json.dumps({"version": __version__}) if as_json else __version__)
