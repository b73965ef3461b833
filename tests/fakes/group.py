"""A worker group without an engine: a real data-plane server that replays numbers, registers, and fails on demand."""

import asyncio
from typing import Any

import grpc

from nori_cluster.routing.base import GroupRegistration, GroupReport, GroupState
from nori_cluster.rpc.generated.nori.common.v1 import generation_pb2 as common
from nori_cluster.rpc.generated.nori.dataplane.v1 import worker_group_service_pb2 as pb
from nori_cluster.rpc.generated.nori.dataplane.v1 import worker_group_service_pb2_grpc as pb_grpc
from nori_cluster.rpc.options import server_options
from nori_cluster.rpc.register import GroupRegistrar

FIRST_TOKEN = 1000


def base(weights: str) -> int:
    """The first token that a group with these weights ("w1", "w2", …) says."""
    return FIRST_TOKEN + 10_000 * int(weights.removeprefix("w") or 0)


class Live:
    def __init__(self, request: pb.SequenceRequest, first: int = FIRST_TOKEN) -> None:
        self.first = first
        self.handle = request.handle
        self.request = request
        self.sent = request.resumed_tokens
        self.started = False
        said = list(request.prompt_token_ids)[len(request.prompt_token_ids) - self.sent :]
        assert said == list(range(first, first + self.sent)), "resumed with tokens that nobody said"


