"""The OpenAPI document: request schemas out of the msgspec structs, every error status, the event-stream media type."""

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from nori_cluster.gateway.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ErrorBody,
    Message,
    TokenizeRequest,
)
from nori_cluster.version import __version__

BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/tokenize": TokenizeRequest,
    "/v1/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/detokenize": DetokenizeRequest,
}
SUMMARIES = {
    "/v1/completions": "Complete prompts",
    "/v1/chat/completions": "Complete a conversation",
    "/v1/models": "List models",
    "/v1/models/{id}": "Describe a model",
    "/health": "Is the process alive",
    "/livez": "Is the process alive",
    "/ready": "Can it serve now",
    "/readyz": "Can it serve now",
    "/version": "The server's version",
}
STATUSES = {
    400: "The request is at fault",
    401: "Bad or missing API key",
    404: "Unknown model or path",
    408: "The body did not come",
    413: "The body is too large",
    429: "Over the limit; see Retry-After",
    500: "A worker group failed",
    503: "Overloaded, draining or no ready group; see Retry-After",
    504: "Deadline exceeded",
}
_REF = "#/components/schemas/{name}"


def operation(path: str) -> dict[str, Any]:
    """Keyword arguments for add_api_route."""
    body = BODIES.get(path)
    statuses = STATUSES if body is not None else {401: STATUSES[401], 404: STATUSES[404], 503: STATUSES[503]}
    error = {"application/json": {"schema": {"$ref": _REF.format(name="ErrorBody")}}}
    responses: dict[int | str, dict[str, Any]] = {
        status: {"description": text, "content": error} for status, text in statuses.items()
    }
    ok: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if path.endswith("completions"):
        ok["text/event-stream"] = {"schema": {"type": "string"}}
    responses[200] = {"description": "OK", "content": ok}
    extra: dict[str, Any] = {}
    if body is not None:
        schema = {"$ref": _REF.format(name=body.__name__)}
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {
        "response_model": None,
        "responses": responses,
        "openapi_extra": extra,
        "summary": SUMMARIES.get(path, path.rpartition("/")[2].capitalize()),
    }


def install(app: FastAPI) -> None:
    """Make /openapi.json hold the schemas of the request and error bodies."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            built = get_openapi(title="Nori Cluster", version=__version__, routes=app.routes)
            types: list[type[msgspec.Struct]] = [*dict.fromkeys(BODIES.values()), Message, ErrorBody]
            _, components = msgspec.json.schema_components(types, ref_template=_REF)
            built.setdefault("components", {}).setdefault("schemas", {}).update(components)
            app.openapi_schema = built
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
