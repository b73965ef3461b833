"""The gateway's end of Exchange against a server that says exactly what a test wants."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from fakes.cluster import until

from nori_cluster.frontend.backend import Started
from nori_cluster.rpc.dataplane_client import MAX_HANDLE, DataPlaneClient, DataPlaneTimes, LinkState
from nori_cluster.rpc.generated.nori.dataplane.v1 import worker_group_service_pb2 as pb
from nori_cluster.rpc.generated.nori.dataplane.v1 import worker_group_service_pb2_grpc as pb_grpc
from nori_cluster.rpc.options import server_options
from nori_cluster.types import TokenLogprob

pytestmark = pytest.mark.contract
Answer = Callable[[pb.ExchangeRequest], Sequence[pb.ExchangeResponse]]


class Script(pb_grpc.WorkerGroupServiceServicer):
    """Answers each command with what `answer` returns for it; None ends the stream."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.group_id = "g"
        self.commands: list[pb.ExchangeRequest] = []

    async def Exchange(self, requests: Any, context: Any) -> None:
        await context.read()
        await context.write(pb.ExchangeResponse(welcome=pb.Welcome(group_id=self.group_id, group_incarnation=7)))
        while (command := await context.read()) is not grpc.aio.EOF:
            self.commands.append(command)
            for message in self.answer(command):
                if message is None:
                    return
                await context.write(message)


