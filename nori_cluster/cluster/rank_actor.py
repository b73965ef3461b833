"""The Ray actor of a rank. A shell around RankProcess, so that whoever creates the actor needs no torch."""

from typing import Any

from nori_cluster.config import GroupConfig
from nori_cluster.registry import Registry
from nori_cluster.types import GroupSpec

PROCESSES = Registry("process", {"rank": "nori_cluster.cluster.rank_process:RankProcess"})


class RankActor:
    """See RankProcess for the order of calls."""

    def __init__(self, rank: int, config: GroupConfig, host: str) -> None:
        self._process: Any = PROCESSES["rank"](rank, config, host)

    def rendezvous(self) -> int:
        port: int = self._process.rendezvous()
        return port

    def join(self, port: int, generation: int) -> int:
        pid: int = self._process.join(port, generation)
        return pid

    def load(self) -> GroupSpec:
        spec: GroupSpec = self._process.load()
        return spec

    def ended(self) -> None:
        """Returns once `serve` has: for a controller that holds no reference of it. One call runs at a time here."""

    def serve(self, address: str, token: str) -> None:
        self._process.serve(address, token)
