"""Child processes of a test: services out of the project's own environment, engines out of this
one. None outlives its owner.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.vllm.engines import Answer, Ask, from_plain

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = ROOT / ".venv" / "bin" / "python"
OUR_PYTHON = INSTALLED if INSTALLED.exists() else Path(sys.executable)
"""For services. A GPU machine, where nothing is installed, has one Python for all."""
START_TIMEOUT_S = 90.0
END_TIMEOUT_S = 15.0
POLL_S = 0.03
TAIL_CHARS = 6000
PR_SET_PDEATHSIG = 1


class Service:
    """A service that listens: `sidecar.kill()`, `sidecar.start()` again, and so on.

    Args:
        module: Its package, for example `lmcache_sidecar`.
        name: For its files.
        directory: For its files.
        settings: Of its settings file. Port 0 is another one at each start.
    """

    def __init__(
        self, module: str, name: str, directory: Path, settings: Mapping[str, Any]
    ) -> None:
        self.name = name
        self.settings = dict(settings)
        self.ports: dict[str, int] = {}
        self.module = module
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._num_starts = 0

    def start(self, **settings: Any) -> None:
        """Start it, with other settings if any are given, and wait until it listens."""
        assert not self.is_alive
        self.settings |= settings
        self._num_starts += 1
        config, ports = (
            self._directory / f"{self.name}-{self._num_starts}.{kind}" for kind in ("json", "ports")
        )
        config.write_text(json.dumps(self.settings, default=str))
        command = [
            str(OUR_PYTHON),
            "-m",
            self.module,
            "--config",
            str(config),
            "--port-file",
            str(ports),
        ]
        self._process = spawn(command, self._log, our_environment())
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ports.exists():
            assert self.is_alive, f"{self.name} has ended:\n{self.tail()}"
            assert time.monotonic() < deadline, f"{self.name} does not listen:\n{self.tail()}"
            time.sleep(POLL_S)
        self.ports = json.loads(ports.read_text())

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports['port']}"

    def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(END_TIMEOUT_S)

    def freeze(self) -> None:
        """SIGSTOP: it lives, and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        if self.is_alive:
            os.kill(self.pid, signal.SIGCONT)

    def end(self) -> int:
        """SIGTERM; the exit code."""
        assert self._process is not None
        self.thaw()
        self._process.terminate()
        return self._process.wait(END_TIMEOUT_S)

    def get(self, path: str) -> Any:
        """A JSON answer of its REST interface."""
        with urllib.request.urlopen(self.url + path, timeout=10.0) as response:
            return json.loads(response.read())

    def post(self, path: str, body: Any = None) -> Any:
        """The same for POST."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"content-type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=10.0) as response:
            return json.loads(response.read())

    def tail(self) -> str:
        """The end of its log."""
        return self._log.read_text(errors="replace")[-TAIL_CHARS:]

    @property
    def _log(self) -> Path:
        return self._directory / f"{self.name}.log"


class EngineProcess:
    """An engine in a process of its own: the same questions as `Engine`.

    Args:
        name: For its log.
        directory: For its log.
        environ: Environment beside this process's.
        command: What to run instead of `tests.vllm.engine_child`: something that obeys in the same
            way, and perhaps more.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        environ: Mapping[str, str] | None = None,
        command: Sequence[str] = (),
    ) -> None:
        self._log = directory / f"{name}.log"
        command = command or (sys.executable, "-m", "tests.vllm.engine_child")
        self._process = spawn(command, self._log, vllm_environment(environ), talks=True)

    def open(
        self, options: Mapping[str, Any], name: str = "engine", timeout_s: float = 240.0
    ) -> None:
        """Make an engine, and wait for it."""
        self.call(timeout_s, do="open", name=name, options=dict(options))

    def generate(
        self, asks: Sequence[Ask], name: str = "engine", timeout_s: float = 60.0
    ) -> list[Answer]:
        """See `Engine.generate`."""
        answers = self.call(timeout_s, do="generate", name=name, asks=[asdict(ask) for ask in asks])
        return [from_plain(answer) for answer in answers]

    def ask(self, ask: Ask, name: str = "engine") -> Answer:
        """Answer one."""
        (answer,) = self.generate([ask], name)
        return answer

    def reset(self, name: str = "engine") -> None:
        """See `Engine.reset`."""
        self.call(30.0, do="reset", name=name)

    def metrics(self, name: str = "engine") -> dict[str, float]:
        """See `Engine.metrics`."""
        figures: dict[str, float] = self.call(30.0, do="metrics", name=name)
        return figures

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL, and so for the engine's own processes."""
        end_group(self._process, signal.SIGKILL)

    def end(self) -> None:
        """Let it end by itself, or kill it."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            end_group(self._process, signal.SIGKILL)
            if self._process.stdout is not None:
                self._process.stdout.close()

    def call(self, timeout_s: float, **command: Any) -> Any:
        """Have the child do something, and wait for its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = b""
        with contextlib.suppress(BrokenPipeError):  # it has ended: there is no answer either
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
            ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
            line = self._process.stdout.readline() if ready else b""
        assert line, (
            f"{command['do']} had no answer within {timeout_s} s, exit code"
            f" {self._process.poll()}:\n{self._log.read_text(errors='replace')[-TAIL_CHARS:]}"
        )
        return json.loads(line)["answer"]


