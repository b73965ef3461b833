"""The prefix cache: what hits, what is evicted, who waits for whom."""

import msgspec
import pytest
from engine.test_scheduler import drain, make_core
from engine.walk import alone, make_request

from nori_cluster import hashing
from nori_cluster.engine.core import EngineCore
from nori_cluster.types import pack, unpack

pytestmark = pytest.mark.unit
BLOCK = 16


def core_of(depth: int = 1, **changes) -> EngineCore:
    return make_core(depth, **(dict(num_blocks=64, block_size=BLOCK, max_model_len=400, budget=512, seqs=16) | changes))


def run(core: EngineCore, *requests) -> tuple[dict[int, list[int]], dict[int, int]]:
    """Outputs and cached tokens by key."""
    for request in requests:
        core.submit(request, 0.0)
    outputs: dict[int, list[int]] = {}
    cached: dict[int, int] = {}
    while core.has_work:
        deltas = core.step(0.0)
        if deltas is None:
            continue
        core.scheduler.check()
        cached |= {start.key: start.cached_tokens for start in deltas.starts}
        for key, token in zip(deltas.keys.tolist(), deltas.ids.tolist(), strict=True):
            outputs.setdefault(key, []).append(token)
    return outputs, cached


def test_digests_depend_on_all_that_precedes_and_on_the_salt() -> None:
    tokens = pack(range(BLOCK))
    roots = [
        hashing.root(),
        hashing.root(b"a"),
        hashing.root(adapter="a"),
        hashing.root(adapter="a", adapter_revision=1),
    ]
    roots += [hashing.root(media=b"a"), hashing.extend(hashing.root(), tokens)]
    assert len({hashing.extend(parent, tokens) for parent in roots}) == len(roots)
    assert hashing.extend(hashing.root(), tokens) == hashing.extend(hashing.root(), tokens)
    assert 0 <= hashing.hint(hashing.root()) < 1 << 64


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48])
def test_f31_the_same_prompt_again(length: int, depth: int) -> None:
    """F31: a hit is at most ⌊(len − 1)/block⌋ full blocks; at least one token is always computed."""
    core = core_of(depth)
    prompt = range(5, 5 + length)
    first, cached = run(core, make_request(1, prompt, ignore_eos=True))
    assert cached == {1: 0}
    for key in (2, 3):
        again, cached = run(core, make_request(key, prompt, ignore_eos=True))
        assert again[key] == first[1]
        assert cached[key] == (length - 1) // BLOCK * BLOCK
    longer = [*prompt, *first[1]]
    _, cached = run(core, make_request(4, longer, ignore_eos=True))
    # the last token was sampled, never computed: a block that ends with it is not there
    assert cached[4] == min((len(longer) - 1) // BLOCK, (len(longer) - 1) // BLOCK) * BLOCK
    outputs, cached = run(core, make_request(5, prompt, ignore_eos=True), make_request(6, prompt, ignore_eos=True))
    assert outputs[5] == outputs[6] == first[1]
    assert core.scheduler.pool.free == 64


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [512, 32])
def test_f26_a_shared_prefix_in_one_step(budget: int, depth: int) -> None:
    """F26: sixteen prompts with 48 shared ids at once, also when the shared part takes several chunks, also with one
    aborted in its first step. Nobody reads a block that is not written yet, and the prefix is computed once."""
    core = core_of(depth, budget=budget)
    requests = [make_request(key, [*range(5, 53), 53 + key % 8], ignore_eos=True) for key in range(16)]
    for request in requests:
        core.submit(request, 0.0)
    core.step(0.0)
    core.abort(3)
    outputs, _ = drain(core)
    for request in requests:
        if request.key != 3:
            whole = alone(request, core.scheduler.spec)
            assert outputs.get(request.key, []) == whole[len(whole) - len(outputs.get(request.key, [])) :]
    assert core.executor.computed_tokens < 16 * 49 / 2 + 16 * 8


