"""asyncio's own event loop, on the simulation's selector."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tests.simulation import threads
from tests.simulation.network import Selector
from tests.simulation.order import OrderedWeakSet, numbered

MAX_ACCEPTED = 8
"""Connections that a loop accepts in one turn."""


@numbered
class Task(asyncio.Task[Any]):
    pass


@numbered
class Future(asyncio.Future[Any]):
    pass


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Runs in the thread, and in the virtual time, of a simulated process."""

    def __init__(self) -> None:
        self.interrupts: Selector = Selector()
        super().__init__(self.interrupts)
        self._asyncgens = OrderedWeakSet()
        process = threads.kernel.process
        if process is not None:
            process.loops.append(self)
        self.set_task_factory(lambda loop, coro, **options: Task(coro, loop=loop, **options))

    def time(self) -> float:
        return threads.kernel.now

    def create_future(self) -> asyncio.Future[Any]:
        return Future(loop=self)

    def _make_self_pipe(self) -> None:
        pass

    def _close_self_pipe(self) -> None:
        pass

    def _write_to_self(self) -> None:
        self.interrupts.interrupt()

    def _accept_connection(
        self, protocol_factory: Any, sock: Any, sslcontext: Any = None, server: Any = None,
        backlog: int = 100, *limits: Any,
    ) -> None:  # fmt: skip
        # Without descriptors it would fail once for each place of the backlog.
        accept = super()._accept_connection  # type: ignore[misc]
        accept(protocol_factory, sock, sslcontext, server, min(backlog, MAX_ACCEPTED), *limits)

    def add_signal_handler(self, sig: int, callback: Callable[..., Any], *args: Any) -> None:
        process = threads.kernel.process
        assert process is not None
        process.signals[sig] = lambda *_: self.call_soon_threadsafe(callback, *args)

    def remove_signal_handler(self, sig: int) -> bool:
        process = threads.kernel.process
        assert process is not None
        return process.signals.pop(sig, None) is not None

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> Any:
        import socket

        await asyncio.sleep(0.0003)
        return socket.getaddrinfo(host, port, **options)


class Policy(asyncio.DefaultEventLoopPolicy):
    """Creates simulated loops."""

    _loop_factory = SimulatedLoop


def install() -> None:
    """Let asyncio create simulated loops."""
    asyncio.set_event_loop_policy(Policy())
    asyncio.SelectorEventLoop = SimulatedLoop  # type: ignore[misc]
    asyncio.DefaultEventLoopPolicy = Policy  # type: ignore[misc]
