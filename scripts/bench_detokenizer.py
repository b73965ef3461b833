"""Cost of the way from token ids to text in the gateway, in microseconds per token: `make bench-detokenizer`.

1,024 streams of real text in several scripts get one token a step, as from a group; then each is read (decode, match
stop strings, take a Delta). A line per case; the last line is one JSON object.
"""

import argparse
import gc
import json
import platform
import statistics
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nori_cluster.checkpoint.progress import NoProgress
from nori_cluster.checkpoint.source import resolve
from nori_cluster.errors import NoriError
from nori_cluster.frontend.backend import Finish, Started
from nori_cluster.frontend.candidate import Candidate
from nori_cluster.frontend.detokenizer import Detokenizer
from nori_cluster.frontend.stop import StopMatcher
from nori_cluster.frontend.tokenizer import Tokenizer
from nori_cluster.telemetry import TOKEN_BUCKETS, Histogram
from nori_cluster.types import FinishReason

TEXTS = (
    "The quick brown fox jumps over the lazy dog; it had been raining since Tuesday, and nobody knew why.\n\n",
    "def area(radius: float) -> float:\n    return 3.14159 * radius ** 2  # of a circle\n",
    "Die Straße führte über die Brücke, während die Züge nach Süden fuhren.\n",
    "他们说今天的天气很好，我们去公园散步吧。",
    "Привет! Как дела? Всё хорошо, спасибо.\n",
    "🎉 emoji 👩‍👩‍👧 between words 🚀\n",
)
STOPS = {
    "no stop string": (),
    "1 stop string": ("\n\nUser:",),
    "4 stop strings": ("\n\nUser:", "###", "</answer>", "Observation:"),
    "4 that often begin": ("the end", "e!!", "\n\n\n", " a a"),
    "16 stop strings": tuple(f"{head} stop" for head in "ABCDEFGHIJKLMNOP"),
}


class Owner:
    """What a Generation does when a candidate has news."""

    def __init__(self) -> None:
        self.dirty: list[Candidate] = []

    def on_news(self, candidate: Candidate) -> None:
        if not candidate.dirty:
            candidate.dirty = True
            self.dirty.append(candidate)

    def on_accepted(self) -> None: ...
    def on_started(self, candidate: Candidate, start: Started) -> None: ...
    def on_first_token(self, now: float) -> None: ...
    def on_overrun(self, tokens: int) -> None: ...

    def on_stop_string(self, candidate: Candidate) -> None:
        raise AssertionError("a stop string matched: its stream would end")

    def on_failed(self, error: NoriError) -> None:
        raise error


class Bench:
    """streams candidates, each at its own place of the texts."""

    def __init__(
        self, tokenizer: Tokenizer, ids: list[int], streams: int, stops: tuple[str, ...], logprobs: bool
    ) -> None:
        self.owner = Owner()
        times = Histogram(TOKEN_BUCKETS)
        self.candidates = []
        for index in range(streams):
            matcher = StopMatcher(stops) if stops else None
            detokenizer = Detokenizer(tokenizer, skip_special=True)
            self.candidates.append(Candidate(self.owner, index, detokenizer, matcher, False, logprobs, times))
        self.ids = ids
        self.text = [""] * streams

    def step(self, number: int, tokens: int) -> float:
        """Microseconds per token of one step in which each stream gets `tokens` tokens and is read."""
        ids, length = self.ids, len(self.ids)
        places = [(index * 37 + number * tokens) % (length - tokens) for index in range(len(self.candidates))]
        news = [ids[place : place + tokens] for place in places]
        start = time.perf_counter()
        for candidate, new in zip(self.candidates, news, strict=True):
            candidate.tokens(new, None)
        dirty, self.owner.dirty = self.owner.dirty, []
        for candidate in dirty:
            candidate.dirty = False
            candidate.take(False)
        return (time.perf_counter() - start) * 1e6 / (tokens * len(self.candidates))

    def finish(self) -> None:
        for candidate in self.candidates:
            candidate.finished(Finish(FinishReason.LENGTH))
            assert candidate.take(False) is not None


def case(tokenizer: Tokenizer, ids: list[int], streams: int, steps: int, stops: tuple[str, ...], tokens: int) -> float:
    """Median over steps, of the best of three rounds: others use this machine too."""
    rounds = []
    for _ in range(3):
        bench = Bench(tokenizer, ids, streams, stops, logprobs=False)
        for number in range(10):
            bench.step(number, tokens)
        gc.collect()
        rounds.append(statistics.median(bench.step(number, tokens) for number in range(10, steps)))
        bench.finish()
    return round(min(rounds), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer")
    parser.add_argument("--streams", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save", type=Path, help="also write the JSON object to this file")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_folder(resolve(options.model, progress=NoProgress()))
    ids = tokenizer.encode("".join(TEXTS))
    cases: list[dict[str, Any]] = []
    for tokens in (1, 4):
        for name, stops in STOPS.items():
            cost = case(tokenizer, ids, options.streams, options.steps, stops, tokens)
            cases.append({"stops": name, "tokens_per_read": tokens, "us_per_token": cost})
            print(f"{name:20} {tokens} tokens per read: {cost:.3f} us per token")
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    report = {
        "us_per_token": {entry["stops"]: entry["us_per_token"] for entry in cases if entry["tokens_per_read"] == 1},
        "streams": options.streams,
        "model": options.model,
        "cases": cases,
        "commit": revision.stdout.strip(),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"cpu": platform.processor() or platform.machine(), "python": platform.python_version()},
    }
    if options.save:
        options.save.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
