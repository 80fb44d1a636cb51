"""`python -m tests.gpu` without a GPU: it runs, it covers the tree, and it can fail."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import lmcache_kernels
import pytest
import torch
from lmcache_core.gpu_connectors import PagedGPUConnector
from lmcache_core.serde.chunk_codec import Profile
from lmcache_core.sidecar import SidecarChunkStore

from tests.fixtures import cuda_streams
from tests.fixtures.fake_vllm import imported_connector
from tests.gpu import connectors, estimates, faults, figures, kernels, streams, table, vllm
from tests.gpu.__main__ import FAILED, PARTS, WRONG, run_apart, run_part, worst
from tests.gpu.estimates import LLAMA
from tests.gpu.report import Report, WrongBytes, read_lines

ROOT = Path(__file__).resolve().parents[3]
COMMAND = [sys.executable, "-m", "tests.gpu"]


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report(tmp_path / "gpu.jsonl", "faults", "cpu")


@pytest.mark.timeout(600)
def test_a_dry_run_passes(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--dry-run", "--out", tmp_path], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = read_lines(tmp_path / "gpu.jsonl")
    passed = [line["part"] for line in lines if line["name"] == "outcome" and line["code"] == 0]
    assert passed == list(PARTS)
    killed = {line["name"]: line for line in lines if "killed during" in line["name"]}
    assert set(killed) == {f"sidecar killed during {name}" for name in faults.KILLED}
    assert all(line["loaded_after"] for line in killed.values())
    assert sum("checked_bytes" in line for line in lines) > 20
    for number, shape in itertools.product((1, 2, 4), figures.SHAPES):
        of_shape = [line for line in lines if line["name"].startswith(f"{shape}:")]
        end = f"bare, {number} chunks in flight"
        assert [line["name"].endswith(end) for line in of_shape].count(True) == 2
    left_out = [line for line in lines if line["part"] == "vllm"]
    assert left_out[0]["text"] == "vLLM is not installed for this Python"  # make test-vllm runs it
    machine, (rows, others, _, left) = table.section_of(lines)
    assert "torch" in machine
    assert rows.count("\n") > 20
    assert f"| {LLAMA}: matrix products during stores | " in others
    on_a_gpu = "GPU: ", "pin ", "ours"
    for estimate in estimates.ESTIMATES:
        is_measured = estimate.measured_by and not estimate.measured_by.startswith(on_a_gpu)
        assert (f"| {estimate.what} |" in left) is not is_measured


def test_all_parts_fit_into_two_calls() -> None:
    *others, last = PARTS.values()
    assert sum(others) <= 540  # of 600: the rest is for starting them
    assert last <= 600


class Scripted:
    """An engine that answers as it is told to.

    Args:
        reloaded: What differs about a prompt after the reset of the prefix cache.
    """

    def __init__(self, **reloaded: object) -> None:
        self._reloaded = reloaded
        self._is_reset = False

    def engine(self, *_: object) -> Scripted:
        return self

    def open(self, *_: object, **__: object) -> None:
        pass

    def reset(self) -> None:
        self._is_reset = True

    def kill(self) -> None:
        pass

    def call(self, _: float, do: str, **arguments: Any) -> dict[str, Any]:
        if do == "serve":
            return {"steps": [0.002, 0.004], "first": [0.01] * len(arguments["requests"])}
        told = {"seconds": 0.5, "num_cached": 1024, "tokens": [1], "kv": "ab"}
        return told | (self._reloaded if self._is_reset else {})


def measured(report: Report, engine: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    growth = SimpleNamespace(reaches=lambda number: None)
    monkeypatch.setattr("tests.vllm.sidecars.sidecar", lambda *_, **__: "sidecar")
    monkeypatch.setattr("tests.vllm.sidecars.Growth", lambda service: growth)
    engine.directory = report.path.parent  # type: ignore[attr-defined]
    paths = report.path.parent, report.path.parent
    vllm._measure(report, "ours", engine, *paths, vllm.DRY_SIZES)


@pytest.mark.parametrize("kv", ["", "cd"])
def test_wrong_kv_in_a_real_vllm_is_told_apart(
    report: Report, monkeypatch: pytest.MonkeyPatch, kv: str
) -> None:
    with pytest.raises(WrongBytes, match="other KV was loaded than was computed"):
        measured(report, Scripted(kv=kv), monkeypatch)


def test_nothing_loaded_in_a_real_vllm_is_an_error(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError, match="ours: 768 tokens were loaded"):
        measured(report, Scripted(num_cached=768), monkeypatch)


def test_figures_of_a_real_vllm_are_a_table_of_their_own(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    report.note("vLLM", text="1.2.3")
    measured(report, Scripted(), monkeypatch)
    _, (_, engines, _, _) = table.section_of(read_lines(report.path))
    heading, _, row = engines.splitlines()
    assert heading.startswith("| vLLM 1.2.3, ms | cold | prefix cache | after its reset |")
    assert row.startswith("| ours | 500.0 | 500.0 | 500.0 |")


def test_the_list_names_every_kernel_check_and_profile() -> None:
    done = subprocess.run(
        [*COMMAND, "--list"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    named = set(done.stdout.split())
    packages = {
        path.parent.name for path in Path(lmcache_kernels.__path__[0]).glob("*/__init__.py")
    }
    assert packages
    assert packages == set(kernels.KERNELS)
    assert packages | {f"cachegen:{profile}" for profile in Profile} <= named
    files = {file for files in kernels.KERNELS.values() for file in files}
    assert files == {path.name for path in kernels.CHECKS.glob("check_*.py")}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run(COMMAND, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "torch sees no CUDA device; --dry-run" in done.stderr


def test_stores_beside_matrix_products_have_a_stream_of_their_own(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = cuda_streams.install(monkeypatch)
    used = []
    monkeypatch.setattr(torch, "mm", lambda *_: used.append(runtime.current()))
    stored_on = []
    case = SimpleNamespace(store=lambda turn: stored_on.append(runtime.current()))
    figures._contention(report, "model", case)  # type: ignore[arg-type]
    assert set(used) == {runtime.compute}
    assert stored_on
    assert runtime.compute not in stored_on
    assert len(set(stored_on)) == 1
    assert read_lines(report.path)[-1]["times_longer"] > 0


def test_a_failed_store_beside_matrix_products_is_an_error(report: Report) -> None:
    def fail(_: int) -> None:
        raise AssertionError("nothing was stored")

    with pytest.raises(AssertionError, match="nothing was stored"):
        figures._contention(report, "model", SimpleNamespace(store=fail))  # type: ignore[arg-type]


def test_figures_are_of_a_sidecars_arena(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "SHAPES", dict(list(figures.SHAPES.items())[:1]))
    pins, opened = [], []
    monkeypatch.setattr(SidecarChunkStore, "pin_memory", lambda *args: pins.append(args))
    open_store = SidecarChunkStore.open
    monkeypatch.setattr(
        SidecarChunkStore, "open", lambda *args: (opened.append(args[0]), open_store(*args))
    )
    figures.run(report)
    names = [line["name"] for line in read_lines(report.path) if "rate" in line]
    for arena, verify_hot in itertools.product(("pageable", "pinned"), ("always", "never")):
        for what in ("store", "load"):
            assert f"Llama-3.1-8B: {what}, {arena} arena, verify_hot {verify_hot}" in names
    assert len(opened) == 4
    assert len(pins) == 2


def test_wrong_values_of_a_timed_kernel_are_wrong_bytes(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise AssertionError("other values from 2 chunks")

    monkeypatch.setattr(figures, "_in_flight", lambda *_: None)
    monkeypatch.setattr(figures, "_arenas", lambda *_: None)
    monkeypatch.setattr(figures.codec_device, "gpu_figures", fail)
    with pytest.raises(WrongBytes, match="other values from 2 chunks"):
        figures.run(report)


def test_an_unknown_part_is_named() -> None:
    done = subprocess.run(
        [*COMMAND, "--dry-run", "--parts", "facts,figure"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "no part is named figure" in done.stderr


def spoil(monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte of every load is another."""
    to_gpu = PagedGPUConnector.to_gpu

    def wrong(connector: PagedGPUConnector, memory: object, *args: int, **kwargs: object) -> None:
        content = memory.byte_array  # type: ignore[attr-defined]
        content[0] ^= 1
        try:
            to_gpu(connector, memory, *args, **kwargs)  # type: ignore[arg-type]
        finally:
            content[0] ^= 1

    monkeypatch.setattr(PagedGPUConnector, "to_gpu", wrong)


