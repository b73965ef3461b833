"""`nori models pull | list | convert | verify`: checkpoints on this machine."""

import json
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from nori_cluster.checkpoint.gguf import convert as convert_gguf
from nori_cluster.checkpoint.source import converted_models
from nori_cluster.checkpoint.store import models_folder
from nori_cluster.checkpoint.verify import CheckpointReport, list_models, to_json
from nori_cluster.checkpoint.verify import verify as verify_folder
from nori_cluster.cli.flags import Json
from nori_cluster.cli.pulling import Bars, pull
from nori_cluster.cli.served import require_architecture, require_served
from nori_cluster.errors import CheckpointError

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Pull, list, convert and verify checkpoints.")
NOTES = Console(stderr=True, highlight=False)
Source = Annotated[str, typer.Argument(help="smollm2-135m, a folder, a .gguf file or a Hugging Face repo id.")]


def size(count: int) -> str:
    """1.2 GB; decimal, as disks are sold."""
    power = min((len(str(count)) - 1) // 3, 4)
    return f"{count / 1000**power:.{min(power, 1)}f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


@app.command("pull")
def pull_model(source: Source, as_json: Json = False) -> None:
    """Make a model local: download and convert what is not there yet; prints its folder."""
    folder = pull(source, NOTES)
    typer.echo(json.dumps({"source": source, "folder": str(folder)}) if as_json else str(folder))


@app.command("list")
def list_stored(as_json: Json = False) -> None:
    """What has been pulled and converted so far."""
    models = list_models()
    if as_json:
        typer.echo(json.dumps([msgspec.to_builtins(model) for model in models], indent=2))
        return
    if not models:
        typer.echo(f"no model in {models_folder()} yet: `nori models pull smollm2-135m` fetches the demo model")
        return
    table = Table("name", "size", "dtype", "architecture", "problem", box=None, pad_edge=False)
    for model in models:
        table.add_row(model.name, size(model.bytes), model.dtype, model.architecture, model.problem or "-")
    console = Console(highlight=False, markup=False)
    console.print(table)
    console.print(f"in {models_folder()}", soft_wrap=True, style="dim")


@app.command("convert")
def convert(
    file: Annotated[Path, typer.Argument(help="A GGUF file of the Llama family.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist or be empty.")],
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32, bfloat16 or float16.", show_default="the file's own")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a GGUF file as an ordinary checkpoint: config.json, tokenizer.json, safetensors."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists and is not an empty folder")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
            made = Path(scratch) / "checkpoint"
            made.mkdir()
            convert_gguf(file, made, dtype=dtype, progress=Bars(NOTES))
            made.replace(out)  # whole or not at all
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error.strerror or error}") from error
    typer.echo(json.dumps({"file": str(file), "folder": str(out)}) if as_json else str(out))


@app.command("verify")
def verify(source: Source, as_json: Json = False) -> None:
    """Say whether a checkpoint can be served, from its headers; exit code 1 when it cannot, 2 when no such model is."""
    path = Path(source).expanduser()
    stored = source in converted_models()
    folder = path if path.is_dir() else models_folder() / source if stored else pull(source, NOTES)
    report = verify_folder(folder)
    try:
        (require_served if report.ok else require_architecture)(folder)
    except CheckpointError as error:
        problems = dict.fromkeys((*report.problems, error.message))
        report = msgspec.structs.replace(report, problems=tuple(problems))
    typer.echo(to_json(report) if as_json else describe(report))
    raise typer.Exit(0 if report.ok else 1)


def describe(report: CheckpointReport) -> str:
    lines = [report.folder]
    if report.config is not None:
        context = report.config.max_position_embeddings
        lines.append(f"  {report.config.architecture}, {report.config.num_hidden_layers} layers, context {context}")
    if report.tensors:
        dtypes = ", ".join(f"{name} × {count}" for name, count in sorted(report.dtypes.items()))
        data = f"{size(report.bytes)} in {report.files} file(s)"
        lines.append(f"  {report.parameters / 1e6:.1f} M parameters, {data}: {dtypes}")
    if report.tokenizer is not None:
        template = report.tokenizer.chat_template or "none"
        lines.append(f"  {report.tokenizer.vocab_size} token ids, chat template: {template}")
    lines += [f"  problem: {problem}" for problem in report.problems] or ["  ok"]
    return "\n".join(lines)
