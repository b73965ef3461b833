"""The Backend of a gateway in a cluster: Place at the router, Submit to the group, news to the TokenSinks.

A request whose group is lost goes on in another, whether it had said something or not (bounded, see call.py). Finished
reaches the router exactly once per placement.
"""

import asyncio
import logging
import secrets
from collections.abc import Sequence

import msgspec

from nori_cluster.errors import ModelNotFound
from nori_cluster.frontend.backend import ModelInfo, Submission, TokenSink
from nori_cluster.routing.base import GroupState, GroupView
from nori_cluster.rpc.call import Call, CallContext
from nori_cluster.rpc.dataplane_client import DataPlaneClient, DataPlaneTimes, LinkState
from nori_cluster.rpc.router_client import RouterClient, RouterClientTimes
from nori_cluster.types import Request

log = logging.getLogger(__name__)


class BackendTimes(msgspec.Struct, frozen=True, kw_only=True):
    """accept: seconds from Submit to Accepted before a request moves on to another group."""

    accept: float = 10.0
    router: RouterClientTimes = RouterClientTimes()
    dataplane: DataPlaneTimes = DataPlaneTimes()


class GroupLink(msgspec.Struct, frozen=True, kw_only=True):
    """One group as this gateway sees it, for metrics and status."""

    view: GroupView
    link: str  # value of LinkState
    open_sequences: int


class ClusterBackend(CallContext):
    """Belongs to one loop. `degraded` says that the router is lost and this gateway places on its own."""

    def __init__(self, router_address: str, gateway_id: str, *, times: BackendTimes = BackendTimes()) -> None:
        incarnation = secrets.randbits(63)
        router = RouterClient(router_address, gateway_id, incarnation, self._on_table, times=times.router)
        super().__init__(router, times.accept)
        self._gateway = (gateway_id, incarnation)
        self._times = times
        self._views: dict[str, GroupView] = {}
        self._models: dict[str, int] = {}  # every model ever seen → its context, tokens
        self._opened: set[str] = set()  # groups whose line is open
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Returns at once; `ready` tells when a model can be served."""
        self.router.start()

    async def close(self) -> None:
        """Whatever still runs is told that it failed."""
        self.closed = True
        await self.router.close()
        links, self.links = list(self.links.values()), {}
        await asyncio.gather(*(link.close() for link in links), *self._closing)

    # -- Backend ----------------------------------------------------------------------------------------------------

    def submit(self, request: Request, sinks: Sequence[TokenSink]) -> Submission:
        assert len(sinks) == request.sampling.n
        context = self._models.get(request.model)
        call = Call(self, request, sinks, context or 0)
        if self._models and context is None:
            call.refuse_later(ModelNotFound(f"The model `{request.model}` does not exist.", param="model"))
        else:
            call.place()
        return call

    def model(self, name: str) -> ModelInfo | None:
        context = self._models.get(name)
        if context is None:
            return None
        ready = sum(self._serves(view, name) for view in self._views.values())
        full = self.router.queue_full
        return ModelInfo(
            name=name,
            max_model_len=context,
            ready_groups=ready,
            queue_full=full,
            retry_after=self.router.retry_after() if full else None,
        )

    # -- views ------------------------------------------------------------------------------------------------------

    def ready(self, model: str) -> bool:
        """Some ready group of the model can be reached from here."""
        return any(self._serves(view, model) for view in self._views.values())

    def groups(self) -> list[GroupLink]:
        out = []
        for group_id, view in sorted(self._views.items()):
            link = self.links.get(group_id)
            state, sequences = (link.state.value, link.open_sequences) if link is not None else ("none", 0)
            out.append(GroupLink(view=view, link=state, open_sequences=sequences))
        return out

    @property
    def degraded(self) -> bool:
        return self.router.degraded

    def _serves(self, view: GroupView, model: str) -> bool:
        link = self.links.get(view.group_id)
        return view.registration.model == model and view.placeable and link is not None and link.state is LinkState.OPEN

    # -- links ------------------------------------------------------------------------------------------------------

    def _on_table(self, views: tuple[GroupView, ...]) -> None:
        self._count_failures(views)
        self._views = {view.group_id: view for view in views}
        for view in views:
            facts = view.registration
            self._models[facts.model] = facts.max_context_tokens
            link = self.links.get(view.group_id)
            if link is not None and link.address != facts.address:
                self._drop(link)  # the group was reborn elsewhere
                link = None
            if link is None and view.state is not GroupState.DEAD:
                self._open(view)
        for link in list(self.links.values()):
            self._drop_if_unused(link)
        self._tell_reach()

    def _count_failures(self, views: tuple[GroupView, ...]) -> None:
        for view in views:
            before = self._views.get(view.group_id)
            if before is not None and before.placeable and view.state in (GroupState.DEAD, GroupState.STALLED):
                self._count_failure(view, view.state.name.lower())

    def _count_failure(self, view: GroupView, reason: str) -> None:
        self.counts.group_failures[view.registration.model, view.group_id, reason] += 1

    def _open(self, view: GroupView) -> None:
        link = DataPlaneClient(
            view.group_id,
            view.registration.address,
            *self._gateway,
            self._on_state,
            times=self._times.dataplane,
        )
        self.links[view.group_id] = link
        link.start()

    def _on_state(self, link: DataPlaneClient) -> None:
        if self.links.get(link.group_id) is link:
            if link.state is LinkState.OPEN:
                self._opened.add(link.group_id)
            elif link.group_id in self._opened:
                self._opened.discard(link.group_id)
                if (view := self._views.get(link.group_id)) is not None and view.placeable:
                    self._count_failure(view, "line")
            self._drop_if_unused(link)
            self._tell_reach()

    def _drop_if_unused(self, link: DataPlaneClient) -> None:
        """A group that left the table keeps its stream while that lives: the router may only have lost sight of it."""
        view = self._views.get(link.group_id)
        gone = view is None or view.state is GroupState.DEAD
        if gone and (link.state is not LinkState.OPEN or not link.open_sequences):
            self._drop(link)

    def _drop(self, link: DataPlaneClient) -> None:
        self.links.pop(link.group_id, None)
        task = asyncio.create_task(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _tell_reach(self) -> None:
        self.router.set_unreachable(
            frozenset(
                view.group_id
                for view in self._views.values()
                if view.state is not GroupState.DEAD and not self._is_open(view.group_id)
            )
        )

    def _is_open(self, group_id: str) -> bool:
        link = self.links.get(group_id)
        return link is not None and link.state is LinkState.OPEN
