"""A seeded random walk over submit, abort, deadlines and steps, with every invariant checked after each step."""

import random

import numpy as np
from fakes.executor import FAILING, FakeExecutor, next_token

from nori_cluster.config import SchedulerConfig
from nori_cluster.engine.core import EngineCore
from nori_cluster.engine.scheduler import Scheduler
from nori_cluster.engine.sequence import SequenceRequest
from nori_cluster.errors import ClientError, Overloaded
from nori_cluster.types import FinishReason, GroupSpec, RowControls, RowSampling, StepLogprobs, unpack

EOS = 3


def make_spec(**changes) -> GroupSpec:
    fields = dict(
        model="fake", vocab_size=61, max_model_len=96, num_blocks=12, block_size=8, eos_token_ids=(EOS,), dtype="none",
        numerics_id="fake",
    )  # fmt: skip
    return GroupSpec(**(fields | changes))


def make_request(key: int, prompt, *, max_tokens=8, seed=0, prompt_logprobs=-1, **fields) -> SequenceRequest:
    controls = RowControls(prompt_logprobs=prompt_logprobs) if prompt_logprobs >= 0 else None
    sampling = RowSampling(temperature=0.0, top_p=1.0, top_k=0, seed=seed, candidate=0, controls=controls)
    return SequenceRequest(key=key, prompt_token_ids=tuple(prompt), sampling=sampling, max_tokens=max_tokens, **fields)


def alone(request: SequenceRequest, spec: GroupSpec) -> list[int]:
    """The output of the request with the machine to itself: the oracle."""
    tokens = list(request.prompt_token_ids)
    capacity = spec.num_blocks * spec.block_size
    limit = min(request.prompt_len + request.max_tokens, spec.max_model_len, capacity + 1)
    while len(tokens) < limit:
        token = next_token(np.array(tokens), request.sampling.seed, spec.vocab_size)
        tokens.append(token)
        if (token == EOS and not request.ignore_eos) or token in request.stop_token_ids:
            break
    return tokens[len(request.prompt_token_ids) :]


