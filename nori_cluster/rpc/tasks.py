"""Background tasks that may not die unseen."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


def background(work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
    """Starts it; a failure (a bug: expected errors are handled inside) is logged with its traceback."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.error("%s stopped by a bug", what, exc_info=task.exception())

    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(ended)
    return task
