"""What `nori serve` can be told: flags and config file → ServeOptions → ClusterConfig.

Fields are the flags with underscores (vLLM's names); flags win over the file, the file over the defaults here.
"""

import difflib
import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import yaml

from nori_cluster import env
from nori_cluster.config import (
    DEVICES,
    CacheConfig,
    ClusterConfig,
    Dtype,
    GroupConfig,
    ModelConfig,
    ParallelConfig,
    Ports,
    RouterConfig,
    SchedulerConfig,
    numerics,
    speculative,
)
from nori_cluster.errors import ConfigError

SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)")
FACTORS = {"": 1, **{s: 1000**p for p, s in enumerate("kmgt", 1)}, **{s: 1024**p for p, s in enumerate("KMGT", 1)}}
SIZES = ("max_model_len", "max_num_batched_tokens", "max_num_queued_tokens", "kv_cache_memory_bytes")
POSITIVE = (*SIZES, "tensor_parallel_size", "replicas", "block_size", "max_num_seqs", "num_gpu_blocks_override")
LONGEST_DRAIN = 86400.0  # seconds
API_KEY = re.compile(r"[!-~]+")  # what a header carries unchanged


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every choice of `nori serve`, with its default. kv_cache_memory_bytes is per worker; time-outs in seconds."""

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 50051
    router_port: int = 50052
    data_plane_port: int = 50100
    admin_port: int = 8001
    metrics_port: int = 9090
    served_model_name: str | None = None
    tensor_parallel_size: int = 1
    replicas: int = 1
    dtype: Dtype = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    async_scheduling: bool | None = None
    max_num_queued_reqs: int = 4096
    max_num_queued_tokens: int | None = None
    priority_aging: float = 10.0
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    chat_template: str | None = None
    api_key: str | None = None
    drain_timeout: float = 30.0
    heartbeat_timeout: float = 5.0
    collective_timeout: float = 30.0
    max_logprobs: int = 20
    logprobs_mode: str = "raw"
    batch_invariant: bool = False
    attention_backend: str = "auto"
    speculative_config: dict[str, Any] | None = None


def json_object(text: str) -> dict[str, Any]:
    """The object a flag holds as JSON text."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{text[:80]!r} is not a JSON object: {error}") from error


def human_int(text: str) -> int:
    """4096, 4k = 4000, 4K = 4096, 1.5G: lower-case suffixes are decimal, upper-case binary (vLLM's rule)."""
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a size: write 4096, 4k (4000), 4K (4096), 2G …")
    return int(float(match[1]) * FACTORS[match[2]])


