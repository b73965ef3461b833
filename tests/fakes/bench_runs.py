"""Made-up runs of a load: an open server that is fast up to a rate and slow above it, as LoadResults and Reports."""

from collections.abc import Sequence

import msgspec
import numpy as np

from nori_cluster.bench.conditions import Conditions
from nori_cluster.bench.cost import Prices
from nori_cluster.bench.environment import Device, Git, Machine
from nori_cluster.bench.metrics import summarize
from nori_cluster.bench.records import Lengths, LoadSpec, RequestRecord, Slo
from nori_cluster.bench.report import Report, Round, build
from nori_cluster.bench.runner import LoadResult

TREE = Git(revision="0123456789abcdef", dirty=False)
HOST = Machine(
    cpu="Fake CPU", cores=4, logical_cpus=8, memory_bytes=1 << 34, clocks="3000 MHz", gpus=(), driver="",
    system="Linux", python="CPython 3.11", busy_before=0.01,
)  # fmt: skip
KNOWN = Conditions(
    server="Nori Cluster 0.1.0", model="tiny", revision="r1", weights="bfloat16", kv_cache="bfloat16",
    parallelism="TP 1 × 1 group", devices=(Device(name="Fake CPU"),), clocks="3000 MHz", software={"torch": "2"},
    flags="{}", cache_state="empty", stream_interval=1.0, numerics_id="n1",
)  # fmt: skip
LOAD = LoadSpec(
    arrival="constant", rate=10.0, requests=200, input=Lengths(median=16), output=Lengths(median=8), processes=1
)


def run(load: LoadSpec, *, ttft: float = 0.1, tpot: float = 0.01, noise: float = 0.02, failures: int = 0) -> LoadResult:
    """Every request takes ttft + 7 × tpot seconds, give or take `noise`; the first `failures` fail."""
    random = np.random.default_rng(load.seed)
    tokens, count = load.output.median, load.requests or int((load.rate or 1.0) * (load.duration or 20.0))
    records = []
    for number in range(count):
        due = number / (load.rate or 10.0)
        wait, gap = (value * (1 + noise * random.standard_normal()) for value in (ttft, tpot))
        events = tuple(due + wait + gap * index for index in range(tokens))
        failed = number < failures
        records.append(
            RequestRecord(
                number=number,
                due=due,
                sent=due,
                first=None if failed else events[0],
                last=due + 0.01 if failed else events[-1],
                events=() if failed else events,
                event_tokens=() if failed else (1,) * tokens,
                asked_input=16,
                asked_output=tokens,
                prompt_tokens=None if failed else 16,
                output_tokens=None if failed else tokens,
                cached_tokens=None if failed else 4,
                finish_reason=None if failed else "length",
                failure="status" if failed else None,
                message="503 <full>" if failed else "",
            )
        )
    return LoadResult(
        url="http://127.0.0.1:1", model="tiny", records=records, warmup=[], cpus=[0.1], wall=20.0,
        started="2026-12-01T00:00:00+00:00",
    )  # fmt: skip


def report(
    results: Sequence[LoadResult] | None = None,
    *,
    load: LoadSpec = LOAD,
    conditions: Conditions = KNOWN,
    slo: Slo = Slo(),
    tree: Git = TREE,
    prices: Prices | None = None,
    host: Machine = HOST,
) -> Report:
    results = [run(load)] if results is None else results
    rounds = [Round(r.records, summarize(r.records, load, slo, r.cpus)) for r in results]
    return build(
        kind="serve", load=load, slo=slo, rounds=rounds, target=results[0].url, conditions=conditions,
        started=results[0].started, prices=prices, host=host, tree=tree,
    )  # fmt: skip


def rounds(count: int, **changes: float) -> list[LoadResult]:
    """Several runs with other seeds."""
    return [run(msgspec.structs.replace(LOAD, seed=seed), **changes) for seed in range(count)]  # type: ignore[arg-type]
