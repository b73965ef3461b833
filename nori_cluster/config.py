"""Configuration: one small frozen struct per component, resolved once by `launch` and handed down.

"auto" never leaves this module's `resolve_*` functions. Flag names are vLLM's; fields are the flags with underscores.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from nori_cluster.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
InFlightPolicy = Literal["wait", "continue", "abort"]  # what becomes of running sequences in a reload
DEVICES = ("auto", "cpu", "cuda")
# A CPU's GEMMs reach their full rate at 256 rows, and a larger step only makes everyone in it wait for its end.
STEP_TOKENS = {"cpu": 256, "cuda": 8192}


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What to serve. path: an ordinary checkpoint folder. name: the id clients use.

    weight_version: label of these weights; every reload brings another one.
    """

    name: str
    path: str
    weight_version: str = "1"
    dtype: Dtype = "auto"
    max_model_len: int | None = None  # None = the checkpoint's own


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Size of the paged KV cache. num_blocks overrides what free memory allows."""

    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None  # per worker; None = from free memory
    num_blocks: int | None = None


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one engine. The router is the one place to wait; max_waiting_requests only bounds what a router that
    was restarted, or gateways without one, may send too much."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None  # tokens of a step; None = by device, see STEP_TOKENS
    max_waiting_requests: int = 1024
    depth: int | None = None  # plans in flight; 2 overlaps planning with the step before; None = 2 on CUDA, 1 on CPU
    enable_prefix_caching: bool = True
    draft_tokens: int = 0  # most drafts a decoding row may carry beside its one token; from SpeculativeConfig

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_waiting_requests"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1", param=name)

    def resolve(self, device: str, draft_tokens: int = 0) -> "SchedulerConfig":
        """The same limits with what was left open chosen for the device."""
        budget = self.max_num_batched_tokens or STEP_TOKENS[device]
        depth = self.depth or (2 if device == "cuda" else 1)
        return msgspec.structs.replace(self, max_num_batched_tokens=budget, depth=depth, draft_tokens=draft_tokens)

    @property
    def step_tokens(self) -> int:
        """max_num_batched_tokens of a resolved config."""
        assert self.max_num_batched_tokens is not None, "SchedulerConfig.resolve was not called"
        return self.max_num_batched_tokens


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    tensor_parallel_size: int = 1
    device: str = "auto"
    collective_timeout: float = 30.0  # seconds; a step or collective that takes longer ends the group
    heartbeat_timeout: float = 5.0  # seconds; a process that gives no sign of life for so long ends its group
    threads: int | None = None  # torch CPU threads per worker; None = cores / workers on the host


class NumericsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """batch_invariant: a row's bits do not depend on its batch, chunking or cache hits; slower.

    logprobs_mode: of the model's logits, or of what is left after bias, penalties, temperature, masks and filters.
    attention_backend: a name of the registry, or auto: by a table per device (worker/numerics.py).
    """

    batch_invariant: bool = False
    attention_backend: str = "auto"
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How drafts are proposed. ngram: num_speculative_tokens of what followed, in the sequence itself, the last earlier
    occurrence of its newest prompt_lookup_max to prompt_lookup_min tokens."""

    method: Literal["ngram"]
    num_speculative_tokens: int = 4
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.num_speculative_tokens <= 16:
            raise ConfigError("num_speculative_tokens must be between 1 and 16", param="speculative_config")
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max <= 16:
            raise ConfigError(
                "prompt_lookup_min and prompt_lookup_max must satisfy 1 ≤ min ≤ max ≤ 16", param="speculative_config"
            )


class GroupConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one worker group needs."""

    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    numerics: NumericsConfig = NumericsConfig()
    speculative: SpeculativeConfig | None = None

    def resolved_scheduler(self, device: str) -> SchedulerConfig:
        """The scheduler's limits on this device."""
        return self.scheduler.resolve(device, self.speculative.num_speculative_tokens if self.speculative else 0)


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Placement. max_num_queued_*: what may wait for a group, requests and prompt tokens (None = any number).

    priority_aging: seconds of waiting that outweigh one level of priority.
    """

    policy: str = "least_loaded"
    max_num_queued_reqs: int = 4096
    max_num_queued_tokens: int | None = None
    priority_aging: float = 10.0


class Ports(msgspec.Struct, frozen=True, kw_only=True):
    """Fixed and configurable; 0 lets the system choose (tests). dataplane is the first of one per group."""

    http: int = 8000
    grpc: int = 50051
    router: int = 50052
    dataplane: int = 50100
    admin: int = 8001
    metrics: int = 9090


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One gateway process. router: host:port. models: name → checkpoint folder (tokenizer and template)."""

    gateway_id: str
    router: str
    models: dict[str, str]
    host: str = "127.0.0.1"
    ports: Ports = Ports()
    chat_template: str | None = None
    parse_special_tokens: bool = False  # completions: read <|…|> in plain prompts as control tokens
    drain_timeout: float = 30.0
    max_body_bytes: int = 16 << 20
    max_stop_strings: int = 16
    max_logprobs: int = 20
    max_prompts: int = 1024
    api_key: str | None = None
    exit_on_stdin_eof: bool = False  # a gateway started by `nori serve` never outlives it


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`nori serve`: one model, `replicas` groups of it, one gateway, on one machine.

    host: where the gateway listens. internal_host: where router, data plane and admin plane do; no flag moves them, for
    they carry no token yet.
    """

    group: GroupConfig
    replicas: int = 1
    router: RouterConfig = RouterConfig()
    host: str = "127.0.0.1"
    internal_host: str = "127.0.0.1"
    ports: Ports = Ports()
    drain_timeout: float = 30.0
    chat_template: str | None = None
    api_key: str | None = None
    max_logprobs: int = 20


def resolve_device(device: str, gpus: int, workers: int) -> str:
    """cpu or cuda. ConfigError when there are too few GPUs: Ray would wait for more of them for ever."""
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    if device == "cuda" and gpus < workers:
        raise ConfigError(f"{workers} workers need {workers} GPUs and this machine has {gpus}", param="device")
    return device


def numerics(logprobs_mode: str, batch_invariant: bool, attention_backend: str = "auto") -> NumericsConfig:
    """logprobs_mode: raw, processed, or vLLM's words for them. Raises ConfigError."""
    mode = logprobs_mode.removesuffix("_logprobs")
    if mode not in ("raw", "processed"):
        raise ConfigError(f"logprobs_mode {logprobs_mode!r} is unknown; choose raw or processed", param="logprobs_mode")
    return NumericsConfig(
        batch_invariant=batch_invariant,
        attention_backend=attention_backend,
        logprobs_mode="raw_logprobs" if mode == "raw" else "processed_logprobs",
    )


def speculative(given: Mapping[str, Any] | SpeculativeConfig | None) -> SpeculativeConfig | None:
    """What --speculative-config holds. Raises ConfigError naming the key at fault."""
    param = "speculative_config"
    if given is None or isinstance(given, SpeculativeConfig):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(f"{param} must be an object like {{'method': 'ngram'}}, not {given!r:.80}", param=param)
    if given.get("method") != "ngram":
        raise ConfigError(f"{param}: method {given.get('method')!r:.80} is not served; choose 'ngram'", param=param)
    known = SpeculativeConfig.__struct_fields__
    if unknown := [str(key) for key in given if key not in known]:
        raise ConfigError(f"{param}: unknown key {unknown[0]!r:.80}; known are {', '.join(known)}", param=param)
    try:
        return msgspec.convert(given, SpeculativeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{param}: {error}", param=param) from error


def encode(config: msgspec.Struct) -> str:
    """JSON text of a config, for another process."""
    return msgspec.json.encode(config).decode()


def existing_folder(path: str) -> Path:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"model folder {path!r} does not exist")
    return folder
