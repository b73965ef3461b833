"""What the runner needs of a client, and which one serves an endpoint; finding out what a server serves beforehand."""

from typing import Any, Protocol

import grpc
import httpx

from nori_cluster.bench.grpc_client import GrpcClient, list_models, parse_target
from nori_cluster.bench.http_client import HttpClient, parse_url
from nori_cluster.bench.stream import Answer, refusal_text
from nori_cluster.bench.workload import Planned, Workload
from nori_cluster.errors import NoriError

CONNECT_SECONDS = 10.0


class TargetError(NoriError):
    """The server under test is not there, refuses, or does not serve what was asked for."""


class Client(Protocol):
    """Sends requests from one process. prepare: what costs time and can be done before a request is due."""

    def prepare(self, plan: Planned) -> Any: ...

    async def send(self, request: Any, answer: Answer) -> None:
        """Fills the answer. Raises RequestFailed."""

    async def close(self) -> None: ...


def connect(url: str, model: str, workload: Workload, api_key: str | None, with_ids: bool) -> Client:
    """The client of the spec's endpoint; connections are made when they are needed. Raises ConfigError for the url."""
    kind = GrpcClient if workload.spec.endpoint == "grpc" else HttpClient
    return kind(url, model, workload, api_key, with_ids)


def discover(url: str, endpoint: str, model: str | None, api_key: str | None) -> str:
    """The model to ask for: `model` when the server lists it (or lists nothing), else the first one served.

    Raises TargetError when nothing answers there, the key is refused, or the model is not served.
    """
    served = _grpc_models(url, api_key) if endpoint == "grpc" else _http_models(url, api_key, model is None)
    if model is None:
        if not served:
            raise TargetError(f"{url} lists no model; name one with --model")
        return served[0]
    if served and model not in served:
        raise TargetError(f"{url} does not serve {model!r}; it serves {', '.join(served)}")
    return model


def _http_models(url: str, api_key: str | None, needed: bool) -> list[str]:
    parts = parse_url(url)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        reply = httpx.get(f"{parts.geturl()}/v1/models", headers=headers, timeout=CONNECT_SECONDS, trust_env=False)
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise TargetError(f"nothing answers at {url} ({error}); is the server up, and --url its address?") from error
    except httpx.HTTPError as error:
        raise TargetError(f"{url}/v1/models gave no answer: {error or type(error).__name__}") from error
    if reply.status_code in {401, 403}:
        raise TargetError(f"{url} refuses the key ({refusal_text(reply.status_code, reply.content)}); pass --api-key")
    try:
        reply.raise_for_status()
        return [str(entry["id"]) for entry in reply.json()["data"]]
    except (httpx.HTTPStatusError, ValueError, KeyError, TypeError) as error:
        if not needed:
            return []
        reason = refusal_text(reply.status_code, reply.content)
        raise TargetError(f"{url}/v1/models is no model list ({reason}); name one with --model") from error


def _grpc_models(url: str, api_key: str | None) -> list[str]:
    try:
        return list_models(url, api_key, CONNECT_SECONDS)
    except grpc.RpcError as error:
        code = getattr(error, "code", lambda: None)()
        reason = getattr(error, "details", lambda: "")() or error
        if code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
            raise TargetError(f"no gRPC server answers at {parse_target(url)} ({reason})") from error
        raise TargetError(f"{parse_target(url)}: {getattr(code, 'name', code)}: {reason}") from error
