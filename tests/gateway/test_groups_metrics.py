"""What a gateway's metrics page says of its groups, over a real router."""

import pytest
from fakes.cluster import MiniCluster, until
from prometheus_client import CollectorRegistry, generate_latest

from nori_cluster.gateway.groups_metrics import GroupMetrics
from nori_cluster.routing.base import GroupRestarts, Restarts

pytestmark = pytest.mark.contract


async def test_restarts_that_the_controller_counts_are_shown_and_outlive_the_router() -> None:
    async with MiniCluster("g1") as cluster:
        line = cluster.backend.router
        registry = CollectorRegistry()
        registry.register(GroupMetrics(cluster.backend.groups, line, cluster.backend.counts))

        def page() -> list[str]:
            lines = generate_latest(registry).decode().splitlines()
            return [line for line in lines if "restarts_total" in line and not line.startswith("#")]

        assert page() == ["nori_controller_restarts_total 0.0", "nori_router_restarts_total 0.0"]
        groups = (GroupRestarts(group_id="g1", model="m", lost=2, on_purpose=1),)
        cluster.router.set_restarts(Restarts(controllers=3, routers=4, groups=groups))
        shown = [
            'nori_group_restarts_total{cause="lost",group="g1",model_name="m"} 2.0',
            'nori_group_restarts_total{cause="purpose",group="g1",model_name="m"} 1.0',
            "nori_controller_restarts_total 3.0",
            "nori_router_restarts_total 4.0",
        ]
        await until(lambda: page() == shown)
        await cluster.router.stop()
        await until(lambda: not line.connected)
        assert page() == shown
        await cluster.restart_router()  # it was told of nothing yet
        await until(lambda: line.connected and bool(line.table))
        assert page() == shown
