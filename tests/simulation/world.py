"""One simulation: the kernel, the network, the disks, and how processes of the product start."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.simulation import disk, network, promises, threads
from tests.simulation.kernel import Kernel, Machine, Process
from tests.simulation.order import numbered
from tests.simulation.pace import BUSY, Pace

PLACE = Path("/dev/shm/lmcache-simulation")
WAITING = {"lease": 5.0, "queue": 5.0, "report": 5.0, "writer": 5.0}
"""Shortest interval of periodic work that waits for what it does by itself, by its name."""


class World:
    """Installs a simulation in this process permanently. Create it before the product is imported.

    Args:
        seed: Decides everything.
        pace: How often services do periodic work.
    """

    def __init__(self, seed: int, pace: Pace = BUSY) -> None:
        for name in ("uvloop", "trio"):
            sys.modules[name] = None  # type: ignore[assignment]
        # Paths are the same in each run of a seed, so two of them wait for each other.
        PLACE.mkdir(exist_ok=True)
        self._lock = (PLACE / "lock").open("w")
        fcntl.lockf(self._lock, fcntl.LOCK_EX, 1, seed)
        self.pace = pace
        self.kernel = Kernel(seed)
        threads.install(self.kernel)
        self.network = network.Network(self.kernel)
        network.install(self.network)
        self.files = disk.Files(self.kernel, PLACE / str(seed))
        disk.install(self.files)
        from tests.simulation import loop

        loop.install()
        _install_signals(self.kernel)
        self.logs: list[str] = []
        self.nodes: dict[str, Any] = {}
        """The `Node` of each sidecar and storage, by the name of its process."""
        self.socket_servers: dict[str, Any] = {}
        """The `SocketServer` of each sidecar, likewise."""
        self.served_by: dict[str, Process] = {}
        """The process of each of `nodes`: the next one has none while it starts."""
        self.complaints: list[str] = []
        """Promises that were broken (see `promises`), and failures that were logged."""
        self.synced: dict[str, set[str]] = {}
        """By machine: chunk files written with `disk_fsync` and not removed since."""
        self.acknowledged: dict[Process, tuple[Any, dict[Any, Any]]] = {}
        """By sidecar: the context of its sessions, and the chunks acknowledged to engines."""
        self._install_product()
        gc.disable()

    def _install_product(self) -> None:
        import asyncio
        import concurrent.futures
        import logging
        import ssl

        import torch
        import typer.main
        import uvicorn
        from anyio._backends import _asyncio as anyio
        from lmcache_core.concurrency import supervisor
        from lmcache_core.engine.transfer import KVTransfer
        from lmcache_core.storage.disk import backend
        from lmcache_core.storage.remote import members
        from lmcache_core.wire.server import LmSession
        from lmcache_core.wire.stream import FrameStream
        from lmcache_node.node import Node
        from lmcache_servicekit import runner
        from lmcache_servicekit.http_protocol import BoundedHttpProtocol
        from lmcache_sidecar.admin import explain
        from lmcache_sidecar.socket.server import SocketServer
        from lmcache_sidecar.socket.session import EngineSession
        from prometheus_client import ProcessCollector

        # Memory and descriptors of the one real process, which no seed decides.
        ProcessCollector.collect = lambda *_: ()  # type: ignore[method-assign, assignment]
        # It belongs to the operating system's thread, which all simulated threads share.
        torch.inference_mode = _NoMode  # type: ignore[assignment, misc]
        # Each command line of `lmcachectl` would build all its commands again, in 50 ms.
        typer.main.get_command = functools.cache(typer.main.get_command)
        # The operator's calls count as those of the pod itself, as over a forwarded port.
        explain._check_loopback = lambda _: None
        connections = (BoundedHttpProtocol, FrameStream, LmSession, EngineSession)
        for one in (*connections, anyio.CancelScope, concurrent.futures.Future):
            numbered(one)

        async def main_loop(server: uvicorn.Server) -> None:
            # uvicorn checks for signals ten times a second.
            server.told_to_exit = asyncio.Event()  # type: ignore[attr-defined]
            server.loop = asyncio.get_running_loop()  # type: ignore[attr-defined]
            await server.on_tick(0)
            while not server.should_exit:
                await server.told_to_exit.wait()  # type: ignore[attr-defined]

        def told(server: Any, name: str, value: object) -> None:
            object.__setattr__(server, name, value)
            if name == "should_exit" and value and hasattr(server, "told_to_exit"):
                server.loop.call_soon_threadsafe(server.told_to_exit.set)

        repeat, pace = supervisor.TaskSupervisor.repeat, self.pace
        least_s = {"look": pace.look_s, "sole-bytes": pace.measure_s, **WAITING}

        def repeat_seldom(tasks: Any, name: str, work: Any, interval_s: float) -> bool:
            return repeat(tasks, name, work, max(interval_s, least_s.get(name, pace.repeat_s)))

        members.REFRESH_S = max(members.REFRESH_S, pace.repeat_s)
        backend.LOOK_AGAIN_S = max(backend.LOOK_AGAIN_S, pace.repeat_s)
        open_node, kernel, nodes = Node.serve, self.kernel, self.nodes
        served_by = self.served_by

        async def serve(node: Any, *args: Any) -> None:
            assert kernel.process is not None
            nodes[kernel.process.name] = node
            served_by[kernel.process.name] = kernel.process
            await open_node(node, *args)

        for name in ("_fill", "_copy"):
            setattr(KVTransfer, name, _interruptible(kernel, getattr(KVTransfer, name)))
        open_socket, socket_servers = SocketServer.open, self.socket_servers

        async def listen(server: Any) -> None:
            assert kernel.process is not None
            socket_servers[kernel.process.name] = server
            await open_socket(server)

        promises.install(self)
        SocketServer.open = listen  # type: ignore[method-assign]
        Node.serve = serve  # type: ignore[method-assign]
        uvicorn.Server.main_loop = main_loop  # type: ignore[method-assign]
        uvicorn.Server.__setattr__ = told  # type: ignore[method-assign, assignment]
        supervisor.TaskSupervisor.repeat = repeat_seldom  # type: ignore[method-assign]
        ssl.SSLContext.load_default_certs = lambda *_: None  # type: ignore[method-assign]
        runner.configure_logging = lambda *_: None
        logs, complaints = self.logs, self.complaints

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                name = "outside" if kernel.process is None else kernel.process.name
                text = f"{name} {record.levelname} {record.name} {self.format(record)}"
                logs.append(f"{kernel.now:.4f} {text}")
                # The product's own errors report faults of its environment.
                is_unexpected = bool(record.exc_info) or record.name == "asyncio"
                if is_unexpected and record.levelno >= logging.ERROR:
                    complaints.append(text)

        logging.basicConfig(level=logging.INFO, handlers=[Handler()], force=True)

    def machine(self, name: str) -> Machine:
        """Add a machine with a disk."""
        machine = self.network.add_machine(name)
        self.files.add_machine(machine)
        return machine

    def place(self, machine: Machine) -> Path:
        """Return the directory that holds a machine's `disk`, `shm` and `run`."""
        return self.files.root / machine.name

    def start_service(
        self,
        name: str,
        machine: Machine,
        main: Callable[[list[str]], int],
        settings: Mapping[str, object],
    ) -> Process:
        """Start a service with its settings in a file."""
        import yaml

        path = self.place(machine) / f"{name}.yaml"
        path.write_text(yaml.safe_dump({key: _plain(value) for key, value in settings.items()}))

        def run() -> int:
            threads.be_main_thread()
            return main(["--config", str(path)])

        return self.kernel.start_process(name, machine, run)

    def signal(self, process: Process, number: int) -> None:
        """Send a signal."""
        self.kernel.record(f"signal {process.name} pid={process.pid} {number}")
        if process.is_dead:
            return
        if number == signal.SIGKILL:
            promises.check_journal(self, process)
            self.kernel.end_process(process, -number)
        elif number == signal.SIGSTOP:
            process.pause()
        elif number == signal.SIGCONT:
            process.resume()
        elif number in process.signals:
            self.kernel.spawn(
                process, f"{process.name}.signal", lambda: self._handle(process, number)
            )
        else:
            self.kernel.end_process(process, -number)

    def _handle(self, process: Process, number: int) -> None:
        """Call a handler, which may end the process, as it would in its main thread."""
        try:
            process.signals[number](number, None)
        except SystemExit as exc:
            self.kernel.end_process(process, int(exc.code or 0))


class _NoMode(contextlib.ContextDecorator):
    """Replaces `torch.inference_mode`."""

    def __init__(self, mode: object = True) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def _interruptible(kernel: Kernel, copy: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of KV before which `Process.at_copy` is called."""

    def wrapped(*args: Any) -> Any:
        process = kernel.process
        if process is not None and process.at_copy is not None:
            at_copy, process.at_copy = process.at_copy, None
            at_copy()
            kernel.sleep(0.0)  # a stopped process stops here
        return copy(*args)

    return wrapped


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


def _install_signals(kernel: Kernel) -> None:
    default = signal.SIG_DFL

    def handle(number: int, handler: Any) -> Any:
        process = kernel.process
        if process is None:
            return default
        before = process.signals.get(number, default)
        if callable(handler):
            process.signals[number] = handler
        else:
            process.signals.pop(number, None)
        return before

    def raise_signal(number: int) -> None:
        process = kernel.process
        assert process is not None
        handler = process.signals.get(number)
        if handler is None:
            kernel.end_process(process, -number)
        else:
            handler(number, None)

    signal_: Any = signal
    signal_.signal = handle
    signal_.raise_signal = raise_signal
