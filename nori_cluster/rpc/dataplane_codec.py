"""Data-plane messages ↔ engine structs, on the server side. Checks what a gateway says; trusts nothing."""

import time
from itertools import accumulate

import numpy as np

from nori_cluster.engine.sequence import SequenceRequest
from nori_cluster.errors import ClientError, UnsupportedParameter
from nori_cluster.rpc.generated.nori.dataplane.v1 import worker_group_service_pb2 as pb
from nori_cluster.types import GroupSpec, RowControls, RowSampling, StepLogprobs, unpack

PROTOCOL_VERSION = 1


def describe(spec: GroupSpec, max_num_seqs: int) -> pb.GroupDescription:
    """What Welcome tells a gateway."""
    return pb.GroupDescription(
        model=spec.model,
        vocab_size=spec.vocab_size,
        max_context_tokens=spec.max_model_len,
        max_running_sequences=max_num_seqs,
        kv_block_tokens=spec.block_size,
        kv_blocks=spec.num_blocks,
        eos_token_ids=spec.eos_token_ids,
        role=pb.GROUP_ROLE_UNIFIED,
        numerics_id=spec.numerics_id,
        protocol_version=PROTOCOL_VERSION,
        dtype=spec.dtype,
    )


def sequence_request(
    message: pb.SequenceRequest, key: int, spec: GroupSpec, siblings: int | None = None
) -> SequenceRequest:
    """A validated request. ClientError names the field; nothing from a gateway can reach a worker unchecked."""
    _refuse_unserved(message)
    sampling, length = message.sampling, len(message.prompt_token_ids)
    if not length:
        raise ClientError("prompt_token_ids is empty", param="prompt_token_ids")
    ids = np.fromiter(message.prompt_token_ids, dtype=np.int64, count=length)
    if ids.max() >= spec.vocab_size:
        raise ClientError(f"token id {ids.max()} is out of the vocabulary of {spec.vocab_size}", param="prompt")
    if message.resumed_tokens >= length:
        raise ClientError("resumed_tokens must be fewer than the prompt", param="resumed_tokens")
    for name in ("stop_token_ids", "logit_bias"):
        if any(token >= spec.vocab_size for token in getattr(sampling, name)):
            raise ClientError(f"{name} holds an id out of the vocabulary of {spec.vocab_size}", param=name)
    if message.top_logprobs > spec.vocab_size:
        raise ClientError(
            f"top_logprobs {message.top_logprobs} exceeds the vocabulary of {spec.vocab_size}", param="top_logprobs"
        )
    time_left = message.time_left.ToNanoseconds() / 1e9 if message.HasField("time_left") else None
    return SequenceRequest(
        key=key,
        prompt_token_ids=tuple(ids.tolist()),
        resumed_tokens=message.resumed_tokens,
        sampling=_row_sampling(message),
        max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else spec.max_model_len,
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        order_key=message.order_key,
        deadline=None if time_left is None else time.monotonic() + time_left,
        cache_salt=message.cache_salt,
        siblings=siblings,
    )


def _row_sampling(message: pb.SequenceRequest) -> RowSampling:
    sampling = message.sampling
    temperature = sampling.temperature if sampling.HasField("temperature") else 1.0
    top_p = sampling.top_p if sampling.HasField("top_p") else 1.0
    if not (0.0 <= temperature < float("inf")):
        raise ClientError("temperature must be a finite number ≥ 0", param="temperature")
    if not (0.0 < top_p <= 1.0):
        raise ClientError("top_p must be in (0, 1]", param="top_p")
    if any(not abs(value) <= 100.0 for value in sampling.logit_bias.values()):
        raise ClientError("logit_bias values must be in [-100, 100]", param="logit_bias")
    if not sampling.HasField("seed"):
        raise ClientError("the gateway must draw a seed", param="seed")
    return RowSampling(
        temperature=temperature,
        top_p=top_p,
        top_k=max(sampling.top_k, 0),
        seed=sampling.seed % (1 << 64),
        candidate=message.candidate,
        logprobs=message.top_logprobs if message.HasField("top_logprobs") else -1,
        controls=RowControls(
            bias_ids=tuple(sampling.logit_bias.keys()), bias_values=tuple(sampling.logit_bias.values())
        )
        if sampling.logit_bias
        else None,
    )


def _refuse_unserved(message: pb.SequenceRequest) -> None:
    """Fields that a newer gateway may set and that change the meaning."""
    sampling = message.sampling
    unserved = [
        name
        for name in ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "constraint")
        if sampling.HasField(name)
    ]
    unserved += [name for name in ("stop_strings", "allowed_token_ids") if getattr(sampling, name)]
    unserved += [name for name in ("candidate_count", "reasoning_token_budget", "extra") if sampling.HasField(name)]
    unserved += [name for name in ("adapter", "bad_words") if getattr(message, name)]
    unserved += [name for name in ("prompt_logprobs", "kv_source") if message.HasField(name)]
    if message.task not in (pb.TASK_UNSPECIFIED, pb.TASK_GENERATE):
        unserved.append("task")
    if unserved:
        raise UnsupportedParameter(f"this group does not serve {', '.join(unserved)}", param=unserved[0])


class LogprobRows:
    """A step's logprobs, read by plan row."""

    def __init__(self, packed: StepLogprobs) -> None:
        self._entries = {row: entry for entry, row in enumerate(unpack(packed.rows).tolist())}
        self._chosen = np.frombuffer(packed.chosen, dtype="<f4").tolist()
        counts = unpack(packed.top_counts).tolist()
        self._ends = list(accumulate(counts))
        self._counts = counts
        self._ids = unpack(packed.top_ids).tolist()
        self._values = np.frombuffer(packed.top_values, dtype="<f4").tolist()

    def add_to(self, output: pb.StepOutput, rows: list[int], handles: list[int]) -> None:
        """Append a SequenceLogprobs for each row that asked for logprobs."""
        for row, handle in zip(rows, handles, strict=True):
            entry = self._entries.get(row)
            if entry is None:
                continue
            message = output.logprobs.add(handle=handle).logprobs
            message.logprobs.append(self._chosen[entry])
            end = self._ends[entry]
            start = end - self._counts[entry]
            message.top.add(token_ids=self._ids[start:end], logprobs=self._values[start:end])
