"""Requests over Nori's public gRPC API (StreamGenerate), into the same Answers as over HTTP."""

import time
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict, ParseError

from nori_cluster.bench.stream import Answer, RequestFailed
from nori_cluster.bench.workload import Planned, Workload
from nori_cluster.errors import ConfigError
from nori_cluster.rpc.generated.nori.common.v1 import generation_pb2 as common
from nori_cluster.rpc.generated.nori.common.v1.sampling_pb2 import SamplingParams
from nori_cluster.rpc.generated.nori.inference.v1 import inference_service_pb2 as pb
from nori_cluster.rpc.generated.nori.inference.v1 import inference_service_pb2_grpc as pb_grpc
from nori_cluster.rpc.options import client_options


def parse_target(url: str) -> str:
    """host:port of grpc://host:port or host:port. Raises ConfigError."""
    target = url.removeprefix("grpc://").rstrip("/")
    host, _, port = target.rpartition(":")
    if not host or not port.isdigit() or "/" in target:
        raise ConfigError(f"--url {url!r} is no address of a gRPC server: write host:port")
    return target


def _metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def list_models(url: str, api_key: str | None, timeout: float) -> list[str]:
    """Ids of what is served. Raises grpc.RpcError."""
    with grpc.insecure_channel(parse_target(url)) as channel:
        stub = pb_grpc.InferenceServiceStub(channel)
        reply = stub.ListModels(pb.ListModelsRequest(), timeout=timeout, metadata=_metadata(api_key))
    return [model.name.removeprefix("models/") for model in reply.models]


class GrpcClient:
    """One channel of one client process. A client.Client."""

    def __init__(self, url: str, model: str, workload: Workload, api_key: str | None, with_ids: bool) -> None:
        """with_ids has no effect: token ids are asked for always, they say how many tokens an event holds."""
        self._workload = workload
        self._model = model
        self._metadata = _metadata(api_key)
        self._sampling = sampling_of(workload.spec.sampling)
        self._channel = grpc.aio.insecure_channel(parse_target(url), options=client_options())
        self._stub = pb_grpc.InferenceServiceStub(self._channel)

    def prepare(self, plan: Planned) -> pb.StreamGenerateRequest:
        sampling = SamplingParams(max_tokens=plan.output, ignore_eos=self._workload.spec.ignore_eos)
        sampling.MergeFrom(self._sampling)
        task = pb.GenerationTask(
            model=self._model,
            tokens=common.TokenSequence(ids=self._workload.prompt(plan).tolist()),
            sampling=sampling,
            output=pb.OutputOptions(token_ids=True),
        )
        return pb.StreamGenerateRequest(task=task)

    async def send(self, request: pb.StreamGenerateRequest, answer: Answer) -> None:
        answer.sent = time.monotonic()
        call = self._stub.StreamGenerate(request, metadata=self._metadata)
        try:
            async for event in call:
                _take(event, answer, time.monotonic())
        except grpc.aio.AioRpcError as error:
            raise _failure(error, answer) from None
        finally:
            call.cancel()  # of no effect when it has ended
        answer.check_end()

    async def close(self) -> None:
        await self._channel.close(None)


def _take(event: pb.StreamGenerateResponse, answer: Answer, now: float) -> None:
    kind = event.WhichOneof("event")
    if kind == "delta":
        answer.news(now, list(event.delta.token_ids))
    elif kind == "started":
        answer.prompt, answer.cached = event.started.prompt_tokens, event.started.cached_tokens
    elif kind == "finished":
        answer.finish = common.FinishReason.Name(event.finished.finish_reason).removeprefix("FINISH_REASON_").lower()
    elif kind == "completed":
        usage = event.completed.usage
        answer.prompt, answer.output, answer.cached = usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens
        answer.done = True


def _failure(error: grpc.aio.AioRpcError, answer: Answer) -> RequestFailed:
    code, reason = error.code().name, error.details() or "no reason given"
    if answer.times:
        return RequestFailed("broken_stream", f"{code} after {len(answer.times)} events: {reason}")
    unreachable = code == "UNAVAILABLE" and "connect" in reason.lower()
    return RequestFailed("connect" if unreachable else "status", f"{code}: {reason}")


def sampling_of(fields: dict[str, Any]) -> SamplingParams:
    """Fields of nori.common.v1.SamplingParams by name. Raises ConfigError for one it has not."""
    try:
        return ParseDict(fields, SamplingParams())
    except ParseError as error:
        raise ConfigError(f"--sampling: {error}") from error
