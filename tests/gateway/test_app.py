"""Around the endpoints: models, health, errors, ids, keys, drain, metrics, the OpenAPI document."""

import asyncio
from collections.abc import AsyncIterator
from itertools import cycle
from time import monotonic

import httpx
import pytest
from fakes.backend import Script
from fakes.gateway import CHAT, COMPLETIONS, USER, FakeGateway, error_of, events
from fakes.text import HELLO

from nori_cluster.errors import Draining, Overloaded, RateLimited
from nori_cluster.frontend.gate import GateLimits
from nori_cluster.gateway.app import metrics_app

pytestmark = pytest.mark.unit


async def test_models() -> None:
    gateway = FakeGateway()
    body = (await gateway.get("/v1/models")).json()
    (model,) = body["data"]
    assert body["object"] == "list"
    assert (model["id"], model["object"], model["max_model_len"]) == ("smol", "model", 256)
    assert (await gateway.get("/v1/models/smol")).json() == model
    error = error_of(await gateway.get("/v1/models/org/other"), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


async def test_health_ready_version() -> None:
    gateway = FakeGateway()
    for path in ("/health", "/livez", "/ready", "/readyz", "/version"):
        assert (await gateway.get(path)).status_code == 200
    gateway.backend.info = None
    assert (await gateway.get("/health")).status_code == 200
    response = await gateway.get("/ready")
    error_of(response, 503)
    assert int(response.headers["retry-after"]) >= 1
    response = await gateway.chat()
    assert error_of(response, 503)["type"] == "overloaded_error"
    assert int(response.headers["retry-after"]) >= 1


async def test_unknown_paths_and_methods() -> None:
    gateway = FakeGateway()
    assert error_of(await gateway.get("/nope"), 404)["code"] == "not_found"
    response = await gateway.get(CHAT)
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"
    assert (await gateway.post("/health", {})).status_code == 405


async def test_request_id_is_echoed_or_made() -> None:
    gateway = FakeGateway()
    assert (await gateway.get("/health", headers={"x-request-id": "abc-1"})).headers["x-request-id"] == "abc-1"
    for bad in ("x" * 129, "a b", "ü".encode()):
        made = (await gateway.get("/nope", headers={"x-request-id": bad})).headers["x-request-id"]
        assert len(made) == 32
    response = await gateway.post(CHAT, {"messages": USER}, headers={"x-request-id": "mine"})
    assert response.headers["x-request-id"] == "mine"
    assert response.headers["openai-processing-ms"].isdigit()
    assert gateway.backend.requests[0].id.startswith("mine-")


@pytest.mark.parametrize("value", [None, "Bearer wrong", "Basic secret", "secret", "Bearer"])
async def test_api_key(value: str | None) -> None:
    gateway = FakeGateway(config={"api_key": "secret"})
    headers = {"authorization": value} if value else {}
    for path in ("/v1/models", "/tokenize", "/openapi.json", "/nope"):
        response = await gateway.get(path, headers=headers)
        error = error_of(response, 401)
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.headers["x-request-id"]
    assert (await gateway.get("/health", headers=headers)).status_code == 200
    assert (await gateway.get("/v1/models", headers={"authorization": "bearer secret"})).status_code == 200


async def test_bugs_are_answered_without_details() -> None:
    gateway = FakeGateway()

    async def broken(*args: object, **options: object) -> None:
        raise RuntimeError("secret detail")

    gateway.service.encode_all = broken  # type: ignore[method-assign,assignment]
    response = await gateway.complete()
    assert error_of(response, 500)["code"] == "internal_error"
    assert "secret" not in response.text


@pytest.mark.parametrize(
    ("refusal", "status"),
    [(RateLimited("slow down", retry_after=1.5), 429), (Overloaded("full", retry_after=0.2), 503)],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_have_their_own_status_also_for_streams(
    refusal: RateLimited | Overloaded, status: int, stream: bool
) -> None:
    gateway = FakeGateway(Script(refusal=refusal))
    response = await gateway.chat(stream=stream)
    error_of(response, status)
    assert response.headers["retry-after"] == ("2" if status == 429 else "1"), "never before the time"
    assert response.headers["retry-after-ms"] == str(int(1000 * (refusal.retry_after or 0)))


async def test_headers_wait_for_admission() -> None:
    gateway = FakeGateway(Script(tokens=[HELLO], accept_after=0.05, refusal=Overloaded("full", retry_after=1)))
    assert (await gateway.chat(stream=True, n=2)).status_code == 503


async def test_drain_lets_streams_finish_and_refuses_new_calls() -> None:
    gateway = FakeGateway(Script(tokens=cycle([HELLO]), step=0.01))
    running = asyncio.ensure_future(gateway.chat(stream=True, max_tokens=10))
    await asyncio.sleep(0.03)
    gateway.service.drain()
    error_of(await gateway.get("/ready"), 503)
    assert (await gateway.get("/health")).status_code == 200
    response = await gateway.chat()
    error_of(response, 503)
    assert response.headers["retry-after"]
    await asyncio.wait_for(gateway.service.idle(), 5)
    assert events(await running)[-1]["choices"][0]["finish_reason"] == "length"


async def test_end_of_a_drain_puts_an_error_into_streams() -> None:
    gateway = FakeGateway(Script(tokens=cycle([HELLO]), step=0.01))
    running = asyncio.ensure_future(gateway.chat(stream=True, max_tokens=100))
    whole = asyncio.ensure_future(gateway.chat(max_tokens=100))
    await asyncio.sleep(0.05)
    gateway.service.close_all(Draining("the server is shutting down", retry_after=1))
    assert events(await running)[-1]["error"]["code"] == "draining"
    error_of(await whole, 503)
    await gateway.quiet()


async def test_metrics() -> None:
    gateway = FakeGateway()
    await gateway.chat(max_tokens=4)
    events(await gateway.complete(max_tokens=2, stream=True, n=2))
    await gateway.get("/nope")
    app = metrics_app([gateway.service.metrics])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://m") as client:
        assert (await client.get("/")).status_code == 404
        text = (await client.get("/metrics")).text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    model = 'model_name="smol"'
    assert float(lines[f'nori_request_success_total{{finished_reason="stop",{model}}}']) == 1
    assert float(lines[f'nori_request_success_total{{finished_reason="length",{model}}}']) == 2
    assert float(lines[f"nori_generation_tokens_total{{{model}}}"]) == 8
    assert float(lines[f"nori_num_requests_running{{{model}}}"]) == 0
    assert float(lines[f"nori_time_to_first_token_seconds_count{{{model}}}"]) == 2
    assert float(lines[f"nori_inter_token_latency_seconds_count{{{model}}}"]) == 5
    assert float(lines[f'nori_e2e_request_latency_seconds_bucket{{le="+Inf",{model}}}']) == 2
    assert float(lines['nori_http_responses_total{code="200",route="/v1/chat/completions"}']) == 1
    assert float(lines['nori_http_responses_total{code="404",route="none"}']) == 1


async def test_openapi_names_errors_streams_and_extension_fields() -> None:
    document = (await FakeGateway().get("/openapi.json")).json()
    operation = document["paths"][CHAT]["post"]
    assert {"200", "400", "401", "404", "413", "429", "500", "503"} <= set(operation["responses"])
    assert "text/event-stream" in operation["responses"]["200"]["content"]
    assert "422" not in operation["responses"]
    schemas = document["components"]["schemas"]
    assert {"temperature", "top_k", "ignore_eos", "messages"} <= set(schemas["ChatRequest"]["properties"])
    assert schemas["ChatRequest"]["required"] == ["messages"]

    def references(value: object) -> set[str]:
        if isinstance(value, dict):
            own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
            return own.union(*(references(item) for item in value.values()))
        return set().union(*(references(item) for item in value)) if isinstance(value, list) else set()

    assert {reference.rpartition("/")[2] for reference in references(document)} <= set(schemas)


async def test_a_compressed_body_is_refused_by_name() -> None:
    response = await FakeGateway().post(COMPLETIONS, b"\x1f\x8b...", headers={"content-encoding": "gzip"})
    assert "Content-Encoding" in error_of(response)["message"]
    plain = {"prompt": "hi", "max_tokens": 1}
    assert (await FakeGateway().post(COMPLETIONS, plain, headers={"content-encoding": "identity"})).status_code == 200


async def test_a_flood_beyond_the_gateways_own_bound_is_refused_before_its_bodies_are_read() -> None:
    """Twenty times what it may hold: quick refusals, the rest whole, nothing held at the end."""
    gateway = FakeGateway(Script(tokens=cycle([HELLO]), step=0.005))
    gateway.service.gate.limits = GateLimits(calls=10, held_bytes=1 << 20)
    started = monotonic()

    async def one() -> tuple[int, float, str | None]:
        response = await gateway.complete(max_tokens=10)
        return response.status_code, monotonic() - started, response.headers.get("retry-after")

    answers = await asyncio.gather(*(one() for _ in range(200)))
    assert sum(status == 200 for status, _, _ in answers) >= 10
    refused = [(seconds, wait) for status, seconds, wait in answers if status == 503]
    assert len(refused) + sum(status == 200 for status, _, _ in answers) == 200
    assert len(refused) >= 150
    assert all(wait is not None and 1 <= int(wait) <= 60 for _, wait in refused)
    assert len(gateway.backend.requests) == 200 - len(refused)
    assert (gateway.service.gate.calls, gateway.service.gate.held_bytes) == (0, 0)
    assert gateway.service.metrics.refused == {"gateway_full": len(refused)}
    await gateway.quiet()


async def test_bodies_are_held_by_their_bytes() -> None:
    gateway = FakeGateway(Script(tokens=cycle([HELLO]), step=0.005))
    gateway.service.gate.limits = GateLimits(held_bytes=300)
    running = asyncio.ensure_future(gateway.complete(prompt="x" * 100, max_tokens=20))
    await asyncio.sleep(0.03)
    assert error_of(await gateway.complete(prompt="x" * 200), 503)["code"] == "gateway_full"
    assert (await gateway.complete(prompt="x", max_tokens=1)).status_code == 200
    assert (await running).status_code == 200
    assert (await gateway.complete(prompt="x" * 200, max_tokens=1)).status_code == 200, "alone, any size has room"


async def test_a_chunked_body_is_held_by_what_has_come_of_it() -> None:
    """It announces no length: no limit must be full of it, and a long one is refused in its middle."""
    gateway = FakeGateway(Script(tokens=cycle([HELLO]), step=0.005))
    gateway.service.gate.limits = GateLimits(held_bytes=300)
    come, more = asyncio.Event(), asyncio.Event()

    async def chunks() -> AsyncIterator[bytes]:
        yield b'{"max_tokens": 1, "prompt": "'
        come.set()
        await more.wait()
        yield b"x" * 200 + b'"}'

    async def send() -> httpx.Response:
        async with gateway.client as client:
            return await client.post(COMPLETIONS, content=chunks(), headers={"content-type": "application/json"})

    running = asyncio.ensure_future(send())
    await come.wait()
    while not gateway.service.gate.held_bytes:
        await asyncio.sleep(0.001)
    assert (gateway.service.gate.calls, gateway.service.gate.held_bytes) == (1, 29)
    assert (await gateway.complete(prompt="x", max_tokens=1)).status_code == 200
    other = asyncio.ensure_future(gateway.complete(prompt="x" * 60, max_tokens=40))
    while gateway.service.gate.calls < 2:
        await asyncio.sleep(0.001)
    more.set()
    assert error_of(await running, 503)["code"] == "gateway_full"
    assert (await other).status_code == 200
    assert (gateway.service.gate.calls, gateway.service.gate.held_bytes) == (0, 0)


async def test_refusals_are_counted_by_reason_and_probes_are_not() -> None:
    gateway = FakeGateway()
    gateway.backend.info = None
    assert error_of(await gateway.get("/ready"), 503)["code"] == "not_ready"
    assert error_of(await gateway.chat(), 503)["code"] == "no_ready_group"
    assert error_of(await gateway.chat(stream=True), 503)["code"] == "no_ready_group"
    gateway.service.drain()
    assert error_of(await gateway.chat(), 503)["code"] == "draining"
    text = (await httpx_metrics(gateway)).text
    assert 'nori_requests_refused_total{reason="no_ready_group"} 2.0' in text
    assert 'nori_requests_refused_total{reason="draining"} 1.0' in text
    assert "not_ready" not in text


async def httpx_metrics(gateway: FakeGateway) -> httpx.Response:
    transport = httpx.ASGITransport(metrics_app([gateway.service.metrics]))
    async with httpx.AsyncClient(transport=transport, base_url="http://metrics") as client:
        return await client.get("/metrics")
