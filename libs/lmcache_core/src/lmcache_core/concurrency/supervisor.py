"""The owner that joins every background task."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from typing import Any, Final

logger = logging.getLogger(__name__)

CANCEL_WAIT_S: Final = 5.0
"""How long `cancel_and_join` waits for cancelled tasks."""


class TaskSupervisor:
    """Owns background tasks of one component; `close` cancels and joins them.

    A task that fails is logged with its name and, if it was started by `repeat`, retried after its
    interval: this is one of the three places where any exception is caught.

    Args:
        name: The component, for log lines.
        max_tasks: Bound on live tasks; `start` refuses above it.
    """

    def __init__(self, name: str, max_tasks: int = 1024) -> None:
        self._name = name
        self._max_tasks = max_tasks
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def start(self, name: str, work: Coroutine[None, None, None]) -> bool:
        """Run `work` once in the background.

        Returns:
            False if the supervisor is closed or full; `work` is then closed without running and the
                caller decides what is lost.
        """
        if self._closed or len(self._tasks) >= self._max_tasks:
            work.close()
            return False
        task = asyncio.get_running_loop().create_task(
            self._guard(name, work), name=f"{self._name}/{name}"
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A task that is cancelled before its first step never awaits its work.
        task.add_done_callback(lambda _: work.close())
        return True

    def repeat(self, name: str, work: Callable[[], Awaitable[None]], interval_s: float) -> bool:
        """Run `work` immediately and then every `interval_s` seconds until `close`; a failure is
        logged and does not end it.
        """
        return self.start(name, self._repeat(name, work, interval_s))

    async def close(self, drain_s: float = 0.0) -> None:
        """Wait up to `drain_s` seconds for tasks to end by themselves, then cancel and join the
        rest.

        A task that has not ended `CANCEL_WAIT_S` after its cancellation is logged and abandoned.
        """
        self._closed = True
        tasks = list(self._tasks)
        if not tasks:
            return
        try:
            if drain_s > 0:
                await asyncio.wait(tasks, timeout=drain_s)
        except BaseException:
            for task in tasks:
                task.cancel()
            raise
        await cancel_and_join(tasks)

    async def _guard(self, name: str, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except Exception:
            logger.exception("background task failed: owner=%s task=%s", self._name, name)

    async def _repeat(
        self, name: str, work: Callable[[], Awaitable[None]], interval_s: float
    ) -> None:
        while True:
            try:
                await work()
            except Exception:
                logger.exception(
                    "periodic task failed: owner=%s task=%s retry_in_s=%.1f",
                    self._name,
                    name,
                    interval_s,
                )
            await asyncio.sleep(interval_s)


async def cancel_and_join(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait for them to end; one that has not ended after `CANCEL_WAIT_S` is logged
    by its name and abandoned.

    Results and exceptions of ended tasks can still be retrieved; an exception that is not retrieved
    is not reported.
    """
    for task in tasks:
        task.cancel()
    if not tasks:
        return
    done, left = await asyncio.wait(tasks, timeout=CANCEL_WAIT_S)
    for task in done:
        if not task.cancelled():
            task.exception()
    for name in sorted(map(_name_of, left)):
        logger.error(
            "task ignored its cancellation, leaving it: task=%s waited_s=%g", name, CANCEL_WAIT_S
        )


async def run_together(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run several coroutines concurrently; the first failure, or cancellation, ends all of them.

    The caller bounds their number and duration.

    Raises:
        BaseException: What the first one that failed has raised. When it is raised, all of them
            have ended, except those that ignore their cancellation: see `cancel_and_join`.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        await cancel_and_join(tasks)


def _name_of(task: asyncio.Future[Any]) -> str:
    if not isinstance(task, asyncio.Task):
        return repr(task)
    return f"{task.get_name()}:{getattr(task.get_coro(), '__qualname__', '')}"


ACCEPT_TURNS: Final = 4
"""Iterations of the event loop after which a connection taken from the backlog is known to its
protocol, or has ended.
"""


async def stop_listening(server: asyncio.Server) -> None:
    """Accept no more connections, and keep track of all that were accepted.

    asyncio loses a connection that it is accepting while its server closes: the other side waits on
    a socket that stays open until it is garbage-collected. Here accepting stops first, and the
    server closes a few iterations of the loop later. The caller has decided beforehand how to treat
    connections that are made in between.

    Args:
        server: Server of the running loop; accepted connections continue. If it is closed, nothing
            is done.
    """
    loop = asyncio.get_running_loop()
    for listening in server.sockets:
        loop.remove_reader(listening.fileno())
    await take_turns(ACCEPT_TURNS)
    server.close()


async def take_turns(num_turns: int) -> None:
    """Yield to the event loop `num_turns` times."""
    for _ in range(num_turns):
        await asyncio.sleep(0)
