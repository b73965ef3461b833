"""Sampling controls over the data plane: what a gateway sends is what the engine gets, and nothing wrong gets in."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from engine.walk import make_spec

from nori_cluster.engine.plan import FinishNews, StartNews, StepDeltas
from nori_cluster.errors import ClientError, UnsupportedParameter
from nori_cluster.rpc import convert
from nori_cluster.rpc.convert_sampling import constraint_from_pb, constraint_to_pb
from nori_cluster.rpc.dataplane_client import DataPlaneClient, Entry
from nori_cluster.rpc.dataplane_codec import sequence_request
from nori_cluster.rpc.dataplane_server import Session
from nori_cluster.rpc.generated.nori.common.v1 import sampling_pb2
from nori_cluster.rpc.generated.nori.dataplane.v1 import worker_group_service_pb2 as pb
from nori_cluster.types import (
    Constraint,
    FinishReason,
    Request,
    RowSampling,
    SamplingParams,
    StepLogprobs,
    TokenLogprob,
    pack,
)

pytestmark = pytest.mark.unit
SPEC = msgspec.structs.replace(make_spec(num_blocks=40, max_model_len=200), vocab_size=61, eos_token_ids=(2, 0))

EVERYTHING = SamplingParams(
    n=2,
    temperature=0.5,
    top_p=0.5,
    top_k=5,
    max_tokens=9,
    stop_token_ids=(7,),
    logit_bias={60: -2.5},
    logprobs=3,
    min_p=0.25,
    repetition_penalty=1.5,
    presence_penalty=-0.5,
    frequency_penalty=2.0,
    min_tokens=4,
    allowed_token_ids=(9, 8, 60),
    bad_words=("x",),
    bad_word_ids=((5,), (6, 7)),
    prompt_logprobs=0,
    constraint=Constraint("regex", "a+"),
)


def sent(sampling: SamplingParams, prompt: tuple[int, ...] = (1, 2, 3)) -> list[pb.SequenceRequest]:
    request = Request(id="r", model="m", prompt_token_ids=prompt, sampling=sampling, seed=(1 << 64) - 5)
    messages = convert.sequences_to_pb(request, max_tokens=sampling.max_tokens or 9, order_key=0, time_left=None)
    return [pb.SequenceRequest.FromString(message.SerializeToString()) for message in messages]


@pytest.mark.parametrize("sampling", [EVERYTHING, SamplingParams(n=2, max_tokens=9)])
def test_the_engine_gets_what_was_asked_for(sampling: SamplingParams) -> None:
    seeded = msgspec.structs.replace(sampling, seed=(1 << 64) - 5)
    for candidate, message in enumerate(sent(sampling)):
        got = sequence_request(message, 77, SPEC)
        assert got.sampling == RowSampling.of(seeded, candidate, SPEC.eos_token_ids)
        assert (got.max_tokens, got.stop_token_ids) == (9, sampling.stop_token_ids)
    plain = sequence_request(sent(SamplingParams())[0], 77, SPEC)
    assert plain.sampling.controls is None


def test_f09_min_tokens_masks_every_eos_and_stop_id() -> None:
    message = sent(SamplingParams(max_tokens=8, min_tokens=4, stop_token_ids=(5,)))[0]
    controls = sequence_request(message, 1, SPEC).sampling.controls
    assert controls is not None
    assert (controls.min_tokens, sorted(controls.late_ids)) == (4, [0, 2, 5])


def test_only_candidate_0_asks_for_prompt_logprobs() -> None:
    first, second = sent(SamplingParams(n=2, prompt_logprobs=2))
    assert first.prompt_logprobs == 2
    assert not second.HasField("prompt_logprobs")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": math.nan}, "min_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"repetition_penalty": math.nan}, "repetition_penalty"),
        ({"presence_penalty": math.nan}, "presence_penalty"),
        ({"frequency_penalty": math.inf}, "frequency_penalty"),
        ({"stop_token_ids": [61]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"logit_bias": {61: 1}}, "logit_bias"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
        ({"logit_bias": {1: -101}}, "logit_bias"),
        ({"allowed_token_ids": [61]}, "allowed_token_ids"),
        ({"allowed_token_ids": [1] * 62}, "allowed_token_ids"),
        ({"allowed_token_ids": [2, 0], "min_tokens": 1}, "allowed_token_ids"),
        ({"min_tokens": 10}, "min_tokens"),
        ({"stop_strings": ["x"]}, "stop_strings"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"candidate_count": 1}, "candidate_count"),
        ({"extra": {"x": 1}}, "extra"),
        ({"reasoning_token_budget": 1}, "reasoning_token_budget"),
        ({"constraint": {}}, "constraint"),
        ({"constraint": {"regex": "a", "after_reasoning": True}}, "constraint"),
        ({"constraint": {"regex": "a" * ((1 << 18) + 1)}}, "constraint"),
    ],
)
def test_nothing_wrong_reaches_a_worker(fields: dict[str, Any], param: str) -> None:
    message = pb.SequenceRequest(prompt_token_ids=[1, 2])
    message.sampling.CopyFrom(sampling_pb2.SamplingParams(**{"seed": 1, "max_tokens": 9, **fields}))
    with pytest.raises(ClientError) as caught:
        sequence_request(message, 1, SPEC)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 62}, "prompt_logprobs"),
        ({"top_logprobs": 1 << 31}, "top_logprobs"),
        ({"bad_words": [{"ids": []}]}, "bad_words"),
        ({"bad_words": [{"ids": [1, 61]}]}, "bad_words"),
        ({"bad_words": [{"ids": [1]}] * 4097}, "bad_words"),
        ({"bad_words": [{"ids": [1] * 1025}]}, "bad_words"),
        ({"sampling": {"max_tokens": 9}}, "seed"),
        ({"adapter": "x"}, "adapter"),
        ({"kv_source": {}}, "kv_source"),
        ({"task": pb.TASK_EMBED}, "task"),
    ],
)
def test_wrong_messages_are_refused(fields: dict[str, Any], param: str) -> None:
    message = pb.SequenceRequest(**{"prompt_token_ids": [1, 2], "sampling": {"seed": 1, "max_tokens": 9}, **fields})
    with pytest.raises(ClientError) as caught:
        sequence_request(message, 1, SPEC)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("json_schema", '{"type":"object"}'),
        Constraint("json_object"),
        Constraint("regex", "[a-z]+"),
        Constraint("grammar", 'start: "x"'),
        Constraint("choice", '["a","b \\" c"]'),
        Constraint("structural_tag", "{}"),
    ],
)
def test_constraints_keep_their_text(constraint: Constraint) -> None:
    message = constraint_to_pb(constraint)
    assert constraint_from_pb(type(message).FromString(message.SerializeToString()), "constraint") == constraint


def test_a_constraint_after_reasoning_is_not_served_yet() -> None:
    with pytest.raises(UnsupportedParameter):
        constraint_from_pb(sampling_pb2.Constraint(json_object=True, after_reasoning=True), "constraint")
    assert constraint_from_pb(sampling_pb2.Constraint(json_object=False), "constraint") is None


def packed(rows: list[int], ids: list[int], top: int = 1) -> StepLogprobs:
    """Of token id i: logprob -i, and `top` likeliest tokens i, i + 1 …"""
    tops = [token + k for token in ids for k in range(top)]
    chosen, values = np.array([-token for token in ids], "<f4"), np.array([-token for token in tops], "<f4")
    return StepLogprobs(pack(rows), chosen.tobytes(), pack([top] * len(ids)), pack(tops), values.tobytes())


def step(number: int, counts: list[int], ids: list[int], **more: Any) -> StepDeltas:
    """News of the keys of session 1 (even rows) and of another one (odd rows)."""
    keys = np.array([(1 if row % 2 == 0 else 2) << 32 | 10 + row for row in range(len(counts))])
    rows = np.arange(len(counts), dtype=np.int32)
    return StepDeltas(number, keys, np.array(counts, np.int32), np.array(ids, np.int32), rows, **more)


class Heard:
    """A Receiver that keeps tokens and logprobs."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.starts: list[Any] = []
        self.finishes: list[Any] = []

    def accepted(self) -> None: ...
    def started(self, start: Any) -> None:
        self.starts.append(start)

    def tokens(self, ids: Any, logprobs: Any) -> None:
        assert logprobs is None or len(logprobs) == len(ids)
        self.ids += ids
        self.logprobs += logprobs or []

    def finished(self, finish: Any) -> None:
        self.finishes.append(convert.finish_from_pb(finish))

    def rejected(self, rejection: Any) -> None:
        raise AssertionError(rejection)

    def lost(self, reason: str) -> None:
        raise AssertionError(reason)


