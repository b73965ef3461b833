"""A real admin server over a fake backend, for the verbs that talk to it."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
from fakes.admin import FakeAdminBackend

from nori_cluster.rpc.admin import serve


@pytest.fixture
def backend() -> FakeAdminBackend:
    return FakeAdminBackend()


@pytest.fixture
def address(backend: FakeAdminBackend) -> Iterator[str]:
    """The server runs in a loop of its own thread, as the controller's does."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(serve(backend, "127.0.0.1", 0), loop).result(10)
    yield f"127.0.0.1:{server.port}"
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
