"""The ASGI application: FastAPI routes inside the edge. `metrics_app` is the one behind the metrics port."""

from collections.abc import Callable, Iterable
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from nori_cluster.config import GatewayConfig
from nori_cluster.errors import ClientError, NoriError, NotFound
from nori_cluster.frontend.service import Service
from nori_cluster.gateway import openapi
from nori_cluster.gateway.edge import Edge, error_response
from nori_cluster.gateway.routes import Routes
from nori_cluster.version import __version__


class MethodNotAllowed(ClientError):
    http_status = 405
    code = "method_not_allowed"


def build_app(service: Service, config: GatewayConfig) -> ASGIApp:
    """Everything on the HTTP port."""
    app = FastAPI(title="Nori Cluster", version=__version__, redirect_slashes=False, docs_url=None, redoc_url=None)
    app.include_router(Routes(service, config).router())
    app.add_exception_handler(NoriError, _on_nori_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)
    openapi.install(app)
    return Edge(app, service, config)


def metrics_app(collectors: Iterable[Collector]) -> Callable[[Scope, Receive, Send], Any]:
    """GET /metrics in the Prometheus text format."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        found = scope["path"] == "/metrics"
        response = Response(
            generate_latest(registry) if found else b"see /metrics\n",
            status_code=200 if found else 404,
            headers={"content-type": CONTENT_TYPE_LATEST if found else "text/plain"},
        )
        await response(scope, receive, send)

    return app


async def _on_nori_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, NoriError)
    request.scope["nori.error"] = error
    return _response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405 (with Allow), in our envelope."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"][:200]
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        if allowed == "GET":
            return _response(MethodNotAllowed(f"{request.method} is not allowed on {path}"), {"Allow": "GET, HEAD"})
        return _response(MethodNotAllowed(f"{request.method} is not allowed on {path}"), error.headers)
    if error.status_code == 404:
        return _response(NotFound(f"there is no {path}"), error.headers)
    return _response(ClientError(str(error.detail)[:200]), error.headers)


async def _on_bug(request: Request, error: Exception) -> Response:
    """Answered without details; the edge logs the traceback."""
    return _response(NoriError("internal error"))


def _response(error: NoriError, more: Any = None) -> Response:
    status, headers, body = error_response(error)
    response = Response(body, status_code=status)
    response.raw_headers += headers
    for name, value in (more or {}).items():
        response.headers[name] = value
    return response
