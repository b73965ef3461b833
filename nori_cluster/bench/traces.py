"""Recorded arrivals from files: Azure 2023 CSV, Mooncake JSONL, BurstGPT CSV → TraceRow, for workload.

Formats: github.com/Azure/AzurePublicDataset (TIMESTAMP, ContextTokens, GeneratedTokens), github.com/kvcache-ai/Mooncake
(timestamp in ms, input_length, output_length, hash_ids of 512-token prompt blocks: equal id = equal beginning),
github.com/HPMLL/BurstGPT (Timestamp in s, Model, Request tokens, Response tokens, Total tokens, Log Type).
Every complaint names file, line and field.
"""

import csv
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from nori_cluster.errors import ConfigError

BLOCK_TOKENS = 512  # prompt tokens that one Mooncake hash id stands for
MAX_TOKENS = 1 << 24  # more in one request is a broken line, not a workload
COLUMNS = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
}


class TraceError(ConfigError):
    """A trace that cannot be replayed: which file, line and field, and what is wrong."""


class TraceRow(msgspec.Struct, frozen=True):
    """One recorded request. at: seconds after the first. blocks: ids of its prompt's blocks of 512; () = not known."""

    at: float
    input: int
    output: int
    blocks: tuple[int, ...] = ()


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, trace_format: str | None) -> list[TraceRow]:
    """The rows in order of time, the first at 0. trace_format None: told by the first line. Raises TraceError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    lines = text.splitlines()
    trace_format = trace_format or detect(path, lines)
    reader = _mooncake if trace_format == "mooncake" else _azure if trace_format == "azure" else _burstgpt
    rows = list(reader(path, lines))
    if not rows:
        raise TraceError(f"{path}: no requests in it")
    if any(later.at < earlier.at for earlier, later in pairwise(rows)):
        rows.sort(key=lambda row: row.at)
    start = rows[0].at
    return [TraceRow(row.at - start, row.input, row.output, row.blocks) for row in rows]


def detect(path: Path, lines: list[str]) -> str:
    """Which format the first line is in. Raises TraceError."""
    first = lines[0].strip() if lines else ""
    if first.startswith("{"):
        return "mooncake"
    header = {name.strip() for name in first.split(",")}
    for name, columns in COLUMNS.items():
        if header >= set(columns):
            return name
    known = "; ".join(f"{name}: {', '.join(columns)}" for name, columns in COLUMNS.items())
    raise TraceError(f"{path}:1: neither a JSON object (mooncake) nor a known CSV header ({known})")


def _azure(path: Path, lines: list[str]) -> Iterator[TraceRow]:
    for where, row in _csv(path, lines, COLUMNS["azure"]):
        at = _field(where, row, "TIMESTAMP", _clock)
        yield TraceRow(at, _tokens(where, row, "ContextTokens"), _tokens(where, row, "GeneratedTokens"))


def _burstgpt(path: Path, lines: list[str]) -> Iterator[TraceRow]:
    """Requests that failed when they were recorded (no response tokens) are left out."""
    for where, row in _csv(path, lines, COLUMNS["burstgpt"]):
        at = _field(where, row, "Timestamp", _seconds)
        if (row["Response tokens"] or "").strip() not in {"0", "0.0"}:
            yield TraceRow(at, _tokens(where, row, "Request tokens"), _tokens(where, row, "Response tokens"))


def _mooncake(path: Path, lines: list[str]) -> Iterator[TraceRow]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            entry = decoder.decode(line)
        except msgspec.ValidationError as error:
            reason, _, field = str(error).partition(" - at `$.")
            raise TraceError(f"{where}: {field.rstrip('`') + ': ' if field else ''}{reason}") from error
        except msgspec.DecodeError as error:
            raise TraceError(f"{where}: not a JSON object: {error}") from error
        for name in ("input_length", "output_length"):
            if not 1 <= getattr(entry, name) <= MAX_TOKENS:
                raise TraceError(f"{where}: {name}: {getattr(entry, name)} is not a number of tokens")
        if not 0 <= entry.timestamp < float("inf"):
            raise TraceError(f"{where}: timestamp: {entry.timestamp} is not a time in ms")
        wanted = -(-entry.input_length // BLOCK_TOKENS)
        if entry.hash_ids and len(entry.hash_ids) != wanted:
            raise TraceError(
                f"{where}: hash_ids: {len(entry.hash_ids)} ids, but {entry.input_length} tokens are {wanted} blocks "
                f"of {BLOCK_TOKENS}"
            )
        if any(block < 0 for block in entry.hash_ids):
            raise TraceError(f"{where}: hash_ids: an id is negative")
        yield TraceRow(entry.timestamp / 1000, entry.input_length, entry.output_length, entry.hash_ids)


def _csv(path: Path, lines: list[str], columns: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str | None]]]:
    """(file:line, row) of each line that is not empty. Raises TraceError when the header lacks a column."""
    header = [name.strip() for name in next(csv.reader(lines[:1]), [])]
    if missing := [name for name in columns if name not in header]:
        raise TraceError(f"{path}:1: the header has no column {', '.join(missing)}")
    reader = csv.DictReader(lines[1:], fieldnames=header)
    try:
        for row in reader:
            yield f"{path}:{reader.line_num + 1}", row
    except csv.Error as error:
        raise TraceError(f"{path}:{reader.line_num + 1}: not CSV: {error}") from error


def _field(where: str, row: dict[str, str | None], name: str, read: Callable[[str], Any]) -> Any:
    value = row[name]
    if value is None or not value.strip():
        raise TraceError(f"{where}: {name}: nothing there")
    try:
        return read(value.strip())
    except (ValueError, OverflowError) as error:
        raise TraceError(f"{where}: {name}: {error}") from error


def _tokens(where: str, row: dict[str, str | None], name: str) -> int:
    return int(_field(where, row, name, _count))


def _count(text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (1 <= value <= MAX_TOKENS and value == int(value)):
        raise ValueError(f"{text!r} is not a number of tokens (1 or more)")
    return int(value)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(f"{text!r} is not a time in seconds")
    return value


def _clock(text: str) -> float:
    """2023-11-16 18:17:03.9799600 → seconds; seven digits after the point are more than datetime reads."""
    whole, _, fraction = text.partition(".")
    try:
        moment = datetime.fromisoformat(whole)
        return (moment.replace(tzinfo=None) - datetime(1970, 1, 1)).total_seconds() + float(f"0.{fraction or 0}")
    except ValueError:
        raise ValueError(f"{text!r} is not a time like 2023-11-16 18:17:03.9799600") from None
