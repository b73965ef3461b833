"""Tiny programs that look like other people's servers (fake_peer.py), and files that name them."""

import socket
from pathlib import Path
from typing import Any

import yaml

FAKE = str(Path(__file__).with_name("fake_peer.py"))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def server(name: str, rate: float, *words: str, **changes: Any) -> dict[str, Any]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = ["${python}", FAKE, str(port), str(rate), *words]
    return {"name": name, "command": command, "ready": f"{url}/health", "url": url, "start_timeout": 20.0, **changes}


def plan_file(folder: Path, ours: dict[str, Any], others: list[dict[str, Any]], **changes: Any) -> Path:
    load = {"concurrency": [1, 2], "input": 8, "output": 4, "requests_per_client": 1, "min_requests": 2, "warmup": 1}
    path = folder / "peers.yaml"
    path.write_text(yaml.safe_dump({"ours": ours, "peers": others, "load": load, "rounds": 2, **changes}))
    return path
