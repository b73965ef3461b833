"""A fresh process: import, load, one token; its phases as one JSON line. Started by inprocess.startup only.

The engine is imported late, through a registry, so that its import is a phase of its own.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from nori_cluster.registry import Registry

ENGINES = Registry("engine", {"llm": "nori_cluster.llm:LLM"})
PARAMETERS = Registry("parameters", {"sampling": "nori_cluster.types:SamplingParams"})
FIRST_PROMPT_ID = 100


class Stopwatch:
    """A checkpoint Progress that keeps the seconds of each task."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def task(self, label: str, total: int | None) -> Iterator[Any]:
        start = time.monotonic()
        yield lambda count: None
        self.seconds[label] = self.seconds.get(label, 0.0) + time.monotonic() - start


def main() -> int:
    began = time.monotonic()
    job = msgspec.json.decode(sys.stdin.buffer.read())
    moments = {}
    engine, sampling = ENGINES["llm"], PARAMETERS["sampling"]
    moments["import"] = time.monotonic()
    watch = Stopwatch()
    llm = engine(job["model"], progress=watch, **job["settings"])
    moments["load"] = time.monotonic()
    ids = [min(FIRST_PROMPT_ID, llm.spec.vocab_size - 1)] * job["input"]
    llm.generate([ids], sampling(temperature=0.0, max_tokens=1))
    moments["first_token"] = time.monotonic()
    told = {"began": began, "moments": moments, "tasks": watch.seconds, "spec": llm.spec, "config": llm.config}
    sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