class Ear:
    """A Receiver that remembers."""

    def __init__(self) -> None:
        self.news: list[str] = []
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None

    def accepted(self) -> None:
        self.news.append("accepted")

    def started(self, start: Started) -> None:
        self.news.append("started")

    def tokens(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> None:
        self.ids += ids
        if logprobs is not None:
            self.logprobs = [*(self.logprobs or []), *logprobs]

    def finished(self, finish: pb.SequenceFinish) -> None:
        self.news.append("finished")

    def rejected(self, rejection: pb.Rejection) -> None:
        self.news.append("rejected")

    def lost(self, reason: str) -> None:
        self.news.append("lost")


TIMES = DataPlaneTimes(connect=1.0, ping_interval=0.1, ping_timeout=0.4)


@asynccontextmanager
async def linked(
    answer: Answer, times: DataPlaneTimes = DataPlaneTimes()
) -> AsyncIterator[tuple[DataPlaneClient, Script]]:
    script = Script(answer)
    server = grpc.aio.server(options=server_options())
    pb_grpc.add_WorkerGroupServiceServicer_to_server(script, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link = DataPlaneClient("g", f"127.0.0.1:{port}", "gw", 1, lambda link: None, times=times)
    link.start()
    await until(lambda: link.state is not LinkState.CONNECTING)
    yield link, script
    await link.close()
    await server.stop(None)


def sequence(tokens: int = 1) -> pb.SequenceRequest:
    return pb.SequenceRequest(prompt_token_ids=[1] * tokens)


def output(**fields: Any) -> pb.ExchangeResponse:
    return pb.ExchangeResponse(step_output=pb.StepOutput(**fields))


def when_submitted(*messages: pb.ExchangeResponse | None) -> Answer:
    def answer(command: pb.ExchangeRequest) -> Sequence[Any]:
        if command.HasField("ping"):
            return [pb.ExchangeResponse(pong=pb.Pong(nonce=command.ping.nonce))]
        return messages if command.HasField("submit") else []

    return answer


def finish(handle: int) -> pb.SequenceFinish:
    return pb.SequenceFinish(handle=handle, reason=1)


async def test_merged_outputs_counts_and_repeated_handles() -> None:
    answer = when_submitted(
        pb.ExchangeResponse(accepted=pb.Accepted(handles=[1, 2])),
        output(handles=[1, 2], token_counts=[3, 1], token_ids=[10, 11, 12, 20], starts=[pb.SequenceStart(handle=1)]),
        output(handles=[1, 2, 1], token_ids=[13, 21, 14]),
        output(handles=[2], token_counts=[0], token_ids=[], finishes=[finish(1), finish(2)]),
    )
    async with linked(answer) as (link, _):
        ears = [Ear(), Ear()]
        entries = link.submit([sequence(), sequence()], ears)
        await until(lambda: "finished" in ears[1].news)
        assert ears[0].ids == [10, 11, 12, 13, 14]
        assert ears[1].ids == [20, 21]
        assert ears[0].news == ["accepted", "started", "finished"]
        assert [entry.count for entry in entries] == [5, 2]
        assert link.open_sequences == 0


async def test_logprobs_of_merged_outputs_stay_beside_their_tokens() -> None:
    def values(*logprobs: float) -> dict[str, Any]:
        return {"logprobs": logprobs, "top": [{"token_ids": [1], "logprobs": [p]} for p in logprobs]}

    logprobs = [
        pb.SequenceLogprobs(handle=1, logprobs=values(-0.5)),
        pb.SequenceLogprobs(handle=1, logprobs=values(-0.25)),
    ]
    answer = when_submitted(
        output(handles=[1, 2, 1], token_ids=[10, 20, 11], logprobs=logprobs, finishes=[finish(1), finish(2)])
    )
    async with linked(answer) as (link, _):
        ears = [Ear(), Ear()]
        link.submit([sequence(), sequence()], ears)
        await until(lambda: "finished" in ears[1].news)
        assert ears[0].ids == [10, 11]
        assert ears[0].logprobs == [TokenLogprob(-0.5, (1,), (-0.5,)), TokenLogprob(-0.25, (1,), (-0.25,))]
        assert ears[1].logprobs is None


@pytest.mark.parametrize(
    "bad",
    [
        {"handles": [1, 2], "token_ids": [1]},
        {"handles": [1], "token_ids": [1, 2]},
        {"handles": [1], "token_ids": [1, 2], "token_counts": [1]},
        {"handles": [1, 2], "token_ids": [1, 2], "token_counts": [2]},
    ],
)
async def test_an_output_that_does_not_add_up_breaks_the_stream_and_fails_each_handle_once(bad: dict[str, Any]) -> None:
    async with linked(when_submitted(output(**bad))) as (link, _):
        ears = [Ear(), Ear()]
        link.submit([sequence(), sequence()], ears)
        await until(lambda: link.open_sequences == 0)
        assert [ear.news for ear in ears] == [["lost"], ["lost"]]


async def test_a_stream_that_ends_fails_each_handle_once_and_a_new_one_is_opened() -> None:
    async with linked(when_submitted(None)) as (link, script):
        ears = [Ear() for _ in range(5)]
        for ear in ears:
            link.submit([sequence()], [ear])
        await until(lambda: link.open_sequences == 0)
        assert [ear.news for ear in ears] == [["lost"]] * 5
        script.answer = when_submitted(pb.ExchangeResponse(accepted=pb.Accepted(handles=[6])))
        await until(lambda: link.state is LinkState.OPEN)
        ear = Ear()
        (entry,) = link.submit([sequence()], [ear])
        assert entry.handle == 6, "a handle of the broken stream may still live in the group"
        await until(lambda: ear.news == ["accepted"])


async def test_what_waits_goes_in_one_message_and_an_unsent_abort_is_never_sent() -> None:
    async with linked(when_submitted()) as (link, script):
        ears = [Ear() for _ in range(50)]
        entries = [link.submit([sequence()], [ear])[0] for ear in ears]
        link.abandon(entries[7])
        link.abandon(entries[7])
        await until(lambda: bool(script.commands))
        (command,) = script.commands
        assert [s.handle for s in command.submit.sequences] == [h for h in range(1, 51) if h != 8]
        assert link.open_sequences == 49
        for entry in entries[:3]:
            link.abandon(entry)
        await until(lambda: any(c.HasField("abort") for c in script.commands))
        assert list(script.commands[-1].abort.handles) == [1, 2, 3]
        assert link.open_sequences == 49, "taken until the group confirms"


async def test_long_prompts_are_cut_into_several_messages() -> None:
    async with linked(when_submitted()) as (link, script):
        for _ in range(3):
            link.submit([sequence(700_000)], [Ear()])
        await until(lambda: len([c for c in script.commands if c.HasField("submit")]) == 3)


async def test_handles_are_reused_only_after_finish_or_rejection() -> None:
    rejection = pb.ExchangeResponse(rejection=pb.Rejection(handles=[1], reason=pb.REJECTION_REASON_INVALID))
    async with linked(when_submitted(rejection)) as (link, script):
        ear = Ear()
        link.submit([sequence()], [ear])
        await until(lambda: ear.news == ["rejected"])
        script.answer = when_submitted()
        (first,), (second,) = link.submit([sequence()], [Ear()]), link.submit([sequence()], [Ear()])
        assert (first.handle, second.handle) == (1, 2)
        several = link.submit([sequence() for _ in range(3)], [Ear() for _ in range(3)])
        assert [entry.handle for entry in several] == [3, 4, 5]
        link._next_handle = MAX_HANDLE - 1
        wrapped = link.submit([sequence() for _ in range(3)], [Ear() for _ in range(3)])
        assert [entry.handle for entry in wrapped] == [7, 8, 9], "1 to 5 live: the next run of three free ones"


async def test_a_silent_group_is_pinged_and_lost_and_an_answering_one_is_not() -> None:
    async with linked(when_submitted(), TIMES) as (link, script):
        await asyncio.sleep(0.6)
        assert link.state is LinkState.OPEN
        assert sum(c.HasField("ping") for c in script.commands) >= 3
        ear = Ear()
        link.submit([sequence()], [ear])
        script.answer = lambda command: []
        await until(lambda: ear.news == ["lost"], 2.0)


async def test_another_group_at_the_address_is_not_taken_for_ours() -> None:
    async with linked(when_submitted()) as (link, script):
        script.group_id = "other"
        script.answer = when_submitted(None)
        link.submit([sequence()], [Ear()])
        await until(lambda: link.state is LinkState.LOST)
        await asyncio.sleep(0.3)
        assert link.state is LinkState.LOST


async def test_an_abort_that_crossed_its_finish_does_not_hit_the_handles_next_owner() -> None:
    """The client stops a sequence, its finish comes before the Abort was written, and the handle is given again."""
    async with linked(when_submitted()) as (link, script):
        (entry,) = link.submit([sequence()], [Ear()])
        await until(lambda: len(script.commands) == 1)
        link.abandon(entry)
        link._step_output(pb.StepOutput(finishes=[finish(entry.handle)]))
        (again,) = link.submit([sequence()], [Ear()])
        assert again.handle == entry.handle
        await until(lambda: len(script.commands) > 1)
        await asyncio.sleep(0.05)
        assert [command.WhichOneof("command") for command in script.commands] == ["submit", "submit"]
        link.abandon(again)
        await until(lambda: script.commands[-1].HasField("abort"))
        assert script.commands[-1].abort.handles == [again.handle]
