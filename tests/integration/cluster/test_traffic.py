"""The traffic of `make test-cluster` against real services, and its oracle: what goes wrong must
come out.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.cluster.ask import complete, prompt
from tests.cluster.oracle import Report, hit_problems
from tests.fixtures.completions import CompletionsServer, completions_server
from tests.fixtures.service_process import ServiceProcess, running_service

ROOT = Path(__file__).resolve().parents[3]
KINDS = ("put", "get", "lookup", "broker", "completion")
START_S = 60.0
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
        deadline = time.monotonic() + START_S
        while text not in self.log:
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)

    def until_progress(self) -> None:
        """Wait until it has made some more calls of every kind, by its own figures."""
        wanted = self._num_calls() + 6
        deadline = time.monotonic() + START_S
        while self._num_calls() < wanted:
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)

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


def test_failed_requests_are_found(tmp_path: Path) -> None:
    with traffic(tmp_path) as running:
        running.vllm.fails = True
        running.until_progress()
        running.vllm.fails = False
        running.lookup.stop()
        running.until_progress()
        report = running.finish()
    problems = report.problems(KINDS)
    assert [problem.partition(":")[0] for problem in problems] == ["lookup", "completion", "lookup"]
    assert "calls failed: ['lookup after " in problems[0]
    assert "HTTP Error 500" in problems[1]
    assert problems[2] == "lookup: did not recover"
    allowed = dict.fromkeys(KINDS, END_S)
    assert report.problems(KINDS, may_fail=allowed) == ["lookup: did not recover"]


def test_disturbances_are_timed(tmp_path: Path) -> None:
    """A few good calls in between do not end one."""
    with traffic(tmp_path) as running:
        begin = time.monotonic()
        for num_refused in (1, 2):
            running.vllm.fails = True
            while running.vllm.num_refused < num_refused:
                assert time.monotonic() < begin + START_S, running.log
                time.sleep(0.05)
            running.vllm.fails = False
            time.sleep(1)
        lasted_s = time.monotonic() - begin
        report = running.finish()
    disturbed_s = report.disturbed_s["completion"]
    assert 1 < disturbed_s < lasted_s
    assert report.problems(KINDS, may_fail={"completion": lasted_s}) == []
    (problem,) = report.problems(KINDS, may_fail={"completion": 1.0})
    assert re.fullmatch(r"completion: disturbed for \d s, not at most 1 s", problem)


def test_an_answer_to_compare_with_is_computed(tmp_path: Path) -> None:
    """Another run, or a wrong key, may have left what a new prompt is answered with."""
    with traffic(tmp_path) as running:
        running.vllm.knows_all = True
        running.until_progress()
        running.vllm.knows_all = False
        report = running.finish()
    (problem,) = report.problems(KINDS)
    assert re.fullmatch(r"completion: \d+ new prompts were found in the cache", problem)


def test_prompts_are_those_of_one_run(tmp_path: Path) -> None:
    shared: set[str] = set()
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        with traffic(tmp_path / name, shared) as running:
            running.until_progress()
            assert running.finish().problems(KINDS) == []


def test_a_result_is_missed_only_where_that_is_allowed() -> None:
    calls = {
        kind: {"ok": 9, outcome: 1} for kind, outcome in (("get", "missed"), ("put", "refused"))
    }
    report = Report({**calls, "lookup": {"ok": 9, "degraded": 2, "failed": 1}})
    expected = ["get: 1 of 10 calls missed", "put: 1 of 10 calls refused"]
    assert report.problems(["get", "put"]) == expected
    assert report.problems(["get", "put"], may_miss={"get": 1}) == expected[1:]
    assert report.problems(["get", "put"], may_fail={"get": 1, "put": 1}) == []
    (failed,) = report.problems(["lookup"], may_miss={"lookup": 1})
    assert failed.startswith("lookup: 1 of 12 calls failed"), "a failure is more than a miss"


def test_a_few_lookups_may_be_degraded_at_any_time() -> None:
    """No share of anything else is: a chunk that was acknowledged is there."""
    for num_degraded, problems in (
        (0, []),
        (2, []),
        (3, ["lookup: 3 of 100 calls degraded, at most 2% may be"]),
    ):
        calls = {"ok": 100 - num_degraded, "degraded": num_degraded}
        assert Report({"lookup": calls}).problems(["lookup"]) == problems
    for kind, outcome in (("get", "missed"), ("put", "refused"), ("lookup", "failed")):
        assert Report({kind: {"ok": 9999, outcome: 1}}).problems([kind])


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


async def test_an_answer_that_breaks_off_is_a_failure() -> None:
    """As when vLLM is killed."""
    with completions_server() as vllm:
        vllm.breaks_off = True
        with pytest.raises(OSError, match="IncompleteRead"):
            await asyncio.to_thread(complete, vllm.url, "tiny", prompt(1, 100))


async def test_a_hit_must_be_one() -> None:
    tokens = prompt(1, 1000)
    shared: set[str] = set()
    with completions_server(shared) as one, completions_server(shared) as other:
        first, second, third = [
            await asyncio.to_thread(complete, url, "tiny", tokens)
            for url in (one.url, other.url, one.url)
        ]
    with completions_server() as alone:
        miss = await asyncio.to_thread(complete, alone.url, "tiny", tokens)
        different = await asyncio.to_thread(complete, alone.url, "tiny", prompt(2, 1000))
    assert hit_problems(first, second) == []
    assert hit_problems(second, third) == [
        "the first pod found 768 tokens of a prompt that was to be new"
    ]
    assert hit_problems(first, miss) == ["the second pod reused 0 tokens, not 768"]
    assert len(hit_problems(first, different)) == 2, "other text, and no hit"
