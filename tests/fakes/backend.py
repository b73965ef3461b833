"""FakeBackend: a frontend.Backend that replays token lists like an engine would, with chosen timing and faults."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle, islice

import msgspec

from nori_cluster.errors import NoriError
from nori_cluster.frontend.backend import Finish, ModelInfo, Started, TokenSink
from nori_cluster.types import FinishReason, Request, TokenLogprob


class Script(msgspec.Struct, kw_only=True):
    """What happens to one candidate.

    tokens: replayed until EOS, a stop id or max_tokens; endless ones are fine. chunk: tokens per message. step: seconds
    between messages (0 = one turn of the loop). refusal: instead of accepted. fault: raised after fault_after tokens.
    logprob: of every token. drafts: accepted and proposed, told at the end. start_after: seconds before the first one.
    """

    tokens: Iterable[int] = ()
    chunk: int = 1
    step: float = 0.0
    accept_after: float = 0.0
    refusal: NoriError | None = None
    fault: NoriError | None = None
    fault_after: int = 0
    cached_tokens: int = 0
    start_after: float = 0.0
    logprob: float = -0.5
    drafts: tuple[int, int] = (0, 0)
    weights_id: str = ""


class _Sequence:
    def __init__(self, backend: "FakeBackend", request: Request, number: int, sink: TokenSink) -> None:
        self.backend = backend
        self.request = request
        self.number = number
        self.sink = sink
        self.script = backend.script(request, number)
        self.prefilled = False
        self.task = asyncio.ensure_future(self.run())

    async def run(self) -> None:
        try:
            await self.replay()
        finally:
            self.backend.open.discard(self)

    async def replay(self) -> None:
        script, sampling = self.script, self.request.sampling
        await asyncio.sleep(script.accept_after)
        if script.refusal is not None:
            self.sink.failed(script.refusal)
            return
        self.sink.accepted()
        async with self.backend.slots:
            self.prefilled = True
            if script.start_after:
                await asyncio.sleep(script.start_after)
            prompt = self.logprobs(self.request.prompt_token_ids[1:], sampling.prompt_logprobs)
            self.sink.started(Started(script.cached_tokens, 0.001, None if self.number else prompt, script.weights_id))
            assert sampling.max_tokens is not None
            source = iter(islice(script.tokens, sampling.max_tokens))
            sent = 0
            while True:
                await asyncio.sleep(script.step)
                limit = script.chunk
                if script.fault is not None:
                    limit = min(limit, script.fault_after - sent)
                ids, finish = self.cut(list(islice(source, limit)), sent)
                sent += len(ids)
                self.backend.generated += len(ids)
                if ids:
                    self.sink.tokens(ids, self.logprobs(ids, sampling.logprobs))
                if script.fault is not None and sent >= script.fault_after:
                    self.sink.failed(script.fault)
                    return
                if finish is not None:
                    accepted, proposed = script.drafts
                    self.sink.finished(Finish(finish.reason, finish.matched_token_id, accepted, proposed))
                    return

    def cut(self, ids: list[int], sent: int) -> tuple[list[int], Finish | None]:
        sampling = self.request.sampling
        for position, id_ in enumerate(ids):
            if id_ in self.backend.eos and not sampling.ignore_eos:
                return ids[: position + 1], Finish(FinishReason.STOP)
            if id_ in sampling.stop_token_ids:
                return ids[: position + 1], Finish(FinishReason.STOP, id_)
        if sent + len(ids) == sampling.max_tokens:
            return ids, Finish(FinishReason.LENGTH)
        assert ids or self.script.fault, "the script ran out of tokens: end it with EOS"
        return ids, None

    def logprobs(self, ids: Sequence[int], count: int | None) -> list[TokenLogprob] | None:
        if count is None:
            return None
        value = self.script.logprob
        return [TokenLogprob(value, (id_, 3, 4)[:count], (value, -1.5, -2.5)[:count]) for id_ in ids]


class _Submission:
    def __init__(self, backend: "FakeBackend", sequences: list[_Sequence]) -> None:
        self.backend = backend
        self.sequences = sequences

    def abort(self, candidate: int) -> None:
        self.backend.aborts.append((self.sequences[candidate].request.id, candidate))
        self.sequences[candidate].task.cancel()


class FakeBackend:
    """requests: everything submitted. open: sequences that live. aborts: (request id, candidate) in order."""

    def __init__(
        self,
        script: Callable[[Request, int], Script] | Script | None = None,
        *,
        model: str = "smol",
        max_model_len: int = 256,
        max_num_seqs: int = 64,
        eos: Sequence[int] = (2,),
    ) -> None:
        self._script = script or Script(tokens=cycle(range(68, 94)))
        self.info: ModelInfo | None = ModelInfo(name=model, max_model_len=max_model_len, ready_groups=1)
        self.eos = tuple(eos)
        self.slots = asyncio.Semaphore(max_num_seqs)
        self.requests: list[Request] = []
        self.sequences: list[_Sequence] = []
        self.open: set[_Sequence] = set()
        self.aborts: list[tuple[str, int]] = []
        self.generated = 0

    def script(self, request: Request, number: int) -> Script:
        return self._script if isinstance(self._script, Script) else self._script(request, number)

    def submit(self, request: Request, sinks: Sequence[TokenSink]) -> _Submission:
        self.requests.append(request)
        assert len(sinks) == request.sampling.n
        sequences = [_Sequence(self, request, number, sink) for number, sink in enumerate(sinks)]
        self.open.update(sequences)
        self.sequences += sequences
        return _Submission(self, sequences)

    def model(self, name: str) -> ModelInfo | None:
        return self.info if self.info is not None and name == self.info.name else None
