"""Gauges and totals of the groups as this gateway's routing table shows them."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nori_cluster.rpc.call import Counts
from nori_cluster.rpc.cluster_backend import GroupLink
from nori_cluster.rpc.router_client import RouterClient

LABELS = ["model_name", "group"]


class GroupMetrics(Collector):
    """groups: the links now. router: this gateway's line to it. counts: of calls that were placed, moved, lost their
    group and went on."""

    def __init__(self, groups: Callable[[], Sequence[GroupLink]], router: RouterClient, counts: Counts) -> None:
        self._groups = groups
        self._router = router
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        links = self._groups()
        yield from self._queue()
        yield from self._losses()
        yield from self._restarts()
        up = GaugeMetricFamily("nori_group_up", "1 when the group takes requests.", labels=[*LABELS, "state", "link"])
        values = {
            name: GaugeMetricFamily(f"nori_group_{name}", text, labels=LABELS)
            for name, text in (
                ("num_requests_running", "Sequences in slots."),
                ("num_requests_waiting", "Sequences waiting in the group."),
                ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1."),
                ("tokens_per_second", "Generated tokens per second."),
                ("outstanding_tokens", "Cost reserved by all gateways, tokens."),
                ("open_sequences", "Sequences of this gateway."),
            )
        }
        totals = {
            name: CounterMetricFamily(f"nori_group_{name}", text, labels=LABELS)
            for name, text in (
                ("generation_tokens", "Tokens generated since the group started."),
                ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
                ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
                ("prefix_cache_evictions", "Blocks evicted from the prefix cache."),
                ("num_preemptions", "Sequences preempted for lack of blocks."),
                ("spec_decode_num_draft_tokens", "Speculated tokens tried."),
                ("spec_decode_num_accepted_tokens", "Speculated tokens kept."),
            )
        }
        for link in links:
            view, report = link.view, link.view.report
            labels = [view.registration.model, view.group_id]
            up.add_metric([*labels, view.state.name.lower(), link.link], float(view.placeable))
            blocks = view.registration.kv_blocks
            usage = (blocks - report.free_kv_blocks) / blocks if blocks else 0.0
            for name, value in (
                ("num_requests_running", report.running_sequences),
                ("num_requests_waiting", report.waiting_sequences),
                ("kv_cache_usage_perc", usage),
                ("tokens_per_second", report.tokens_per_second),
                ("outstanding_tokens", view.outstanding_tokens),
                ("open_sequences", link.open_sequences),
            ):
                values[name].add_metric(labels, value)
            for name, total in (
                ("generation_tokens", report.generated_tokens),
                ("prefix_cache_queries", report.prefix_cache_queries),
                ("prefix_cache_hits", report.prefix_cache_hits),
                ("prefix_cache_evictions", report.prefix_cache_evictions),
                ("num_preemptions", report.preemptions),
                ("spec_decode_num_draft_tokens", report.proposed_draft_tokens),
                ("spec_decode_num_accepted_tokens", report.accepted_draft_tokens),
            ):
                totals[name].add_metric(labels, total)
        yield up
        yield from values.values()
        yield from totals.values()

    def _queue(self) -> Iterator[Metric]:
        """The router as this gateway last heard of it; drain rate is left out while it is not known."""
        router, queue = self._router, self._router.queue
        for name, text, value in (
            ("nori_router_lost", "1 while this gateway places requests without the router.", float(router.degraded)),
            ("nori_router_connected", "1 while the line to the router is open.", float(router.connected)),
            ("nori_num_requests_waiting", "Requests of all gateways that wait for a group.", queue.waiting),
            ("nori_gateway_requests_waiting", "Requests of this gateway that wait for a group.", router.waiting),
            ("nori_queue_full", "1 while a new request would be refused.", float(router.queue_full)),
            ("nori_queue_drain_rate", "Requests that leave the queue per second.", queue.drain_rate),
        ):
            if value is not None:
                yield GaugeMetricFamily(name, text, value=value)

    def _restarts(self) -> Iterator[Metric]:
        """What the controller counts and the router passes on; kept as it was while either is away. Every gateway shows
        the same numbers: take their maximum, not their sum."""
        restarts = self._router.restarts
        groups = CounterMetricFamily(
            "nori_group_restarts",
            "Incarnations of the group that ended; cause: lost, or purpose (a restart that was asked for).",
            labels=[*LABELS, "cause"],
        )
        for group in restarts.groups:
            groups.add_metric([group.model, group.group_id, "lost"], group.lost)
            groups.add_metric([group.model, group.group_id, "purpose"], group.on_purpose)
        yield groups
        yield CounterMetricFamily(
            "nori_controller_restarts", "Controllers that took over from a lost one.", value=restarts.controllers
        )
        yield CounterMetricFamily(
            "nori_router_restarts", "Routers that took over from a lost one.", value=restarts.routers
        )

    def _losses(self) -> Iterator[Metric]:
        """Groups that were lost under requests, and what became of those."""
        continuations = CounterMetricFamily(
            "nori_continuations",
            "Requests that lost their group and went on in another; exact: in one of equal numerics_id.",
            labels=["exact"],
        )
        continuations.add_metric(["true"], self._counts.exact)
        continuations.add_metric(["false"], self._counts.continued - self._counts.exact)
        yield continuations
        failures = CounterMetricFamily(
            "nori_group_failures",
            "Groups that took requests and stopped to: dead, stalled, or the line to them broke.",
            labels=[*LABELS, "reason"],
        )
        for labels, count in list(self._counts.group_failures.items()):
            failures.add_metric(labels, count)
        yield failures
        yield CounterMetricFamily(
            "nori_lost_sequences", "Accepted sequences whose group was lost.", value=self._counts.lost
        )
