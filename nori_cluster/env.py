"""The only reader of environment variables."""

import os
from pathlib import Path


def home() -> Path:
    """$NORI_HOME: converted models and downloads. Default ~/.cache/nori."""
    return Path(os.environ.get("NORI_HOME") or Path.home() / ".cache" / "nori").expanduser()


def hf_offline() -> bool:
    """True when the Hugging Face hub must not be contacted (HF_HUB_OFFLINE)."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}


def api_key() -> str | None:
    """$NORI_API_KEY (or vLLM's $VLLM_API_KEY): the bearer token clients must send."""
    return os.environ.get("NORI_API_KEY") or os.environ.get("VLLM_API_KEY") or None


def debug() -> bool:
    """$NORI_DEBUG: the command line prints tracebacks instead of one line."""
    return os.environ.get("NORI_DEBUG", "").lower() not in {"", "0", "false", "no", "off"}


def prepare_ray() -> None:
    """Settings that Ray reads at import: no usage reports; its token authentication on (the default, but said aloud
    where nobody chose it); a local Ray stays on the loopback interface (what the variable of other systems does
    wherever it is 0, its name notwithstanding)."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


def bind_gloo(interface: str) -> None:
    """gloo listens on this interface only; before the first process group."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface


def child(**changes: str) -> dict[str, str]:
    """The environment for a child process: ours, with some variables set."""
    return {**os.environ, **changes}