def test_a_waiter_starts_when_the_one_it_waits_for_is_gone() -> None:
    core = core_of(budget=16)
    core.submit(make_request(1, range(5, 53), ignore_eos=True), 0.0)
    core.submit(make_request(2, range(5, 53), ignore_eos=True), 0.0)
    core.step(0.0)
    assert core.scheduler.num_running == 1, "the second waits for the blocks of the first"
    core.abort(1)
    outputs, _ = drain(core)
    assert outputs[2] == alone(make_request(2, range(5, 53), ignore_eos=True), core.scheduler.spec)


def test_who_shares_nothing_overtakes_a_waiter() -> None:
    core = core_of(budget=64)
    core.submit(make_request(1, [7] * 200, ignore_eos=True), 0.0)
    core.submit(make_request(2, [7] * 200, ignore_eos=True), 0.0)
    core.submit(make_request(3, [9] * 4, ignore_eos=True), 0.0)
    core.step(0.0)
    core.step(0.0)
    plan = core.scheduler.plan(0.0)
    assert plan is not None
    running = {sequence.request.key for sequence in core.scheduler._running}
    assert running == {1, 3} or unpack(plan.counts).sum() == 64


def test_least_recently_used_blocks_go_first_and_deep_ones_before_their_parents() -> None:
    core = core_of(num_blocks=8)
    for key, first in ((1, 5), (2, 25)):
        run(core, make_request(key, range(first, first + 33), max_tokens=1, ignore_eos=True))
    _, cached = run(core, make_request(3, range(5, 38), max_tokens=1, ignore_eos=True))
    assert cached[3] == 32  # used again: younger than those of request 2
    run(core, make_request(4, [50] * 70, max_tokens=1, ignore_eos=True))  # needs 5 of the 8: the 4 free ones, 1 cached
    assert core.scheduler.pool.evictions == 1
    _, cached = run(core, make_request(5, range(25, 58), max_tokens=1, ignore_eos=True))
    assert cached[5] == 16, "the deeper block of request 2 was the one to go"


def test_salts_do_not_share() -> None:
    core = core_of()
    run(core, make_request(1, range(40), cache_salt=b"a"))
    _, cached = run(core, make_request(2, range(40), cache_salt=b"b"), make_request(3, range(40), cache_salt=b"a"))
    assert cached == {2: 0, 3: 32}


def test_siblings_share_with_the_cache_off_and_nothing_stays() -> None:
    core = core_of()
    core.scheduler.config = msgspec.structs.replace(core.scheduler.config, enable_prefix_caching=False)
    core.scheduler.pool._keep = False
    for first in (1, 11):
        family = [make_request(first + i, range(40), seed=i, siblings=first, ignore_eos=True) for i in range(3)]
        outputs, cached = run(core, *family)
        assert [cached[first + i] for i in range(3)] == [0, 32, 32]
        for request in family:
            assert outputs[request.key] == alone(request, core.scheduler.spec)
        assert len(core.scheduler.pool.index) == 0
    _, cached = run(core, make_request(99, range(40)))
    assert cached[99] == 0


def test_a_preempted_sequence_finds_its_blocks_again() -> None:
    computed = {}
    for keep in (True, False):
        core = core_of(num_blocks=12, max_model_len=192, seqs=3)
        requests = [
            make_request(key, range(16 * key, 16 * key + 16), max_tokens=90, seed=key, ignore_eos=True, cache_salt=b"x")
            for key in (1, 2, 3)
        ]
        if not keep:
            config = msgspec.structs.replace(core.scheduler.config, enable_prefix_caching=False)
            core.scheduler.config, core.scheduler.pool._keep = config, False
        outputs, _ = run(core, *requests)
        assert core.scheduler.preemptions > 0
        for request in requests:
            assert outputs[request.key] == alone(request, core.scheduler.spec)
        computed[keep] = core.executor.computed_tokens - 3 * 105
    assert computed[True] <= computed[False] / 2, "most of what a preempted sequence needs was still cached"