def test_a_wrong_byte_is_told_apart(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch)
    with pytest.raises(WrongBytes, match="bfloat16 NHD split"):
        connectors.run(report)
    assert run_part(report) == WRONG
    assert read_lines(report.path)[-1]["code"] == WRONG


@pytest.mark.parametrize("part", [streams, faults])
def test_wrong_kv_in_the_engine_is_told_apart(
    report: Report, monkeypatch: pytest.MonkeyPatch, part: ModuleType
) -> None:
    class Late(streams.Engine):
        """Whose blocks are written again behind each step."""

        def step(self) -> bool:
            for worker in self.workers:
                for pages in worker.memory.by_name.values():
                    pages.add_(1)
            return super().step()

    monkeypatch.setattr("tests.fixtures.vllm_engine.engine.Engine", Late)
    with pytest.raises(WrongBytes, match="reads wrong KV"):
        part.run(report)


def test_an_installed_vllm_does_not_replace_the_stand_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("raise RuntimeError('the installed one')")
    monkeypatch.syspath_prepend(tmp_path)
    with imported_connector() as module:
        assert module.LMCacheConnector


def test_a_sidecar_that_is_not_hit_is_an_error(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "KILLED", {"nothing": ("another thread", {})})
    with pytest.raises(AssertionError, match="another thread has copied nothing"):
        faults.run(report)


