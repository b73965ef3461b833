"""A TokenSink that keeps what it hears and checks the order in which it may hear it."""

import asyncio
from collections.abc import Sequence

from nori_cluster.errors import NoriError
from nori_cluster.frontend.backend import Finish, Started
from nori_cluster.types import TokenLogprob


class RecordingSink:
    """error and finish: the last word. `ended` is set with it. After abort() nothing may come."""

    def __init__(self) -> None:
        self.was_accepted = False
        self.start: Started | None = None
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish: Finish | None = None
        self.error: NoriError | None = None
        self.aborted = False
        self.heard = asyncio.Event()  # set by every token
        self.admitted = asyncio.Event()
        self.ended = asyncio.Event()

    def _check(self) -> None:
        assert not self.aborted, "news after an abort"
        assert not self.ended.is_set(), "news after the last word"

    def accepted(self) -> None:
        self._check()
        assert not self.was_accepted
        self.was_accepted = True
        self.admitted.set()

    def started(self, start: Started) -> None:
        self._check()
        assert self.was_accepted
        assert self.start is None
        self.start = start

    def tokens(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> None:
        self._check()
        assert self.start is not None
        self.ids += ids
        self.logprobs += logprobs or []
        self.heard.set()

    def finished(self, finish: Finish) -> None:
        self._check()
        self.finish = finish
        self.ended.set()

    def failed(self, error: NoriError) -> None:
        self._check()
        self.error = error
        self.ended.set()