class Walk:
    """One walk; `run(steps)` raises AssertionError at the first broken invariant."""

    def __init__(self, seed: int, depth: int, scheduler_class: type[Scheduler] = Scheduler) -> None:
        self.rng = random.Random(seed)
        spec = make_spec(num_blocks=self.rng.choice((5, 8, 12, 20)), block_size=self.rng.choice((4, 8)))
        config = SchedulerConfig(
            max_num_seqs=self.rng.choice((2, 4, 7)),
            max_num_batched_tokens=self.rng.choice((8, 16, 40)),
            max_waiting_requests=9,
            enable_prefix_caching=self.rng.random() < 0.7,
            draft_tokens=self.rng.choice((0, 0, 1, 3)),
        )
        self.scheduler = scheduler_class(config, spec)
        self.executor = FakeExecutor(spec, config.max_num_seqs, depth)
        self._in_order()
        self.core = EngineCore(self.scheduler, self.executor)
        self.now = 0.0
        self.pieces = [[self.rng.randrange(61) for _ in range(8)] for _ in range(3)]
        self.requests: dict[int, SequenceRequest] = {}
        self.outputs: dict[int, list[int]] = {}
        self.started: set[int] = set()
        self.ended: dict[int, FinishReason] = {}
        self.cut: set[int] = set()  # aborted or with a deadline: a prefix is all we expect
        self.refused = 0
        self.steps = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.act()
            self.step()
        for _ in range(5000):
            if not self.core.has_work:
                break
            self.step()
        self.settle()

    def _in_order(self) -> None:
        """Nobody starves: who starts overtakes only those that wait for blocks which a running sequence computes."""
        start, waiting = self.scheduler._start, self.scheduler.waiting

        def checked(sequence, *rest):
            earlier = [other for other in waiting._members.values() if other.order < sequence.order]
            deferred = {id(other) for _, other in waiting._deferred}
            assert all(id(other) in deferred for other in earlier), "a later sequence starts first"
            return start(sequence, *rest)

        self.scheduler._start = checked

    def act(self) -> None:
        for _ in range(self.rng.choice((0, 0, 1, 1, 3))):
            self.submit()
        live = [key for key in self.requests if key not in self.ended]
        if live and self.rng.random() < 0.15:
            key = self.rng.choice(live)
            self.cut.add(key)
            self.core.abort(key)
        if self.rng.random() < 0.05:
            self.core.abort(10**9)  # unknown: a no-op

    def submit(self) -> None:
        rng, key = self.rng, len(self.requests) + self.refused
        prompt = [rng.randrange(61) for _ in range(rng.choice((1, 3, 8, 9, 17, 40, 95)))]
        kind = rng.random()
        if kind < 0.4:  # pieces that others have too, also in another order
            prompt = [token for _ in range(rng.choice((1, 2, 4))) for token in rng.choice(self.pieces)] + prompt[:9]
        elif kind < 0.6 and self.requests:  # what somebody asked before, perhaps cut
            prompt = list(rng.choice(list(self.requests.values())).prompt_token_ids)[: rng.choice((8, 16, 17, 95))]
        resumed = rng.randrange(len(prompt)) if rng.random() < 0.2 else 0
        deadline = self.now + rng.random() * 30 if rng.random() < 0.1 else None
        request = make_request(
            key,
            prompt,
            max_tokens=resumed + rng.choice((1, 2, 10, 60)),
            seed=rng.randrange(100),
            resumed_tokens=resumed,
            stop_token_ids=(rng.randrange(61),) if rng.random() < 0.3 else (),
            ignore_eos=rng.random() < 0.5,
            order_key=rng.choice((0, 0, 0, 1)),
            deadline=deadline,
            cache_salt=b"x" if rng.random() < 0.1 else b"",
            siblings=key // 3 if rng.random() < 0.3 else None,
            prompt_logprobs=1 if rng.random() < 0.2 else -1,
        )
        try:
            self.core.submit(request, self.now)
        except (ClientError, Overloaded):
            self.refused += 1
            return
        if deadline is not None:
            self.cut.add(key)
        self.requests[key], self.outputs[key] = request, []

    def step(self) -> None:
        self.steps += 1
        self.now += self.rng.random()
        deltas = self.core.step(self.now)
        self.scheduler.check()
        if not self.scheduler.num_in_flight:
            pool = self.scheduler.pool
            self.executor.poison(np.flatnonzero((pool._references == 0) & ~pool.index.indexed))
        if deltas is None:
            return
        for news in deltas.starts:
            assert news.key not in self.started
            self.started.add(news.key)
            self.check_prompt_logprobs(self.requests[news.key], news.prompt_logprobs)
        at = 0
        for key, count in zip(deltas.keys.tolist(), deltas.counts.tolist(), strict=True):
            assert key not in self.ended, "tokens after the end"
            assert key in self.started, "tokens before the start"
            self.outputs[key].extend(deltas.ids[at : at + count].tolist())
            at += count
        for finish in deltas.finishes:
            assert finish.key not in self.ended, "two terminal events"
            self.ended[finish.key] = finish.reason

    def check_prompt_logprobs(self, request: SequenceRequest, logprobs: StepLogprobs | None) -> None:
        """One entry per prompt token but the first, whatever was cached, cut into chunks or preempted."""
        prompt = list(request.prompt_token_ids[: request.prompt_len])
        if request.sampling.controls is None or len(prompt) == 1:
            assert logprobs is None
        else:
            assert logprobs is not None, "no prompt logprobs"
            assert np.frombuffer(logprobs.chosen, "<f4").astype(int).tolist() == prompt[1:]
            assert unpack(logprobs.top_ids).tolist() == prompt[1:]

    def settle(self) -> None:
        """At the end: nothing runs, nothing leaked, every request ended once and said what it says alone."""
        assert not self.core.has_work, "work left over"
        assert self.ended.keys() == self.requests.keys(), "a request never ended"
        assert self.scheduler.pool.free == self.scheduler.pool.num_blocks, "blocks leaked"
        for key, request in self.requests.items():
            expected = alone(request, self.scheduler.spec)
            got = self.outputs[key]
            if self.ended[key] is FinishReason.ERROR:
                assert request.sampling.seed == FAILING, "a request failed that should not"
                assert got == expected[: len(got)], "a failed request said something else"
            elif key in self.cut:
                assert got == expected[: len(got)], "a cut request said something else"
            else:
                assert got == expected, "a request said something else than alone"
                stopped = got[-1] in request.stop_token_ids or (got[-1] == EOS and not request.ignore_eos)
                assert self.ended[key] == (FinishReason.STOP if stopped else FinishReason.LENGTH)
