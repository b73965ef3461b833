"""An OpenAI chat server in 70 lines: answers from a script, remembers what it was sent."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class FakeOpenAIServer(ThreadingHTTPServer):
    """`pieces` are streamed one event each. refuse: (status, body) instead. cut: end the stream before [DONE]."""

    daemon_threads = True

    def __init__(self, pieces: tuple[str, ...] = ("Hel", "lo"), model: str = "fake") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.pieces = pieces
        self.model = model
        self.refuse: tuple[int, bytes] | None = None
        self.error: str | None = None
        self.cut = False
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()

    def events(self) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}, *({"content": p} for p in self.pieces)]
        chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
        if self.error:
            return [*chunks, {"error": {"message": self.error}}]
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        usage = {"prompt_tokens": 5, "completion_tokens": 2 * len(self.pieces), "total_tokens": 0}
        return [*chunks, {"choices": [], "usage": usage}]


class Handler(BaseHTTPRequestHandler):
    server: FakeOpenAIServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.answer(200, json.dumps({"object": "list", "data": [{"id": self.server.model}]}).encode())

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        if self.server.refuse:
            return self.answer(*self.server.refuse)
        done = "" if self.server.cut else "data: [DONE]\n\n"
        stream = "".join(f"data: {json.dumps(event)}\n\n" for event in self.server.events()) + done
        return self.answer(200, stream.encode(), "text/event-stream")
