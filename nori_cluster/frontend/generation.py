"""One admitted call on its way back: it wakes its consumer, hands out Deltas, and ends in exactly one way.

A Generation owns its candidates; one bare future wakes its consumer, pending news is swapped out on take.
"""

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic, time

import msgspec

from nori_cluster.errors import Cancelled, EngineFailure, NoriError
from nori_cluster.frontend.backend import Backend, Started, Submission
from nori_cluster.frontend.candidate import Candidate, Delta
from nori_cluster.frontend.detokenizer import Detokenizer
from nori_cluster.frontend.stop import StopMatcher
from nori_cluster.frontend.tokenizer import Tokenizer
from nori_cluster.telemetry import ModelMetrics
from nori_cluster.types import Request, SamplingParams, TokenLogprob


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a whole call: each prompt once, all candidates' outputs.

    *_drafts: speculated tokens tried and kept, of the candidates that the engine ended.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    accepted_drafts: int = 0
    proposed_drafts: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Generation:
    """The consumer's side of one call. Read by one task; close() may come from any task of the loop.

    id: unique. prompts: token ids per prompt. created: unix seconds. model: the name the client asked for.
    queue_time, time_to_first_token: seconds, None until known. Iteration yields whatever is ready, at most one Delta
    per candidate, and raises the NoriError that ended the call early (after the Deltas that came before it).
    prompt_logprobs: prompt number → one entry per token but the first, when asked for; there before any Delta of the
    prompt's candidates.
    """

    def __init__(
        self,
        *,
        id: str,
        model: str,
        prompts: Sequence[tuple[int, ...]],
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        metrics: ModelMetrics,
        every_token: bool = False,
        on_end: Callable[["Generation"], None] = lambda generation: None,
    ) -> None:
        self.id = id
        self.model = model
        self.created = int(time())
        self.n = sampling.n
        self.prompts = prompts
        self.queue_time: float | None = None
        self.time_to_first_token: float | None = None
        self._metrics = metrics
        self.prompt_logprobs: dict[int, Sequence[TokenLogprob]] = {}
        self._weights: dict[int, str] = {}  # prompt number → weights_id that speaks
        self._wants_prompt_logprobs = sampling.prompt_logprobs is not None
        self._every_token = every_token or sampling.logprobs is not None
        self._on_end = on_end
        self._matching = bool(sampling.stop)
        self._loop = asyncio.get_running_loop()
        self._submitted_at = monotonic()
        self._submissions: list[Submission] = []
        self._waiter: asyncio.Future[None] | None = None
        self._whole = False  # the consumer waits for the end only
        self._scan_scheduled = False
        self._error: NoriError | None = None
        self._ended = False
        self._cached_tokens = 0
        self._dirty: list[Candidate] = []
        include = sampling.include_stop_str_in_output
        self._candidates = [
            Candidate(
                self,
                index,
                Detokenizer(tokenizer, sampling.skip_special_tokens),
                StopMatcher(sampling.stop, include) if sampling.stop else None,
                include,
                sampling.logprobs is not None,
                metrics.inter_token,
                sampling.min_tokens,
                sampling.max_tokens == 0,
            )
            for index in range(len(prompts) * sampling.n)
        ]
        self._unaccepted = self._running = len(self._candidates)
        metrics.running += 1

    def submit(self, backend: Backend, requests: Sequence[Request]) -> None:
        """Place one Request per prompt; a refusal that comes at once stops the rest."""
        for number, request in enumerate(requests):
            if self._ended:
                break
            sinks = self._candidates[number * self.n : (number + 1) * self.n]
            self._submissions.append(backend.submit(request, sinks))
        if self._ended:
            self._abort_all()

    async def admitted(self) -> None:
        """Return once every candidate was accepted; raise the refusal (NoriError) after aborting the siblings."""
        while self._unaccepted and not self._ended:
            await self._wait()
        if self._error is not None and self._unaccepted:
            raise self._error

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> list[Delta]:
        while True:
            deltas = self._take()
            if deltas:
                return deltas
            if self._error is not None:
                raise self._error
            if not self._running:
                raise StopAsyncIteration
            await self._wait()

    async def result(self) -> list[Delta]:
        """Wait for the end: one complete Delta per candidate, in index order. Raises like iteration."""
        self._whole = True
        while not self._ended and not all(candidate.closed for candidate in self._candidates):
            await self._wait()
        deltas = self._take()
        if self._error is not None:
            raise self._error
        return sorted(deltas, key=lambda delta: delta.index)

    @property
    def candidates(self) -> int:
        """Prompts times n."""
        return len(self._candidates)

    def weights_id(self, candidate: int) -> str:
        """Of the weights that speak: known from the candidate's first Delta on where the backend tells, else empty."""
        return self._weights.get(candidate // self.n, "")

    @property
    def weights_ids(self) -> list[str]:
        """Of all prompts, sorted: requests of one call may have begun on either side of a reload."""
        return sorted(set(self._weights.values()))

    @property
    def usage(self) -> Usage:
        """Counts of what was taken so far; final after the last Delta."""
        candidates = self._candidates
        return Usage(
            sum(map(len, self.prompts)),
            sum(candidate.count for candidate in candidates),
            self._cached_tokens,
            sum(candidate.accepted_drafts for candidate in candidates),
            sum(candidate.proposed_drafts for candidate in candidates),
        )

    def close(self, error: NoriError | None = None) -> None:
        """Abort what still runs. Idempotent. A consumer still waiting gets `error` (default Cancelled)."""
        if self._ended:
            return
        self._end(error or Cancelled("the request was closed"))
        self._metrics.aborted += 1

    # CandidateOwner

    def on_accepted(self) -> None:
        self._unaccepted -= 1
        if not self._unaccepted:
            self._wake()

    def on_started(self, candidate: Candidate, start: Started) -> None:
        if self.queue_time is None:
            self.queue_time = start.queue_time
            self._metrics.queue_time.observe(start.queue_time)
        prompt, number = divmod(candidate.index, self.n)
        if start.weights_id:
            self._weights[prompt] = start.weights_id
        if number == 0:  # siblings share the prompt, which usage counts once
            self._cached_tokens += start.cached_tokens
            if self._wants_prompt_logprobs:
                self._keep_prompt_logprobs(prompt, start.prompt_logprobs or ())

    def on_first_token(self, now: float) -> None:
        if self.time_to_first_token is None:
            self.time_to_first_token = now - self._submitted_at
            self._metrics.first_token.observe(self.time_to_first_token)

    def on_news(self, candidate: Candidate) -> None:
        if not candidate.dirty:
            candidate.dirty = True
            self._dirty.append(candidate)
        if not self._whole or candidate.ended_by_backend:
            self._wake()
        if self._matching and not self._scan_scheduled:
            # Stop strings must end a candidate even while its consumer is blocked in a write or waits for the end.
            self._scan_scheduled = True
            self._loop.call_soon(self._scan)

    def on_stop_string(self, candidate: Candidate) -> None:
        self._abort(candidate)
        if self._whole:
            self._wake()

    def on_overrun(self, tokens: int) -> None:
        self._metrics.stop_overrun_tokens += tokens

    def on_failed(self, error: NoriError) -> None:
        if not self._ended:
            self._end(error)
            self._metrics.errors[error.code or "error"] += 1

    # Inside

    def _keep_prompt_logprobs(self, prompt: int, logprobs: Sequence[TokenLogprob]) -> None:
        wanted = len(self.prompts[prompt]) - 1
        if len(logprobs) == wanted:
            self.prompt_logprobs[prompt] = logprobs
        else:  # shown, they would stand beside the wrong tokens
            self.on_failed(EngineFailure(f"the group sent {len(logprobs)} prompt logprobs instead of {wanted}"))

    async def _wait(self) -> None:
        assert self._waiter is None, "a Generation has one consumer"
        waiter = self._waiter = self._loop.create_future()
        try:
            await waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _scan(self) -> None:
        self._scan_scheduled = False
        for candidate in self._dirty:
            candidate.decode()

    def _take(self) -> list[Delta]:
        dirty = self._dirty
        if not dirty:
            return []
        self._dirty = []
        deltas: list[Delta] = []
        for candidate in dirty:
            if self._wants_prompt_logprobs and candidate.index // self.n not in self.prompt_logprobs:
                self._dirty.append(candidate)  # a sibling was faster than candidate 0, which brings them
                continue
            candidate.dirty = False
            delta = candidate.take(self._every_token)
            if delta is None:
                continue
            deltas.append(delta)
            if delta.finish_reason is not None:
                self._running -= 1
                self._metrics.success[delta.finish_reason.name.lower()] += 1
        if not self._running and not self._ended:
            self._end(None)
        return deltas

    def _end(self, error: NoriError | None) -> None:
        """The one terminal transition: by itself (None), by a failure, or by close."""
        assert not self._ended
        self._ended = True
        self._error = error
        if error is not None:
            self._scan()
            self._abort_all()
        metrics = self._metrics
        metrics.running -= 1
        usage = self.usage
        metrics.prompt_tokens += usage.prompt_tokens
        metrics.generation_tokens += usage.completion_tokens
        if error is None:
            seconds = monotonic() - self._submitted_at
            metrics.latency.observe(seconds)
            if self.time_to_first_token is not None and usage.completion_tokens > len(self._candidates):
                later = usage.completion_tokens / len(self._candidates) - 1
                metrics.per_output_token.observe((seconds - self.time_to_first_token) / later)
        self._on_end(self)
        self._wake()

    def _abort_all(self) -> None:
        for candidate in self._candidates:
            if not candidate.ended_by_backend:
                candidate.closed = True
                self._abort(candidate)

    def _abort(self, candidate: Candidate) -> None:
        prompt, number = divmod(candidate.index, self.n)
        if prompt < len(self._submissions):
            self._submissions[prompt].abort(number)
