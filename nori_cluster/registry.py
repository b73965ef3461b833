"""Registries: name → "module:attribute", resolved on first use, so that adding a thing is one file and one line."""

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from nori_cluster.errors import ConfigError


class Registry(Mapping[str, Any]):
    """A lazy mapping. An unknown name raises ConfigError listing what exists."""

    def __init__(self, kind: str, targets: dict[str, str]) -> None:
        self.kind = kind
        self._targets = targets

    def __getitem__(self, name: str) -> Any:
        target = self._targets.get(name)
        if target is None:
            raise ConfigError(f"unknown {self.kind} {name!r}; supported: {', '.join(sorted(self._targets))}")
        module, _, attribute = target.partition(":")
        return getattr(importlib.import_module(module), attribute)

    def __contains__(self, name: object) -> bool:
        return name in self._targets

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)
