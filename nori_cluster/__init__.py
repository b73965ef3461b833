"""Nori Cluster. `from nori_cluster import LLM, SamplingParams` is the Python API; torch is imported with LLM only."""

from typing import Any

from nori_cluster.registry import Registry
from nori_cluster.types import SamplingParams
from nori_cluster.version import __version__

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]

_LAZY = Registry("name", {name: f"nori_cluster.llm:{name}" for name in ("LLM", "CompletionOutput", "RequestOutput")})


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _LAZY[name]
