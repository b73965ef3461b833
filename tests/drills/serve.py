"""The cluster under test, as `nori serve` runs it: ClusterConfig as JSON on stdin's first line, one JSON line out."""

import sys

import msgspec
from rich.console import Console

from nori_cluster.cli.running import RunningCluster, run
from nori_cluster.config import ClusterConfig


def main() -> int:
    config = msgspec.json.decode(sys.stdin.readline(), type=ClusterConfig)

    def ready(cluster: RunningCluster) -> None:
        sys.stdout.write(
            msgspec.json.encode({"http": cluster.http_url, "admin": cluster.admin_address}).decode() + "\n"
        )
        sys.stdout.flush()

    return run(config, Console(stderr=True, highlight=False), ready)


if __name__ == "__main__":
    raise SystemExit(main())
