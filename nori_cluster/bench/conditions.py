"""What a figure was made under: asked of the server, measured in the run, or stated by the user, and who said it.

A Nori server answers over its admin plane; others say little and the user adds the rest (`--server-info key=value`,
which wins over what was asked). "" or None = unknown: report.validity makes that a reason not to print a headline.
"""

import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from nori_cluster.bench.environment import Device, Machine, cpu_device, is_loopback, software
from nori_cluster.bench.records import RequestRecord, Summary
from nori_cluster.errors import ConfigError, NoriError
from nori_cluster.rpc.admin import AdminClient
from nori_cluster.rpc.admin_types import GroupInfo
from nori_cluster.version import __version__

DEFAULT_PORTS = (8000, 50051)  # of `nori serve`: HTTP, gRPC; only with these is its default admin address tried
DEFAULT_ADMIN = "127.0.0.1:8001"
ASK_SECONDS = 5.0
COUNTED = re.compile(r"(\d+)\s*[x×]\s*(.+)")
NOT_STATED = frozenset({"told_by", "stream_interval"})


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """revision: of the weights. weights, kv_cache: precision. parallelism: e.g. "TP 2 × 4 groups".

    stream_interval: tokens per stream event, measured. cache_state: what prefix caches held. told_by: field → "asked",
    "measured", "stated", "this machine" or "in process".
    """

    server: str = ""
    model: str = ""
    revision: str = ""
    weights: str = ""
    kv_cache: str = ""
    parallelism: str = ""
    devices: tuple[Device, ...] = ()
    clocks: str = ""
    software: dict[str, str] = {}
    flags: str = ""
    cache_state: str = ""
    stream_interval: float | None = None
    numerics_id: str = ""
    told_by: dict[str, str] = {}

    @property
    def is_nori(self) -> bool:
        return self.server.startswith("Nori")

    def known(self, source: str, **facts: Any) -> "Conditions":
        """With these facts; empty ones change nothing."""
        given = {name: value for name, value in facts.items() if value}
        told = {**self.told_by, **dict.fromkeys(given, source)}
        return msgspec.structs.replace(self, **given, told_by=told)


def parse_stated(pairs: Sequence[str]) -> dict[str, str]:
    """--server-info key=value, several. Raises ConfigError for an unknown key."""
    fields = [name for name in Conditions.__struct_fields__ if name not in NOT_STATED]
    stated = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not value.strip():
            raise ConfigError(f"--server-info {pair!r} is not key=value")
        if key not in fields:
            raise ConfigError(f"--server-info {key!r} is unknown; known are {', '.join(fields)}")
        stated[key] = value.strip()
    return stated


def parse_devices(text: str) -> tuple[Device, ...]:
    """'8x NVIDIA H200' or several with commas."""
    devices = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = COUNTED.fullmatch(part)
        devices.append(Device(name=match[2], count=int(match[1])) if match else Device(name=part))
    return tuple(devices)


def with_stated(conditions: Conditions, stated: Mapping[str, str]) -> Conditions:
    """software as "name version, name version"."""
    facts: dict[str, Any] = dict(stated)
    if "devices" in facts:
        facts["devices"] = parse_devices(facts["devices"])
    if "software" in facts:
        pairs = (part.strip().rpartition(" ") for part in facts["software"].split(","))
        facts["software"] = {name or version: version for name, _, version in pairs}
    return conditions.known("stated", **facts)


def discover(url: str, model: str, *, grpc: bool, api_key: str | None, admin: str | None, host: Machine) -> Conditions:
    """Ask the server at `url`. admin: address of a Nori cluster's admin plane. host: this machine.

    Raises ConfigError when `admin` was given and nothing, or another model, is there. Otherwise never raises.
    """
    conditions = Conditions().known("asked", model=model)
    if is_loopback(url) and not host.gpus:  # whatever the server is, it computes on this processor
        conditions = conditions.known("this machine", devices=(cpu_device(host),), clocks=host.clocks)
    if not grpc:
        conditions = _ask_http(conditions, url, model, api_key)
    port = httpx.URL(url if "://" in url else f"http://{url}").port
    if admin is None and is_loopback(url) and port in DEFAULT_PORTS and (grpc or conditions.is_nori):
        try:
            return ask_admin(conditions, DEFAULT_ADMIN, model, host)
        except ConfigError:
            return conditions
    return conditions if admin is None else ask_admin(conditions, admin, model, host)


