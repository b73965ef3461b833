"""A program that looks like somebody's server: python fake_peer.py PORT TOKENS_PER_SECOND [die | child].

Answers /health and streams completions of the length that was asked. die: ends before it is ready. child: starts a
process that ignores polite signals, as some servers' workers do; its id is told at /child.
"""

import json
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT, RATE = int(sys.argv[1]), float(sys.argv[2])
WORD = sys.argv[3] if len(sys.argv) > 3 else ""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
CHILD = subprocess.Popen([sys.executable, "-c", STUBBORN], start_new_session=True).pid if WORD == "child" else 0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None: ...

    def answer(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.answer({"data": [{"id": "fake", "owned_by": "someone"}], "child": CHILD})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for index in range(asked["max_tokens"]):
            time.sleep(1 / RATE)
            last = index + 1 == asked["max_tokens"]
            self.event({"choices": [{"index": 0, "text": "a", "finish_reason": "length" if last else None}]})
        usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": asked["max_tokens"], "total_tokens": 0}
        self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def event(self, value: object) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()


if WORD == "die":
    sys.stderr.write("no such model\n")
    sys.exit(3)
ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