async def test_several_tokens_per_step_with_logprobs_over_merged_steps() -> None:
    """Speculation: rows keep 1 to 3 tokens; the logprobs of what came after a stop are not sent."""
    session = Session(1, 0)
    whole = packed([0, 0, 0, 1, 2, 2, 2], [5, 6, 7, 20, 8, 9, 10])
    first = step(1, [3, 1, 2], [5, 6, 7, 20, 8, 9], logprobs=whole)
    plain = step(2, [1, 1, 1], [30, 31, 32], logprobs=packed([0], [30]))
    finish = FinishNews(1 << 32 | 12, FinishReason.STOP, 9, accepted_drafts=3, proposed_drafts=5)
    start = StartNews(1 << 32 | 10, 4, 0.5, packed([0, 1], [3, 4], top=2))
    session.deliver(first, np.array([0, 2]), [start], [])
    session.deliver(plain, np.array([0]), [], [finish])
    output = session.take_step_output()
    assert output is not None
    assert (list(output.handles), list(output.token_counts)) == ([10, 12, 10], [3, 2, 1])
    client = DataPlaneClient("g", "", "t", 1, lambda link: None)
    heard = {handle: Heard() for handle in (10, 12)}
    for handle, receiver in heard.items():
        client._entries[handle] = Entry(handle, receiver, receiver.tokens)
    client._step_output(pb.StepOutput.FromString(output.SerializeToString()))
    assert (heard[10].ids, heard[12].ids) == ([5, 6, 7, 30], [8, 9])
    assert [entry.logprob for entry in heard[10].logprobs] == [-5, -6, -7, -30]
    assert heard[12].logprobs == [TokenLogprob(-8, (8,), (-8,)), TokenLogprob(-9, (9,), (-9,))]
    (begun,) = heard[10].starts
    assert begun.prompt_logprobs == [TokenLogprob(-3, (3, 4), (-3, -4)), TokenLogprob(-4, (4, 5), (-4, -5))]
    (ended,) = heard[12].finishes
    assert (ended.matched_token_id, ended.accepted_drafts, ended.proposed_drafts) == (9, 3, 5)
