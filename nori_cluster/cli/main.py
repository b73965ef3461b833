"""The `nori` command. Each verb is a file of its own, imported when it is called: `nori version` loads no model code.

Errors are one line on stderr: exit code 1 for what the world did, 2 for wrong usage; --debug shows tracebacks.
"""

import sys
import traceback
from typing import Annotated

import typer

from nori_cluster import env
from nori_cluster.cli.lazy import lazy_group
from nori_cluster.errors import ConfigError, NoriError
from nori_cluster.registry import Registry

VERBS = Registry(
    "command",
    {
        "serve": "nori_cluster.cli.serve:app",
        "chat": "nori_cluster.cli.chat:app",
        "status": "nori_cluster.cli.status:app",
        "drain": "nori_cluster.cli.drain:app",
        "resume": "nori_cluster.cli.resume:app",
        "scale": "nori_cluster.cli.scale:app",
        "rollout": "nori_cluster.cli.rollout:app",
        "reload-weights": "nori_cluster.cli.reload_weights:app",
        "events": "nori_cluster.cli.events:app",
        "models": "nori_cluster.cli.models:app",
        "demo": "nori_cluster.cli.demo:app",
        "bench": "nori_cluster.cli.bench:app",
        "version": "nori_cluster.cli.version:app",
    },
)
SUMMARIES = {
    "serve": "Serve a model on this machine: gateway, router, controller and worker groups.",
    "chat": "Talk to a served model; shows the first token's delay and tokens/s.",
    "status": "Groups, processes, load, KV use and tokens/s of a running cluster.",
    "drain": "Let a worker group finish its work and take no more.",
    "resume": "Let a drained worker group take work again.",
    "scale": "Set how many worker groups serve a model.",
    "rollout": "Restart every worker group of a model, one after another.",
    "reload-weights": "Replace the weights of every group of a model in place, one after another.",
    "events": "What happened to the worker groups: starts, losses and their cause, drains.",
    "models": "Pull, list, convert and verify checkpoints.",
    "demo": "Serve the demo model and ask it one question (what `make run` does).",
    "bench": "Measure latency, throughput and goodput.",
    "version": "Print the version.",
}


app = typer.Typer(cls=lazy_group(VERBS, SUMMARIES), no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)


@app.callback(help="Nori Cluster: serve large language models on one machine or many.")
def options(debug: Annotated[bool, typer.Option("--debug", help="Print tracebacks ($NORI_DEBUG).")] = False) -> None:
    """For the help text; main() takes --debug out of the arguments wherever it stands."""


def fail(message: str, code: int) -> int:
    if message:
        sys.stderr.write("nori: " + " ".join(message.split()) + "\n")
    return code


def usage_hint(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    return f" (see `{context.command_path} --help`)" if context is not None else ""


def main(arguments: list[str] | None = None) -> int:
    """Run a command line. Returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = env.debug() or "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        result = typer.main.get_command(app).main(arguments, prog_name="nori", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except (typer.TyperException, typer.Abort) as error:
        message = getattr(error, "format_message", lambda: "aborted")()
        return fail(message and message + usage_hint(error), getattr(error, "exit_code", 1))
    except NoriError as error:
        if debug:
            traceback.print_exc()
        return fail(error.message, 2 if isinstance(error, ConfigError) else 1)
    except BrokenPipeError:
        return 1
    except Exception as error:  # noqa: BLE001 - the last line of defence: one line for people, --debug for us
        if debug:
            traceback.print_exc()
        return fail(f"unexpected {type(error).__name__}: {error} (`nori --debug …` shows where)", 1)


if __name__ == "__main__":
    sys.exit(main())