def _ask_http(conditions: Conditions, url: str, model: str, api_key: str | None) -> Conditions:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=ASK_SECONDS, trust_env=False) as http:
        listed = _get(http, "/v1/models").get("data") or [{}]
        entry = next((e for e in listed if isinstance(e, dict) and e.get("id") == model), {})
        owner = str(entry.get("owned_by", ""))
        version = str(_get(http, "/version").get("version", ""))
        if owner == "nori":
            return conditions.known("asked", server=f"Nori Cluster {version}")
        if owner == "llamacpp":
            props = _get(http, "/props")
            build = str(props.get("build_info", ""))
            path = Path(str(props.get("model_path", ""))).name
            found = {"llama.cpp": build} if build else {}
            return conditions.known("asked", server=f"llama.cpp {build}".strip(), revision=path, software=found)
        found = {owner: version} if owner and version else {}
        return conditions.known("asked", server=f"{owner} {version}".strip(), software=found)


def _get(http: httpx.Client, path: str) -> dict[str, Any]:
    """The JSON object there, or an empty one."""
    try:
        reply = http.get(path)
        value = reply.json() if reply.status_code == 200 else {}
    except (httpx.HTTPError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def ask_admin(conditions: Conditions, address: str, model: str, host: Machine) -> Conditions:
    """What a Nori cluster says of itself. Raises ConfigError when it is not there or serves another model."""
    name, _, port = address.rpartition(":")
    try:
        socket.create_connection((name.strip("[]"), int(port)), ASK_SECONDS).close()
        with AdminClient(address, timeout=ASK_SECONDS) as client:
            status = client.get_status()
            groups = [group for group in client.list_groups() if group.model == model]
    except (OSError, ValueError, NoriError) as error:
        raise ConfigError(f"--admin {address}: no admin service answers there ({error})") from error
    if not groups:
        served = ", ".join(info.model for info in status.models) or "none"
        raise ConfigError(f"--admin {address}: that cluster serves {served}, not {model!r}")
    same_host = is_loopback(address)
    return conditions.known(
        "asked",
        server=f"Nori Cluster {status.version}",
        parallelism=parallelism(groups[0].tensor_parallel_size, len(groups)),
        devices=_devices(groups, host if same_host else None),
        clocks=_clocks(groups, host) if same_host else "",
        software=software() if same_host and status.version == __version__ else {"nori-cluster": status.version},
        numerics_id=", ".join(sorted({group.numerics_id for group in groups if group.numerics_id})),
        **_facts(groups),
    )


def parallelism(tensor: int, groups: int) -> str:
    return f"TP {tensor} × {groups} group{'s' if groups > 1 else ''}"


def _facts(groups: Sequence[GroupInfo]) -> dict[str, str]:
    """What all groups say alike of precision, revision and flags."""
    names = ("revision", "weights", "kv_cache", "flags")
    return {name: groups[0].facts.get(name, "") for name in names if len({g.facts.get(name) for g in groups}) == 1}


def _devices(groups: Sequence[GroupInfo], host: Machine | None) -> tuple[Device, ...]:
    """CPU workers share the one processor; GPU workers have one each."""
    kinds = [worker.device for group in groups for worker in group.workers]
    if host is None or not kinds:
        return ()
    if all(kind == "cpu" or (kind == "auto" and not host.gpus) for kind in kinds):
        return (cpu_device(host),)
    return (msgspec.structs.replace(host.gpus[0], count=len(kinds)),) if len(host.gpus) == 1 else ()


def _clocks(groups: Sequence[GroupInfo], host: Machine) -> str:
    return "; ".join(device.clocks for device in _devices(groups, host) if device.clocks)


def measured(conditions: Conditions, records: Sequence[RequestRecord], summary: Summary) -> Conditions:
    """With what the run itself shows: tokens per event, and what prefix caches answered."""
    events = sum(len(record.events) for record in records if record.failure is None)
    interval = summary.output_tokens / events if events else None
    cache = ""
    if summary.cached_tokens is not None and summary.input_tokens:
        share = summary.cached_tokens / summary.input_tokens
        cache = f"{share:.1%} of the prompt tokens came from prefix caches"
    cache = "" if conditions.cache_state else cache  # what the user states of it says more
    return conditions.known("measured", stream_interval=interval and round(interval, 3), cache_state=cache)
