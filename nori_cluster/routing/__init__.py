"""Routing: which worker group takes a request. Pure: no clock, no socket; time comes in as an argument."""

from nori_cluster.registry import Registry

POLICIES = Registry(
    "routing policy",
    {
        "least_loaded": "nori_cluster.routing.least_loaded:LeastLoaded",
        "round_robin": "nori_cluster.routing.round_robin:RoundRobin",
    },
)
