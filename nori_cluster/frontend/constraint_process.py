"""The process that compiles strangers' grammars for ConstraintChecker: it may be killed, the gateway may not.

Lines of JSON on stdin and stdout. In: first [tokenizer.json text, vocabulary size, EOS ids], then [kind, text] each.
Out: "" when all is well (the first answers the tokenizer), else the reason as a string.
"""

import json
import resource
import signal
import sys
import time
from pathlib import Path

import llguidance

from nori_cluster.grammar import GrammarError, compile_matcher, load_tokenizer
from nori_cluster.types import Constraint

COMPILE_SECONDS = 0.5  # of CPU: rank 0 compiles the same grammar, and others wait for it there
ALARM_SECONDS = 6  # this process ends by itself when its parent is not there to end it
SPARE_BYTES = 160 << 20  # for one compilation


def main() -> None:
    definition, vocab_size, eos_token_ids = json.loads(sys.stdin.readline())
    try:
        tokenizer = load_tokenizer(definition, vocab_size, eos_token_ids)
    except ValueError as error:
        answer(f"the model's tokenizer cannot be used for it: {error}")
        return
    limit_memory()
    answer("")
    for line in sys.stdin:
        signal.alarm(ALARM_SECONDS)
        answer(verdict(tokenizer, Constraint(*json.loads(line))))
        signal.alarm(0)


def verdict(tokenizer: llguidance.LLTokenizer, constraint: Constraint) -> str:
    began = time.process_time()
    try:
        compile_matcher(tokenizer, constraint)
    except GrammarError as error:
        return str(error)
    if time.process_time() - began > COMPILE_SECONDS:
        return f"takes too long to compile: more than {COMPILE_SECONDS} s"
    return ""


def answer(reason: str) -> None:
    sys.stdout.write(json.dumps(reason) + "\n")
    sys.stdout.flush()


def limit_memory() -> None:
    """At most SPARE_BYTES of data more than now (where /proc tells how much that is)."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return
    used = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + SPARE_BYTES, used + SPARE_BYTES))


if __name__ == "__main__":
    main()
