"""The Dockerfiles, step by step without a container engine: the same copies and the same commands, in a folder of their own.

What it cannot show is the base image; what it does show is that the files named exist, that the dependency layer is complete (the
packages are installed with --no-deps after it), and that the entry point starts without torch.

Not called test_…: four installations take about a minute. `make docker-lint` names this file.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SERVICES = {"storage": "cache_storage", "lookup": "lookup", "broker": "p2p_broker", "sidecar": "sidecar"}
STEP_TIMEOUT_S = 300
START_TIMEOUT_S = 60
VENV = "/opt/lmcache"
# Services that encode and decode: the machine code for it is compiled when their image is built.
WITH_CODECS = {"sidecar"}
# Settings with which a service starts in any folder, beside others.
SMALL = {
    "storage": {"LM_PORT": "0", "MEMORY_GB": "0.0625", "DISK_PATH": "{folder}/disk", "DISK_GB": "0.0625"},
    "sidecar": {"LM_PORT": "0", "ARENA_GB": "0.0625", "ARENA_PATH": "{folder}/arena", "SOCKET_PATH": "{folder}/sidecar.sock"},
}


@dataclass
class Stage:
    """One stage of a Dockerfile.

    Attributes:
        base: What its FROM names.
        steps: Instruction and argument, in order.
    """

    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        """The arguments of every such instruction."""
        return [argument for name, argument in self.steps if name == instruction]


def parse(path: Path) -> list[Stage]:
    stages: list[Stage] = []
    text = "\n".join(line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    for line in text.replace("\\\n", " ").splitlines():
        instruction, _, argument = line.strip().partition(" ")
        if instruction == "FROM":
            stages.append(Stage(argument.split()[0]))
        elif instruction:
            stages[-1].steps.append((instruction, " ".join(argument.split())))
    return stages


def ignored(name: str) -> bool:
    """Whether .dockerignore keeps a path of the repository out of the build: the last pattern that fits decides."""
    out = False
    for line in (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith(("#", "**/")):
            pattern = line.removeprefix("!")
            if pattern == "*" or name == pattern or name.startswith(f"{pattern}/"):
                out = not line.startswith("!")
    return out


class Build:
    """Runs the first stage of a Dockerfile below `root`, which stands for `/`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directory = root
        tools = root / "usr/bin"
        tools.mkdir(parents=True)
        for name, arguments in (("python", ""), ("pip", "-m pip")):
            script = tools / name
            script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments} "$@"\n', encoding="utf-8")
            script.chmod(0o755)
        self.env = {"PATH": f"{tools}:{os.environ['PATH']}", "HOME": str(root), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

    def run(self, stage: Stage) -> None:
        """Take every step of the stage."""
        for instruction, argument in stage.steps:
            if instruction == "WORKDIR":
                self.directory = self.root / argument.lstrip("/")
                self.directory.mkdir(parents=True)
            elif instruction == "COPY":
                *sources, target = argument.split()
                for source in sources:
                    self._copy(source, target, several=len(sources) > 1)
            else:
                assert instruction == "RUN", f"{instruction} is not known to this test"
                command = argument.replace(VENV, f"{self.root}{VENV}")
                self.shell(["/bin/sh", "-c", command])

    def shell(self, command: list[str]) -> str:
        """Run a command in the current folder, with nothing of this environment but PATH."""
        answer = subprocess.run(
            command, cwd=self.directory, env=self.env, capture_output=True, text=True, timeout=STEP_TIMEOUT_S, check=False
        )
        assert answer.returncode == 0, f"{command}:\n{answer.stdout}{answer.stderr}"
        return answer.stdout

    def _copy(self, source: str, target: str, *, several: bool) -> None:
        assert not ignored(source), f".dockerignore keeps {source} out"
        origin = REPOSITORY / source
        place = self.directory / target
        if origin.is_dir():
            shutil.copytree(origin, place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            return
        assert target.endswith("/") or not several
        if target.endswith("/"):
            place.mkdir(parents=True, exist_ok=True)
            place = place / origin.name
        shutil.copyfile(origin, place)


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_the_image_is_lean_and_unprivileged(service: str) -> None:
    stages = parse(REPOSITORY / "docker" / f"{service}.Dockerfile")
    assert len(stages) == 2
    final = stages[-1]
    assert {stage.base for stage in stages} == {"python:3.12-slim"}
    assert final.all("USER") == ["10001:10001"]
    assert [json.loads(argument) for argument in final.all("ENTRYPOINT")] == [[f"lmcache-{service}"]]
    assert final.all("COPY") == [f"--from=build {VENV} {VENV}"]
    assert not {"RUN", "ADD", "HEALTHCHECK", "CMD", "SHELL"} & {instruction for instruction, _ in final.steps}
    assert f"./services/{SERVICES[service]}" in stages[0].all("RUN")[-1]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("service", sorted(SERVICES))
def test_the_image_installs_and_starts(service: str, tmp_path: Path) -> None:
    build = Build(tmp_path)
    build.run(parse(REPOSITORY / "docker" / f"{service}.Dockerfile")[0])
    binaries = tmp_path / VENV.lstrip("/") / "bin"
    version = build.shell([str(binaries / f"lmcache-{service}"), "--version"])
    assert version.startswith(f"lmcache-{service} 0.1.0")
    (packages,) = (tmp_path / VENV.lstrip("/") / "lib").glob("python3.*/site-packages")
    names = {one.name.lower().replace("_", "-") for one in importlib.metadata.distributions(path=[str(packages)])}
    assert {"lmcache-core", "lmcache-servicekit", f"lmcache-{service}"} <= names
    assert not {"torch", "triton", "transformers", "pytest", "pip"} & names
    build.shell([sys.executable, "-m", "pip", "--python", str(binaries / "python"), "check"])
    assert bool(list((packages / "lmcache_core").rglob("*.nbi"))) == (service in WITH_CODECS), "machine code of the codecs"
    serve(binaries / f"lmcache-{service}", service, tmp_path)


def serve(command: Path, service: str, folder: Path) -> None:
    """Run the service until it answers, then stop it as Kubernetes does."""
    prefix = f"LMCACHE_{service.upper()}_"
    env = {f"{prefix}PORT": "0", **{f"{prefix}{name}": value for name, value in SMALL.get(service, {}).items()}}
    env = {name: value.format(folder=folder) for name, value in env.items()}
    ports = folder / "ports.json"
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen([command, "--port-file", ports], env=env, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ports.exists():
            assert process.poll() is None, log.read_text(encoding="utf-8")
            assert time.monotonic() < deadline, f"not listening after {START_TIMEOUT_S} s: {log.read_text(encoding='utf-8')}"
            time.sleep(0.1)
        port = json.loads(ports.read_text(encoding="utf-8"))["port"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=10) as answer:
            assert json.load(answer) == {"status": "ok"}
        process.terminate()
        assert process.wait(timeout=START_TIMEOUT_S) == 0, log.read_text(encoding="utf-8")
    finally:
        process.kill()
        process.wait()