class FakeGroup(pb_grpc.WorkerGroupServiceServicer):
    """Each sequence emits FIRST_TOKEN, FIRST_TOKEN + 1, … one per `step` seconds, up to its max_tokens.

    Faults, changeable at any time: hang (streams open, nothing is answered), loading (streams are refused with
    UNAVAILABLE), silent (Submits are read but not answered; pings are), reset_after (the stream is cut once a sequence
    has had so many tokens), reject (a RejectionReason for every Submit), slots (more run only when one ends), hand_off
    (what runs is given up retryably), fault (what every sequence ends with after its first token), ends_all
    (why it ends them on purpose).
    """

    def __init__(
        self, group_id: str, *, model: str = "m", step: float = 0.002, slots: int = 64, first: int | None = None
    ) -> None:
        self.group_id = group_id
        self.model = model
        self.first = first  # token; None = by the weights
        self.step = step
        self.slots = slots
        self.incarnation = 1
        self.hang = self.loading = self.silent = self.hand_off = self.draining = False
        self.weights = ""  # what it says begins with base(weights)
        self._outboxes: set[asyncio.Queue[pb.ExchangeResponse]] = set()
        self.reset_after: int | None = None
        self.reject: int | None = None
        self.fault = self.ends_all = ""
        self.live: dict[tuple[int, int], Live] = {}
        self.submitted: list[pb.SequenceRequest] = []
        self.aborted = self.finished = self.streams = self.pings = 0
        self.state = GroupState.READY
        self.address = ""
        self.registrar: GroupRegistrar | None = None
        self._server: grpc.aio.Server | None = None

    async def start(self, router: str | None = None, port: int = 0) -> str:
        self._server = grpc.aio.server(options=server_options())
        pb_grpc.add_WorkerGroupServiceServicer_to_server(self, self._server)
        bound = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        self.address = f"127.0.0.1:{bound}"
        if router is not None:
            self.register(router)
        return self.address

    def register(self, router: str) -> None:
        self.registrar = GroupRegistrar(router, self.registration, self.report, interval=0.1)
        self.registrar.start()

    async def stop(self) -> None:
        """Both ends: the registration and the data plane."""
        if self.registrar is not None:
            await self.registrar.close()
        await self.stop_serving()

    async def stop_serving(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def registration(self) -> GroupRegistration:
        return GroupRegistration(
            group_id=self.group_id,
            incarnation=self.incarnation,
            model=self.model,
            address=self.address,
            max_context_tokens=512,
            max_running_sequences=self.slots,
            max_batched_tokens=256,
            kv_block_tokens=16,
            kv_blocks=1000,
            weights_id=self.weights,
        )

    def report(self) -> tuple[GroupState, GroupReport]:
        return self.state, GroupReport(running_sequences=len(self.live))

    async def Exchange(self, requests: Any, context: grpc.aio.ServicerContext) -> None:
        self.streams += 1
        stream = self.streams
        if self.loading:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "loading")
        if self.hang:
            await asyncio.sleep(3600)
        hello = await context.read()
        assert hello.WhichOneof("command") == "hello"
        await context.write(self._welcome())
        outbox: asyncio.Queue[pb.ExchangeResponse] = asyncio.Queue()
        self._outboxes.add(outbox)
        tasks = [asyncio.create_task(self._steps(stream, outbox)), asyncio.create_task(self._write(outbox, context))]
        tasks.append(asyncio.create_task(self._read(stream, outbox, context)))
        try:
            await asyncio.wait(tasks, return_when="FIRST_COMPLETED")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._outboxes.discard(outbox)
            self.live = {key: live for key, live in self.live.items() if key[0] != stream}
        if self.reset_after is not None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "reset")

    def _welcome(self) -> pb.ExchangeResponse:
        description = pb.GroupDescription(weights_id=self.weights)
        welcome = pb.Welcome(group_id=self.group_id, group_incarnation=self.incarnation, description=description)
        return pb.ExchangeResponse(welcome=welcome)

    async def reload(self, weights: str, *, hand_over: bool = False) -> None:
        """As a real group: drained (what runs is given up, or ends here), other weights, in service again."""
        assert self.registrar is not None
        self.draining, self.hand_off, self.state = True, hand_over, GroupState.DRAINING
        self.registrar.changed()
        while self.live:
            await asyncio.sleep(self.step)
        self.weights = weights
        for outbox in self._outboxes:
            outbox.put_nowait(self._welcome())
        self.draining, self.hand_off, self.state = False, False, GroupState.READY
        self.registrar.registration_changed()

    async def _read(self, stream: int, outbox: Any, context: grpc.aio.ServicerContext) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            kind = message.WhichOneof("command")
            if self.hang:
                continue
            if kind == "submit":
                self.submitted += message.submit.sequences
                if not self.silent:
                    self._submit(stream, message.submit.sequences, outbox)
            elif kind == "abort":
                output = pb.StepOutput()
                for handle in message.abort.handles:
                    if self.live.pop((stream, handle), None) is not None:
                        self.aborted += 1
                        output.finishes.add(handle=handle, reason=common.FINISH_REASON_CANCELLED)
                outbox.put_nowait(pb.ExchangeResponse(step_output=output))
            elif kind == "ping":
                self.pings += 1
                outbox.put_nowait(pb.ExchangeResponse(pong=pb.Pong(nonce=message.ping.nonce)))

    def _submit(self, stream: int, sequences: Any, outbox: Any) -> None:
        handles = [sequence.handle for sequence in sequences]
        reason = pb.REJECTION_REASON_DRAINING if self.draining else self.reject
        if any(sequence.weights_id not in ("", self.weights) for sequence in sequences):
            reason = pb.REJECTION_REASON_OTHER_WEIGHTS
        if reason is not None:
            rejection = pb.Rejection(handles=handles, reason=reason, message="no", param="prompt")
            outbox.put_nowait(pb.ExchangeResponse(rejection=rejection))
            return
        for sequence in sequences:
            assert (stream, sequence.handle) not in self.live, "a handle in use was given again"
            self.live[stream, sequence.handle] = Live(
                sequence, base(self.weights) if self.first is None else self.first
            )
        outbox.put_nowait(pb.ExchangeResponse(accepted=pb.Accepted(handles=handles)))

    async def _steps(self, stream: int, outbox: Any) -> None:
        while True:
            await asyncio.sleep(self.step)
            if self.hand_off:
                outbox.put_nowait(pb.ExchangeResponse(step_output=self._give_up(stream)))
            mine = [live for key, live in self.live.items() if key[0] == stream][: self.slots]
            if not mine or self.hang:
                continue
            output = pb.StepOutput()
            for live in mine:
                if not live.started:
                    live.started = True
                    output.starts.add(handle=live.handle, cached_tokens=3)
                output.handles.append(live.handle)
                output.token_ids.append(live.first + live.sent)
                if live.request.HasField("top_logprobs"):
                    output.logprobs.add(handle=live.handle).logprobs.logprobs.append(-0.5)
                live.sent += 1
                if self.fault:
                    output.finishes.add(handle=live.handle, reason=common.FINISH_REASON_ERROR, error_message=self.fault)
                    del self.live[stream, live.handle]
                    continue
                if self.ends_all:
                    reason = common.FINISH_REASON_CANCELLED
                    output.finishes.add(handle=live.handle, reason=reason, error_message=self.ends_all)
                    del self.live[stream, live.handle]
                    continue
                if live.sent >= live.request.sampling.max_tokens:
                    output.finishes.add(handle=live.handle, reason=common.FINISH_REASON_LENGTH)
                    del self.live[stream, live.handle]
                    self.finished += 1
            outbox.put_nowait(pb.ExchangeResponse(step_output=output))
            if self.reset_after is not None and any(live.sent >= self.reset_after for live in mine):
                while not outbox.empty():
                    await asyncio.sleep(0)
                return

    def _give_up(self, stream: int) -> pb.StepOutput:
        """Everything of a stream ends as a drained group's does."""
        output = pb.StepOutput()
        for key in [key for key in self.live if key[0] == stream]:
            del self.live[key]
            output.finishes.add(handle=key[1], reason=common.FINISH_REASON_CANCELLED, retryable=True)
        return output

    async def _write(self, outbox: Any, context: grpc.aio.ServicerContext) -> None:
        while True:
            await context.write(await outbox.get())
