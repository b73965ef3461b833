"""Tokens of a run in a file, and whether those of another run are the same.

JSON lines: a head {"nori_tokens": 1, model, sampling, ignore_eos}, then per request its number, the digest of its
prompt, and its output's token ids.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from nori_cluster.bench.records import LoadSpec, RequestRecord
from nori_cluster.bench.workload import Workload, prompt_digest
from nori_cluster.errors import ConfigError

VERSION = 1


class BadReference(ConfigError):
    """A file of reference tokens that cannot be compared with this load."""


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    nori_tokens: int
    model: str
    sampling: dict[str, Any]
    ignore_eos: bool


class ReferenceTokens(msgspec.Struct, frozen=True):
    number: int
    prompt: str
    output: int
    token_ids: tuple[int, ...]


def write_tokens(path: Path, model: str, workload: Workload, records: Iterable[RequestRecord]) -> int:
    """Save the tokens of the requests that ended well; how many they were. Raises ConfigError when it cannot."""
    spec = workload.spec
    lines: list[msgspec.Struct] = [
        _Head(nori_tokens=VERSION, model=model, sampling=spec.sampling, ignore_eos=spec.ignore_eos)
    ]
    for record in records:
        if record.failure is None and record.token_ids:
            prompt = prompt_digest(workload.prompt(workload.plan(record.number)))
            lines.append(ReferenceTokens(record.number, prompt, record.asked_output, record.token_ids))
    try:
        path.write_bytes(msgspec.json.Encoder().encode_lines(lines))
    except OSError as error:
        raise ConfigError(f"--save-tokens {path}: {error.strerror or error}") from error
    return len(lines) - 1


def read_reference(path: Path, workload: Workload) -> dict[int, ReferenceTokens]:
    """By request number. Raises BadReference when it is broken or was made with other prompts or sampling."""
    spec = workload.spec
    try:
        first, *rest = path.read_bytes().splitlines() or [b""]
    except OSError as error:
        raise BadReference(f"--reference {path}: {error.strerror or error}") from error
    head = _line(path, 1, first, _Head)
    if head.nori_tokens != VERSION:
        raise BadReference(f"--reference {path}: version {head.nori_tokens}, this program reads {VERSION}")
    check_same_sampling(path, head.sampling, head.ignore_eos, spec)
    found = {}
    for number, line in enumerate(rest, 2):
        tokens = _line(path, number, line, ReferenceTokens)
        if workload.total is None or 0 <= tokens.number < workload.total:
            plan = workload.plan(tokens.number)
            same = prompt_digest(workload.prompt(plan)) == tokens.prompt and plan.output == tokens.output
            if not same:
                raise BadReference(
                    f"--reference {path}:{number}: request {tokens.number} had another prompt or length; "
                    "run with the same --seed, --input, --output, --shared-prefix, --vocab-size and trace"
                )
            found[tokens.number] = tokens
    if not found:
        raise BadReference(f"--reference {path}: holds no request of this load")
    return found


def check_same_sampling(path: Path, sampling: dict[str, Any], ignore_eos: bool, spec: LoadSpec) -> None:
    if (sampling, ignore_eos) != (spec.sampling, spec.ignore_eos):
        raise BadReference(
            f"--reference {path}: made with sampling {sampling} and ignore_eos {ignore_eos}, "
            f"this load has {spec.sampling} and {spec.ignore_eos}"
        )


def _line(path: Path, number: int, line: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError as error:
        raise BadReference(f"--reference {path}:{number}: not written by --save-tokens ({error})") from error


def check_against(reference: dict[int, ReferenceTokens], records: list[RequestRecord]) -> list[RequestRecord]:
    """The records, those whose tokens differ failed as `mismatch`. Requests the reference lacks pass unchecked."""
    return [_checked(record, reference.get(record.number)) for record in records]


def _checked(record: RequestRecord, expected: ReferenceTokens | None) -> RequestRecord:
    if expected is None or record.failure is not None or record.token_ids == expected.token_ids:
        return record
    return msgspec.structs.replace(record, failure="mismatch", message=difference(record, expected.token_ids))


def difference(record: RequestRecord, expected: tuple[int, ...]) -> str:
    """Where two outputs part."""
    seen, where = record.token_ids, f"request {record.number}"
    if not seen:
        return f"{where}: the server returned no token ids (return_token_ids is not served?)"
    for place, (ours, theirs) in enumerate(zip(seen, expected, strict=False)):
        if ours != theirs:
            return f"{where}: token {place} is {ours}, in the reference {theirs}"
    return f"{where}: {len(seen)} tokens, in the reference {len(expected)}"
