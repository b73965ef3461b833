"""SamplingParams and Constraint ↔ protobuf, for the public plane and the data plane.

Shapes only: ranges are checked by frontend.admission on both sides, grammars by the gateway."""

from typing import Any, cast

import msgspec

from nori_cluster.errors import ClientError, UnsupportedParameter
from nori_cluster.grammar.limits import MAX_TEXT
from nori_cluster.rpc.generated.nori.common.v1 import sampling_pb2 as pb
from nori_cluster.types import Constraint, SamplingParams

_SIGN = 1 << 63
_WRAP = 1 << 64
# Sent only when they ask for something: a group of an older version refuses what it does not know.
_OPTIONAL = ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens")
_NEUTRAL = SamplingParams()


def signed(seed: int) -> int:
    """An unsigned 64-bit seed as the int64 of the wire."""
    return seed - _WRAP if seed >= _SIGN else seed


def sampling_to_pb(params: SamplingParams, seed: int, max_tokens: int) -> pb.SamplingParams:
    """What a group needs: no strings. seed is unsigned 64-bit."""
    out = pb.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=signed(seed),
        max_tokens=max_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids or (),
        constraint=None if params.constraint is None else constraint_to_pb(params.constraint),
    )
    for name in _OPTIONAL:
        if getattr(params, name) != getattr(_NEUTRAL, name):
            setattr(out, name, getattr(params, name))
    return out


def sampling_from_pb(value: pb.SamplingParams, where: str) -> SamplingParams:
    """Every field but those of output options, defaults resolved. where: how errors name the message.

    Raises ClientError naming a field of no meaning or one that is not served.
    """
    for name in ("reasoning_token_budget", "extra"):
        if value.HasField(cast("Any", name)):
            raise UnsupportedParameter(f"{where}{name} is planned, but not supported yet", param=f"{where}{name}")

    def given(name: str, default: Any) -> Any:
        return getattr(value, name) if value.HasField(cast("Any", name)) else default

    return SamplingParams(
        n=given("candidate_count", 1),
        temperature=given("temperature", 1.0),
        top_p=given("top_p", 1.0),
        top_k=given("top_k", 0),
        seed=given("seed", None),
        max_tokens=given("max_tokens", None),
        stop=tuple(value.stop_strings),
        stop_token_ids=tuple(value.stop_token_ids),
        ignore_eos=value.ignore_eos,
        include_stop_str_in_output=value.include_stop_string,
        logit_bias=dict(value.logit_bias),
        allowed_token_ids=tuple(dict.fromkeys(value.allowed_token_ids)) or None,
        bad_words=tuple(value.bad_words),
        constraint=constraint_from_pb(value.constraint, f"{where}constraint") if value.HasField("constraint") else None,
        **{name: given(name, getattr(_NEUTRAL, name)) for name in _OPTIONAL},
    )


def constraint_to_pb(value: Constraint) -> pb.Constraint:
    if value.kind == "json_object":
        return pb.Constraint(json_object=True)
    if value.kind == "choice":
        return pb.Constraint(choices=pb.Choices(values=msgspec.json.decode(value.text, type=list[str])))
    out = pb.Constraint()
    setattr(out, value.kind, value.text)
    return out


def constraint_from_pb(value: pb.Constraint, where: str) -> Constraint | None:
    """None when it holds nothing to enforce (json_object false). Raises ClientError."""
    if value.after_reasoning:
        raise UnsupportedParameter(f"{where}.after_reasoning is planned, but not supported yet", param=where)
    kind = value.WhichOneof("kind")
    if kind is None:
        raise ClientError(f"{where} holds no constraint", param=where)
    if kind == "json_object":
        return Constraint("json_object") if value.json_object else None
    if kind == "choices":
        text = msgspec.json.encode(list(value.choices.values)).decode()
        found = Constraint("choice", text)
    else:
        found = Constraint(kind, getattr(value, kind))
    if len(found.text) > MAX_TEXT:
        raise ClientError(f"{where} may have at most {MAX_TEXT} characters", param=where)
    return found