class Owner:
    """`with Owner(directory) as owner:`, and all its processes are gone afterwards.

    Args:
        directory: For settings, logs and sockets.

    Attributes:
        services: All that it has started.
        commands: The same; each leads a group of processes.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.services: list[Service] = []
        self._engines: list[EngineProcess] = []
        self.commands: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Owner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for engine in self._engines:
            engine.end()
        for command in self.commands:
            end_group(command, signal.SIGTERM)
        for service in reversed(self.services):
            if service.is_alive:
                service.end()

    def service(self, module: str, name: str, settings: Mapping[str, Any]) -> Service:
        """A service, started."""
        service = Service(module, name, self.directory, settings)
        self.services.append(service)
        service.start()
        return service

    def engine(
        self, name: str, environ: Mapping[str, str] | None = None, command: Sequence[str] = ()
    ) -> EngineProcess:
        """A process for an engine, which is still to be opened."""
        engine = EngineProcess(name, self.directory, environ, command)
        self._engines.append(engine)
        return engine

    def command(
        self, arguments: Sequence[str], name: str, environ: Mapping[str, str] | None = None
    ) -> Path:
        """Any `python …` of this environment; the path of its log."""
        log = self.directory / f"{name}.log"
        self.commands.append(spawn([sys.executable, *arguments], log, vllm_environment(environ)))
        return log


def our_environment() -> dict[str, str]:
    """For our services: nothing of vLLM's environment, and the code of this checkout."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("LMCACHE_", "PYTHON", "VLLM_", "OMP_", "KMP_"))
    }
    sources = [*ROOT.glob("libs/*/src"), *ROOT.glob("services/*/src"), ROOT / "kernels" / "src"]
    if OUR_PYTHON != INSTALLED:
        sources.append(Path(os.environ.get("PYTHONPATH", "")))
    return kept | {"PYTHONPATH": os.pathsep.join(str(path) for path in sources)}


def vllm_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """For engines: this process's, which can import the tests too."""
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, **(extra or {})}


def spawn(
    command: Sequence[str], log: Path, environ: Mapping[str, str], talks: bool = False
) -> subprocess.Popen[bytes]:
    """Start a child that dies with this process; with `talks` its input and output are pipes.

    A process group of its own, to be ended with all that it starts; but no session of its own:
    Linux shares the processors among sessions first, and engines of several processes, which wait
    by spinning, then starve a sidecar for half a second at a time.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
            stdout=subprocess.PIPE if talks else output,
            stderr=output,
            env=dict(environ),
            cwd=ROOT,
            process_group=0,
            preexec_fn=_die_with_parent,
        )


def end_group(process: subprocess.Popen[bytes], number: int) -> None:
    """Signal a child and all that it has started, and wait for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(END_TIMEOUT_S)


def _die_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
