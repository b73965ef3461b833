"""`nori version`."""

import typer

from nori_cluster.version import __version__

app = typer.Typer(add_completion=False)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)