def test_an_error_is_no_wrong_byte(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Report) -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr(faults, "run", fail)
    with pytest.raises(RuntimeError, match="no driver"):
        run_part(report)
    assert not read_lines(report.path)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert run_apart(report, 30.0) == FAILED
    assert read_lines(report.path)[-1]["text"] == "ended with code 1"


@pytest.mark.parametrize(
    ("codes", "code"),
    [([0, WRONG, FAILED], WRONG), ([FAILED, 0], FAILED), ([0, 0], 0), ([], 0)],
)
def test_a_wrong_byte_is_not_hidden_by_another_failure(codes: list[int], code: int) -> None:
    assert worst(codes) == code


def test_wrong_bytes_of_a_part_that_then_hangs_are_told(tmp_path: Path) -> None:
    report = Report(tmp_path / "gpu.jsonl", "streams", "cpu")
    line = json.dumps({"part": "streams", "name": "outcome", "text": "wrong bytes", "code": WRONG})
    command = ["sh", "-c", f"echo '{line}' >> {report.path}; sleep 60"]
    assert run_apart(report, 1.0, command) == WRONG


CHECK = """
import pytest

@pytest.mark.parametrize("what", {whats})
def test_kernel(what):
    if what == "byte":
        assert [1] == [2]
    if what == "compilation":
        raise RuntimeError("cannot compile")
    if what == "memory":
        import torch
        torch.empty(1 << 60)
    if what == "assertion of a library":
        import unittest
        unittest.TestCase().assertEqual(1, 2)
    if what == "several":
        raise ExceptionGroup("several", [RuntimeError("cannot compile"), check()])
    if what == "close":
        import torch
        torch.testing.assert_close(torch.ones(1), torch.zeros(1))

def check():
    try:
        assert [1] == [2]
    except AssertionError as exc:
        return exc
"""


