"""One rank of a worker group (inside a RankActor): joins the collective, loads its shard, then obeys plans."""

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from nori_cluster import telemetry
from nori_cluster.config import GroupConfig
from nori_cluster.device.parallel import SoloGroup, TorchTPGroup, TPGroup
from nori_cluster.env import bind_gloo
from nori_cluster.types import GroupSpec
from nori_cluster.worker.channel import WorkerChannel
from nori_cluster.worker.worker import Worker


class RankProcess:
    """Order: (rank 0) rendezvous, join, load, serve. The controller holds the reference of `serve`: its end is ours."""

    def __init__(self, rank: int, config: GroupConfig, host: str) -> None:
        telemetry.configure_logging(f"rank {rank}")
        self._rank = rank
        self._config = config
        self._host = host
        self._store: Store | None = None
        self._worker: Worker | None = None

    def rendezvous(self) -> int:
        """Rank 0: open the store on a socket bound beforehand, so that no port can be lost in between. Its port."""
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind((self._host, 0))
        listener.listen()
        port = int(listener.getsockname()[1])
        self._store = TCPStore(
            self._host,
            port,
            self._config.parallel.tensor_parallel_size,
            is_master=True,
            wait_for_workers=False,
            timeout=self._timeout(),
            master_listen_fd=listener.detach(),
        )
        return port

    def join(self, port: int, generation: int) -> int:
        """Join the collective of this incarnation; returns our pid."""
        size = self._config.parallel.tensor_parallel_size
        if size == 1:
            self._worker = Worker(self._config, SoloGroup())
            return os.getpid()
        if self._store is None:
            self._store = TCPStore(
                self._host, port, size, is_master=False, wait_for_workers=False, timeout=self._timeout()
            )
        device = self._config.parallel.device
        if device == "cpu" and self._host == "127.0.0.1":
            bind_gloo("lo")
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=PrefixStore(str(generation), self._store),
            rank=self._rank,
            world_size=size,
            timeout=self._timeout(),
        )
        self._worker = Worker(self._config, self._group())
        return os.getpid()

    def load(self) -> GroupSpec:
        """Read this rank's shard and size the KV cache (equal on all ranks)."""
        assert self._worker is not None
        return self._worker.load()

    def serve(self, address: str, token: str) -> None:
        """Blocks until the engine process hangs up; raises what the step raised."""
        assert self._worker is not None
        channel = WorkerChannel(address, token, self._rank)
        try:
            channel.serve(self._worker)
        finally:
            channel.close()

    def _group(self) -> TPGroup:
        assert dist.group.WORLD is not None
        return TorchTPGroup(dist.group.WORLD, torch.device(self._config.parallel.device))

    def _timeout(self) -> timedelta:
        return timedelta(seconds=self._config.parallel.collective_timeout)
