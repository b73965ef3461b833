"""`nori chat`: a conversation with a served model over the gateway's HTTP API."""

import contextlib
import sys
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from nori_cluster import env
from nori_cluster.cli.answer import Answer, GatewayError, ask, client, first_model
from nori_cluster.errors import ConfigError

with contextlib.suppress(ImportError):  # line editing and history for input(), where Python has it
    import readline  # noqa: F401

app = typer.Typer(add_completion=False)
HELP = "/reset forgets the conversation, /system TEXT sets the system message, /quit (or Ctrl-D) ends."


class Conversation:
    """The messages so far; the one owner of the history. A failed turn leaves no trace in it."""

    def __init__(self, http: httpx.Client, model: str, system: str | None, sampling: dict[str, Any]) -> None:
        self.http = http
        self.model = model
        self.sampling = sampling
        self.messages: list[dict[str, str]] = []
        self.reset(system)

    def reset(self, system: str | None = None) -> None:
        kept = [m for m in self.messages[:1] if m["role"] == "system"]
        self.messages = [{"role": "system", "content": system}] if system else kept

    def say(self, text: str) -> Answer:
        messages = [*self.messages, {"role": "user", "content": text}]
        answer = ask(self.http, {"model": self.model, "messages": messages, **self.sampling}, write)
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        return answer


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def valid(text: str) -> str:
    """The text with U+FFFD for bytes that were not UTF-8 (Python hands them over as lone surrogates)."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def turn(conversation: Conversation, text: str, notes: Console) -> None:
    """One question and its answer; Ctrl-C ends the answer, not the conversation."""
    try:
        answer = conversation.say(text)
        write("\n")
        notes.print(f"[dim]{answer.figures()}[/dim]")
    except GatewayError as error:
        notes.print(f"nori: {error}", markup=False, style="red")
    except KeyboardInterrupt:
        notes.print("\n[dim](stopped)[/dim]")


def talk(conversation: Conversation, notes: Console) -> None:
    notes.print(f"[bold]{conversation.model}[/bold] at {conversation.http.base_url}  [dim]{HELP}[/dim]")
    while True:
        try:
            text = valid(input("> ").strip())
        except (EOFError, KeyboardInterrupt):
            notes.print()
            return
        command, _, rest = text.partition(" ")
        if command in {"/quit", "/exit"}:
            return
        if command == "/reset":
            conversation.reset()
        elif command == "/system":
            conversation.reset(rest or None)
        elif command == "/help":
            notes.print(HELP)
        elif text:
            turn(conversation, text, notes)


@app.command()
def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="Ask this and exit; without it (and with a terminal) talk.")
    ] = None,
    url: Annotated[str, typer.Option("--url", help="Address of the gateway.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option("--model", help="Model id; default: the first one served.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="Most tokens per answer.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="0 = always the likeliest token.")] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="Bearer token; default $NORI_API_KEY.")] = None,
) -> None:
    """Talk to a served model; after each answer its TTFT, TPOT and tokens/s.

    With PROMPT, or with text on standard input, asks once: the answer goes to stdout, the figures to stderr.
    """
    notes = Console(stderr=True, highlight=False)
    talking = prompt is None and sys.stdin.isatty()
    question = "" if talking else valid(sys.stdin.read() if prompt is None else prompt).strip()
    if not (talking or question):
        raise ConfigError("nothing to ask: the prompt is empty")
    sampling = {k: v for k, v in {"max_tokens": max_tokens, "temperature": temperature}.items() if v is not None}
    with client(url, api_key or env.api_key()) as http:
        conversation = Conversation(http, model or first_model(http), system and valid(system), sampling)
        if talking:
            return talk(conversation, notes)
        answer = conversation.say(question)
        write("\n")
        notes.print(f"[dim]{answer.figures()}[/dim]")
