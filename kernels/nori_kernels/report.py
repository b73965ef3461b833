"""Every kernel compiled for every target: `make kernels-report`. The last line is one JSON object."""

import argparse
import json
import sys
from pathlib import Path

import triton

from nori_kernels.casts import interpreted
from nori_kernels.catalog import VARIANTS, entries
from nori_kernels.compile import usage
from nori_kernels.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path("build/kernels"), help="results of earlier compiles")
    parser.add_argument("--only", default="", help="variants whose name contains this")
    options = parser.parse_args()
    if interpreted():
        parser.error("TRITON_INTERPRET=1 leaves nothing to compile: unset it")
    chosen = [variant for variant in VARIANTS if options.only in variant.name]
    compiled, spills, refused, failed = 0, 0, 0, []
    for variant in chosen:
        for target in TARGETS.values():
            if not variant.meant_for(target.name):
                continue
            head = f"{variant.name:<58} {target.name:<7}"
            if (reason := target.refusal(variant.uses)) is not None:
                refused += 1
                sys.stdout.write(f"{head} refused: {reason}\n")
                continue
            found = usage(variant, target, options.cache)
            problems = found.problems(variant, target)
            compiled += 1
            spills += found.stack_bytes > 0
            failed += [f"{variant.name} on {target.name}: {problem}" for problem in problems]
            detail = f"{found.registers:>4} registers {found.shared_bytes:>7} B shared  {' '.join(found.instructions)}"
            sys.stdout.write(f"{head} {detail}{'  PROBLEM: ' if problems else ''}{'; '.join(problems)}\n")
            sys.stdout.flush()
    summary = {
        "kernels": len(entries()),
        "targets": list(TARGETS),
        "variants": len(chosen),
        "compiles": compiled,
        "spills": spills,
        "refused": refused,
        "problems": failed,
        "triton": triton.__version__,
    }
    sys.stdout.write(json.dumps(summary) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
