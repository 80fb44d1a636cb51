"""The traffic of `make test-cluster` against real services, and its oracle: what goes wrong must
come out.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.cluster.oracle import Report
from tests.fixtures.completions import CompletionsServer, completions_server
from tests.fixtures.service_process import ServiceProcess, running_service
from tests.fixtures.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
KINDS = ("put", "get", "lookup", "broker", "completion")
END_S = 60.0


class Running:
    """A release of real processes, and the traffic on it."""

    def __init__(
        self,
        directory: Path,
        storage: ServiceProcess,
        lookup: ServiceProcess,
        broker: ServiceProcess,
        vllm: CompletionsServer,
    ) -> None:
        self.storage, self.lookup, self.broker, self.vllm = storage, lookup, broker, vllm
        self._stop, self._log = directory / "stop", directory / "traffic.log"
        command = [sys.executable, str(ROOT / "tests/cluster/traffic.py")]
        command += [f"--storage-url=lm://127.0.0.1:{storage.ports['lm_port']}"]
        command += [f"--guarded-url={storage.url}/v1/chunks"]
        command += [f"--guarded-url={lookup.url}/v1/instances"]
        command += [f"--guarded-url={broker.url}/v1/peers"]
        command += [f"--completions-url={vllm.url}", "--model=tiny"]
        command += [f"--stop-file={self._stop}", "--max-seconds=60", "--settle-seconds=3"]
        command += ["--progress-seconds=1.5"]
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        self._until("ready")

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def _until(self, text: str) -> None:
        wait_until(lambda: text in self.log or self.process.poll() is not None)
        assert self.process.poll() is None, self.log

    def until_progress(self) -> None:
        """Wait until it has made some more calls of every kind, by its own figures."""
        wanted = self._num_calls() + 6
        wait_until(lambda: self._num_calls() >= wanted)

    def _num_calls(self) -> int:
        """Return how many calls there were of the kind that had the fewest."""
        printed = [line for line in self.log.splitlines() if line.startswith("{")]
        calls = json.loads(printed[-1]) if printed else {}
        return min((sum(calls[kind].values()) for kind in calls), default=0)

    def finish(self) -> Report:
        self._stop.touch()
        assert self.process.wait(END_S) == 0, self.log
        return Report.parse(self.log)


@contextmanager
def traffic(directory: Path, prompts: set[str] | None = None) -> Iterator[Running]:
    small = {"PORT": "0", "LM_PORT": "0", "MEMORY_GB": "0.125"}
    storage_options = {f"LMCACHE_STORAGE_{name}": value for name, value in small.items()}
    with (
        running_service("lmcache_storage", directory, storage_options) as storage,
        running_service("lmcache_lookup", directory, {"LMCACHE_LOOKUP_PORT": "0"}) as lookup,
        running_service("lmcache_broker", directory, {"LMCACHE_BROKER_PORT": "0"}) as broker,
        completions_server(prompts) as vllm,
    ):
        running = Running(directory, storage, lookup, broker, vllm)
        try:
            yield running
        finally:
            running.process.kill()
            running.process.wait()


def test_a_healthy_release_has_no_problem(tmp_path: Path) -> None:
    with traffic(tmp_path) as running:
        running.until_progress()
        report = running.finish()
        left = httpx.get(f"{running.storage.url}/v1/chunks", trust_env=False).json()
    assert report.problems(KINDS) == []
    assert set(report.disturbed_s.values()) == {0.0}
    num_after = report.acknowledged - report.calls["put"]["ok"] - 1
    assert num_after == 20, "one before, and a steady row after"
    assert left["chunks"] == [], "it removes what it stored"


def test_a_lost_chunk_is_found(tmp_path: Path) -> None:
    with traffic(tmp_path) as running:
        running.until_progress()
        chunks = httpx.get(f"{running.storage.url}/v1/chunks", trust_env=False).json()["chunks"]
        key = chunks[0]["key"]
        httpx.delete(f"{running.storage.url}/v1/chunks/{key}", trust_env=False).raise_for_status()
        report = running.finish()
    (problem,) = report.problems(KINDS)
    assert problem.startswith(f"1 of {report.acknowledged} acknowledged chunks are lost: ")


def test_traffic_that_did_not_happen_is_no_success(tmp_path: Path) -> None:
    report = Report({"get": {"ok": 9, "wrong": 1}, "put": {"ok": 3, "refused": 40}})
    assert report.problems(["put", "get", "lookup"]) == [
        "put: 3 calls succeeded, at least 5 are needed",
        "put: 40 of 43 calls refused",
        "get: 1 calls returned something else",
        "lookup: 0 calls succeeded, at least 5 are needed",
    ]
    with pytest.raises(ValueError, match="printed no report"):
        Report.parse("ready\n{}\n")
