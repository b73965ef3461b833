"""`nori chat` against a small fake gateway: history, figures, refusals, broken streams."""

import io
import json
from collections.abc import Iterator

import pytest
from fakes.openai_server import FakeOpenAIServer

from nori_cluster.cli import chat
from nori_cluster.cli.answer import Answer, GatewayError, ask, client
from nori_cluster.cli.main import main

pytestmark = pytest.mark.unit


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def gateway() -> Iterator[FakeOpenAIServer]:
    with FakeOpenAIServer() as server:
        yield server


def test_one_shot_prints_the_answer_to_stdout_and_figures_to_stderr(
    gateway: FakeOpenAIServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "Hi", "--url", gateway.url, "--system", "Be brief", "--max-tokens", "7"]) == 0
    out, err = capsys.readouterr()
    assert out == "Hello\n"
    assert "TTFT" in err
    assert "tokens/s" in err
    assert "4 tokens" in err
    body = gateway.bodies[0]
    assert body["messages"] == [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]
    assert body["model"] == "fake"
    assert body["max_tokens"] == 7
    assert "temperature" not in body


def test_text_on_standard_input_is_one_question(gateway: FakeOpenAIServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("From a pipe"))
    assert main(["chat", "--url", gateway.url, "--temperature", "0", "--api-key", "secret"]) == 0
    assert gateway.bodies[0]["messages"] == [{"role": "user", "content": "From a pipe"}]
    assert gateway.bodies[0]["temperature"] == 0
    assert gateway.headers[0]["authorization"] == "Bearer secret"


def test_bytes_that_are_not_text_are_replaced(gateway: FakeOpenAIServer) -> None:
    assert main(["chat", "caf\udce9 \U0001f600", "--url", gateway.url]) == 0
    assert gateway.bodies[0]["messages"][0]["content"] == "caf\ufffd \U0001f600"


@pytest.mark.parametrize(("arguments", "text"), [([""], ""), (["  "], ""), ([], " \n")])
def test_an_empty_question_is_not_asked(
    gateway: FakeOpenAIServer, monkeypatch: pytest.MonkeyPatch, arguments: list[str], text: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main(["chat", *arguments, "--url", gateway.url]) == 2
    assert not gateway.bodies


def test_a_conversation_keeps_its_history(gateway: FakeOpenAIServer, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["one", "", "two", "/reset", "three", "/system Be kind", "four", "/quit"])
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert main(["chat", "--url", gateway.url, "--system", "S"]) == 0
    system, said = {"role": "system", "content": "S"}, {"role": "assistant", "content": "Hello"}
    sent = [body["messages"] for body in gateway.bodies]
    assert sent[0] == [system, {"role": "user", "content": "one"}]
    assert sent[1] == [system, {"role": "user", "content": "one"}, said, {"role": "user", "content": "two"}]
    assert sent[2] == [system, {"role": "user", "content": "three"}]
    assert sent[3] == [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "four"}]


def test_a_failed_turn_leaves_the_conversation_usable(
    gateway: FakeOpenAIServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lines(prompt: str) -> str:
        gateway.refuse = (503, b'{"error": {"message": "queue full"}}') if not gateway.bodies else None
        if len(gateway.bodies) == 2:
            raise EOFError
        return "again"

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", lines)
    assert main(["chat", "--url", gateway.url]) == 0
    assert "queue full" in capsys.readouterr().err
    assert gateway.bodies[1]["messages"] == [{"role": "user", "content": "again"}]


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (400, json.dumps({"error": {"message": "maximum context length is 9"}}).encode(), "context length"),
        (502, b"<html>bad\ngateway", "502"),
        (401, b'{"error": "Unauthorized"}', "401"),
    ],
)
def test_a_refusal_is_one_line(
    gateway: FakeOpenAIServer, capsys: pytest.CaptureFixture[str], status: int, body: bytes, words: str
) -> None:
    gateway.refuse = (status, body)
    assert main(["chat", "Hi", "--url", gateway.url]) == 1
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_an_error_event_and_a_cut_stream_are_errors(gateway: FakeOpenAIServer) -> None:
    with client(gateway.url, None) as http:
        gateway.error = "worker group lost"
        with pytest.raises(GatewayError, match="worker group lost"):
            ask(http, {"messages": []}, lambda text: None)
        gateway.error, gateway.cut = None, True
        with pytest.raises(GatewayError, match="before"):
            ask(http, {"messages": []}, lambda text: None)


def test_nothing_listens(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeOpenAIServer() as gone:
        url = gone.url
    assert main(["chat", "Hi", "--url", url]) == 1
    err = capsys.readouterr().err
    assert "nori serve" in err
    assert err.count("\n") == 1


def test_figures_of_a_single_token_have_no_tpot() -> None:
    answer = Answer(text="x", tokens=1, ttft=0.5, tpot=None, total=0.5, finish_reason="length")
    assert answer.figures() == "TTFT 500 ms · 2.0 tokens/s · 1 tokens"


def test_reset_without_a_system_message() -> None:
    with client("http://127.0.0.1:9", None) as http:
        conversation = chat.Conversation(http, "m", None, {})
        conversation.messages.append({"role": "user", "content": "x"})
        conversation.reset()
        assert conversation.messages == []