def read_file(path: Path) -> dict[str, Any]:
    """A YAML mapping of flag names (dashes or underscores, without the leading --) to values."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of flag names to values")
    options = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in ServeOptions.__struct_fields__:
            near = difflib.get_close_matches(name, ServeOptions.__struct_fields__, n=3)
            hint = (
                f"did you mean {', '.join(n.replace('_', '-') for n in near)}?" if near else "see `nori serve --help`"
            )
            raise ConfigError(f"{path}: unknown key {key!r}; {hint}")
        if isinstance(value, str) and name in SIZES:
            value = human_int(value)
        elif isinstance(value, str) and name == "speculative_config":
            value = json_object(value)
        options[name] = value
    return options


def resolve_options(flags: dict[str, Any], file: Path | None) -> ServeOptions:
    """Flags that were given (None = not given) over the file over the defaults."""
    given = {name: value for name, value in flags.items() if value is not None}
    merged = {**(read_file(file) if file else {}), **given}
    if "model" not in merged:
        raise ConfigError("name a model: `nori serve smollm2-135m`, a folder, a .gguf file or a Hugging Face repo id")
    try:
        return msgspec.convert(merged, ServeOptions)
    except msgspec.ValidationError as error:
        choices = f"; choose one of {', '.join(get_args(Dtype))}" if str(error).endswith("`$.dtype`") else ""
        raise ConfigError(f"{file or 'flags'}: {error}{choices}") from error


def ports(options: ServeOptions) -> Ports:
    chosen = Ports(
        http=options.port,
        grpc=options.grpc_port,
        router=options.router_port,
        dataplane=options.data_plane_port,
        admin=options.admin_port,
        metrics=options.metrics_port,
    )
    flags = ("port", "grpc_port", "router_port", "data_plane_port", "admin_port", "metrics_port")
    taken: dict[int, str] = {}
    for name in flags:
        port, flag = getattr(options, name), f"--{name.replace('_', '-')}"
        if not 0 <= port <= 65535:
            raise ConfigError(f"{flag} {port} is not a port (0 to 65535)")
        if port and port in taken:
            raise ConfigError(f"{taken[port]} and {flag} are both {port}")
        taken[port] = flag
    last = options.data_plane_port + options.replicas - 1
    if options.data_plane_port and last > 65535:
        raise ConfigError(
            f"--data-plane-port {options.data_plane_port}: {options.replicas} groups need ports to {last}"
        )
    for port, flag in taken.items():
        if options.data_plane_port and options.data_plane_port < port <= last:
            raise ConfigError(f"{flag} {port} is also the data plane's: {options.data_plane_port} to {last}")
    return chosen


def read_chat_template(value: str | None) -> str | None:
    """A file's text, or the template itself when the value holds template text (vLLM's rule)."""
    if value is None or any(mark in value for mark in ("{{", "{%", "\n")):
        return value
    try:
        return Path(value).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--chat-template {value}: cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error


def check_values(options: ServeOptions) -> None:
    """Raises ConfigError for what no machine could serve."""
    for name in POSITIVE:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
    for name in ("max_num_queued_reqs", "priority_aging", "max_logprobs"):
        value = getattr(options, name)
        if value is not None and value < 0:
            raise ConfigError(f"--{name.replace('_', '-')} must not be negative")
    if not 0 < options.gpu_memory_utilization <= 1:
        raise ConfigError("--gpu-memory-utilization must be above 0 and at most 1")
    if not 0 <= options.drain_timeout <= LONGEST_DRAIN:
        raise ConfigError(f"--drain-timeout must lie between 0 and {LONGEST_DRAIN:.0f} seconds")
    for name in ("heartbeat_timeout", "collective_timeout"):
        if not 1 <= getattr(options, name) <= LONGEST_DRAIN:
            raise ConfigError(f"--{name.replace('_', '-')} must lie between 1 and {LONGEST_DRAIN:.0f} seconds")
    if options.device not in DEVICES:
        raise ConfigError(f"--device {options.device!r} is unknown; choose one of {', '.join(DEVICES)}")
    if options.served_model_name == "":
        raise ConfigError("--served-model-name is empty")


def api_key(options: ServeOptions) -> str | None:
    """The flag's or the environment's. An empty flag (an unset shell variable) is refused: it would mean no key."""
    key = env.api_key() if options.api_key is None else options.api_key
    if key is not None and not API_KEY.fullmatch(key):
        raise ConfigError(
            "the API key must be printable ASCII without spaces, and not empty (--api-key, $NORI_API_KEY)"
        )
    return key


def cluster_config(options: ServeOptions, folder: Path) -> ClusterConfig:
    """The configuration of one machine that serves the checkpoint in `folder`."""
    check_values(options)
    group = GroupConfig(
        model=ModelConfig(
            name=options.served_model_name or options.model,
            path=str(folder),
            dtype=options.dtype,
            max_model_len=options.max_model_len,
        ),
        cache=CacheConfig(
            block_size=options.block_size,
            gpu_memory_utilization=options.gpu_memory_utilization,
            kv_cache_memory_bytes=options.kv_cache_memory_bytes,
            num_blocks=options.num_gpu_blocks_override,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            enable_prefix_caching=options.enable_prefix_caching,
            depth=None if options.async_scheduling is None else 2 if options.async_scheduling else 1,
        ),
        parallel=ParallelConfig(
            tensor_parallel_size=options.tensor_parallel_size,
            device=options.device,
            collective_timeout=options.collective_timeout,
            heartbeat_timeout=options.heartbeat_timeout,
        ),
        numerics=numerics(options.logprobs_mode, options.batch_invariant, options.attention_backend),
        speculative=speculative(options.speculative_config),
    )
    return ClusterConfig(
        group=group,
        replicas=options.replicas,
        router=RouterConfig(
            max_num_queued_reqs=options.max_num_queued_reqs,
            max_num_queued_tokens=options.max_num_queued_tokens,
            priority_aging=options.priority_aging,
        ),
        host=options.host,
        ports=ports(options),
        drain_timeout=options.drain_timeout,
        chat_template=read_chat_template(options.chat_template),
        api_key=api_key(options),
        max_logprobs=options.max_logprobs,
    )
