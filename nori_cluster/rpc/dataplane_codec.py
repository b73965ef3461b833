"""Data-plane messages ↔ engine structs, on the server side. Checks what a gateway says; trusts nothing."""

import time
from collections.abc import Iterable
from itertools import accumulate

import msgspec
import numpy as np

from nori_cluster.engine.sequence import SequenceRequest
from nori_cluster.errors import ClientError, UnsupportedParameter
from nori_cluster.frontend.admission import Limits, check_sampling
from nori_cluster.rpc.convert_sampling import sampling_from_pb
from nori_cluster.rpc.generated.nori.common.v1 import generation_pb2
from nori_cluster.rpc.generated.nori.dataplane.v1 import worker_group_service_pb2 as pb
from nori_cluster.types import GroupSpec, RowSampling, SamplingParams, StepLogprobs, unpack

PROTOCOL_VERSION = 1
MAX_BAD_WORD_TOKENS = 1024


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
        weight_version=spec.weight_version,
        weights_id=spec.weights_id,
        numerics_id=spec.numerics_id,
        protocol_version=PROTOCOL_VERSION,
        dtype=spec.dtype,
    )


def sequence_request(
    message: pb.SequenceRequest, key: int, spec: GroupSpec, siblings: int | None = None
) -> SequenceRequest:
    """A validated request. ClientError names the field; nothing from a gateway can reach a worker unchecked."""
    _refuse_unserved(message)
    length = len(message.prompt_token_ids)
    if not length:
        raise ClientError("prompt_token_ids is empty", param="prompt_token_ids")
    ids = np.fromiter(message.prompt_token_ids, dtype=np.int64, count=length)
    if ids.max() >= spec.vocab_size:
        raise ClientError(f"token id {ids.max()} is out of the vocabulary of {spec.vocab_size}", param="prompt")
    if message.resumed_tokens >= length:
        raise ClientError("resumed_tokens must be fewer than the prompt", param="resumed_tokens")
    sampling = _sampling(message, spec)
    time_left = message.time_left.ToNanoseconds() / 1e9 if message.HasField("time_left") else None
    return SequenceRequest(
        key=key,
        prompt_token_ids=tuple(ids.tolist()),
        resumed_tokens=message.resumed_tokens,
        sampling=RowSampling.of(sampling, message.candidate, spec.eos_token_ids),
        max_tokens=spec.max_model_len if sampling.max_tokens is None else sampling.max_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        order_key=message.order_key,
        deadline=None if time_left is None else time.monotonic() + time_left,
        cache_salt=message.cache_salt,
        siblings=siblings,
    )


def _sampling(message: pb.SequenceRequest, spec: GroupSpec) -> SamplingParams:
    """The controls, checked by the rules of the gateway's admission with this group's vocabulary."""
    sampling = sampling_from_pb(message.sampling, "")
    if sampling.seed is None:
        raise ClientError("the gateway must draw a seed", param="seed")
    if sampling.allowed_token_ids is not None and len(message.sampling.allowed_token_ids) > spec.vocab_size:
        raise ClientError("allowed_token_ids holds more ids than the vocabulary", param="allowed_token_ids")
    for name in ("top_logprobs", "prompt_logprobs"):
        if getattr(message, name) > spec.vocab_size:
            raise ClientError(f"{name} exceeds the vocabulary of {spec.vocab_size}", param=name)
    if any(len(word.ids) > MAX_BAD_WORD_TOKENS for word in message.bad_words):
        raise ClientError(f"a bad word may have at most {MAX_BAD_WORD_TOKENS} tokens", param="bad_words")
    sampling = msgspec.structs.replace(
        sampling,
        logprobs=message.top_logprobs if message.HasField("top_logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        bad_word_ids=tuple(tuple(word.ids) for word in message.bad_words),
    )
    check_sampling(sampling, spec.vocab_size, Limits(max_logprobs=spec.vocab_size), spec.eos_token_ids)
    return sampling


def _refuse_unserved(message: pb.SequenceRequest) -> None:
    """Fields that a newer gateway may set and that change the meaning."""
    sampling = message.sampling
    unserved = [name for name in ("stop_strings", "bad_words") if getattr(sampling, name)]
    unserved += [name for name in ("candidate_count", "reasoning_token_budget", "extra") if sampling.HasField(name)]
    unserved += ["adapter"] if message.adapter else []
    unserved += ["kv_source"] if message.HasField("kv_source") else []
    if message.task not in (pb.TASK_UNSPECIFIED, pb.TASK_GENERATE):
        unserved.append("task")
    if unserved:
        raise UnsupportedParameter(f"this group does not serve {', '.join(unserved)}", param=unserved[0])


class LogprobLists:
    """A StepLogprobs as Python lists: of each entry its logprob, and where its top tokens begin and end."""

    def __init__(self, packed: StepLogprobs) -> None:
        counts = unpack(packed.top_counts).tolist()
        self.chosen: list[float] = np.frombuffer(packed.chosen, dtype="<f4").tolist()
        self.ends = list(accumulate(counts))
        self.starts = [end - count for end, count in zip(self.ends, counts, strict=True)]
        self.ids: list[int] = unpack(packed.top_ids).tolist()
        self.values: list[float] = np.frombuffer(packed.top_values, dtype="<f4").tolist()


def add_logprobs(message: generation_pb2.TokenLogprobs, lists: LogprobLists, entries: Iterable[int]) -> None:
    """Append entries, one per token."""
    for entry in entries:
        message.logprobs.append(lists.chosen[entry])
        top = slice(lists.starts[entry], lists.ends[entry])
        message.top.add(token_ids=lists.ids[top], logprobs=lists.values[top])


class LogprobRows:
    """A step's logprobs, read by plan row; a row may have several entries, one per token in order."""

    def __init__(self, packed: StepLogprobs) -> None:
        self._lists = LogprobLists(packed)
        self._entries: dict[int, list[int]] = {}
        for entry, row in enumerate(unpack(packed.rows).tolist()):
            self._entries.setdefault(row, []).append(entry)

    def add_to(self, output: pb.StepOutput, rows: list[int], handles: list[int], counts: list[int]) -> None:
        """Append a SequenceLogprobs of its first counts[i] entries for each row that asked for logprobs."""
        for row, handle, count in zip(rows, handles, counts, strict=True):
            entries = self._entries.get(row, ())[:count]
            if entries:
                add_logprobs(output.logprobs.add(handle=handle).logprobs, self._lists, entries)