@pytest.mark.parametrize(
    ("whats", "error"),
    [
        (["several"], WrongBytes),
        (["close"], WrongBytes),
        (["byte", "compilation"], WrongBytes),
        (["compilation", "memory", "assertion of a library"], RuntimeError),
    ],
)
def test_only_a_failed_comparison_of_a_check_is_a_wrong_byte(
    report: Report, monkeypatch: pytest.MonkeyPatch, whats: list[str], error: type[Exception]
) -> None:
    path = report.path.parent / "tests/check_bytes.py"
    path.parent.mkdir()
    path.write_text(CHECK.format(whats=whats))
    monkeypatch.setattr(kernels, "CHECKS", path.parent)
    with pytest.raises(error, match="check_bytes"):
        kernels.check(report, path)


def test_wrong_bytes_of_a_later_file_are_not_hidden(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = []

    def check(_: Report, path: Path) -> None:
        checked.append(path.name)
        raise {"a": RuntimeError, "b": WrongBytes}[path.name](path.name)

    monkeypatch.setattr(kernels, "DRY", ("a", "b"))
    monkeypatch.setattr(kernels, "check", check)
    with pytest.raises(WrongBytes, match="b"):
        kernels.run(report)
    assert checked == ["a", "b"]


def test_a_part_that_hangs_is_killed_and_keeps_its_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report(tmp_path / "gpu.jsonl", "streams", "cpu")
    report.note("before")
    assert run_apart(report, 0.2) == FAILED
    assert [line["name"] for line in read_lines(report.path)] == ["before", "outcome"]
    assert "killed after 0.2 s" in capsys.readouterr().out


def test_the_page_has_the_estimates_of_what_is_not_measured() -> None:
    page = table.PAGE.read_text(encoding="utf-8")
    section = page.partition("<!-- gpu: begin -->")[2].partition("<!-- gpu: end -->")[0]
    rows = section.partition(estimates.HEAD)[2].strip().splitlines()
    measurable = [one.measured_by for one in estimates.ESTIMATES if one.measured_by]
    known, expected = (
        set(estimates.table_of(measured).splitlines()[1:]) for measured in ([], measurable)
    )
    assert estimates.INTRODUCTION in section
    assert expected <= set(rows) <= known


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ({"name": f"{LLAMA}: load, pinned arena, verify_hot never", "rate": 50.0}, "pinned"),
        ({"name": "pin 8192 MiB of shared memory", "seconds": 0.8, "is_pinned": True}, "100 GB"),
        ({"name": f"{LLAMA}: matrix products during stores", "times_longer": 1.02}, "in the step"),
    ],
)
def test_a_measured_row_replaces_its_estimate(line: dict[str, Any], what: str) -> None:
    facts = {"part": "figures", "share": None} | line
    _, (*measured, introduction, left) = table.section_of([facts])
    assert introduction == estimates.INTRODUCTION
    assert f"| {line['name']} |" in "".join(measured)
    gone = set(estimates.table_of([]).splitlines()) - set(left.splitlines())
    assert len(gone) == 1
    assert what in gone.pop()


def test_the_table_names_gpu_driver_and_link(report: Report) -> None:
    facts = replace(report, part="facts")
    facts.note("torch", text="2.11.0+cu130")
    facts.note("nvidia-smi", text="NVIDIA H100 80GB HBM3, 580.95.05, 81559 MiB, 5, 16, 9.0")
    facts.note("outcome", text="passed", code=0)
    machine, _ = table.section_of(read_lines(report.path))
    assert machine == (
        "NVIDIA H100 80GB HBM3, 81559 MiB, driver 580.95.05, PCIe 5 x16; torch 2.11.0+cu130."
        " Parts: facts passed."
    )
