"""python router_process.py PORT: a router in a process of its own, to be killed. One JSON line of its state whenever it
changes: {"at": unix seconds, "groups": placeable ones, "gateways": connected ones, "open": placed requests}."""

import asyncio
import json
import sys
import time

from nori_cluster.routing.base import PLACEABLE
from nori_cluster.rpc.router_server import RouterServer, RouterTimes


async def main(port: int) -> None:
    router = RouterServer(times=RouterTimes(load=0.1))
    await router.start("127.0.0.1", port)
    told = None
    while True:
        snapshot = router.snapshot()
        state = {
            "groups": sum(group.view.state in PLACEABLE for group in snapshot.groups),
            "gateways": sum(gateway.connected for gateway in snapshot.gateways),
            "open": sum(gateway.open_requests for gateway in snapshot.gateways),
        }
        if state != told:
            told = state
            print(json.dumps({"at": time.time(), **state}), flush=True)
        await asyncio.sleep(0.005)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
