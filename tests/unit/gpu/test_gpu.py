"""`python -m tests.gpu` without a GPU: it runs, it covers the tree, and it can fail.

`make test-gpu GPU_ARGS=--dry-run` runs every part on a CPU, which takes a minute and more.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import lmcache_kernels
import numpy as np
import pytest
import torch
from lmcache_core.gpu_connectors import PagedGPUConnector
from lmcache_core.serde.chunk_codec import Profile
from lmcache_core.sidecar import SidecarChunkStore

from tests.fixtures import cuda_streams
from tests.fixtures.fake_vllm import imported_connector
from tests.gpu import __main__ as command
from tests.gpu import connectors, estimates, faults, figures, kernels, streams, table, vllm
from tests.gpu.__main__ import FAILED, PARTS, WRONG, run_apart, run_part, worst
from tests.gpu.estimates import LLAMA
from tests.gpu.report import Report, WrongBytes, read_lines
from tests.gpu.wrong_bytes import is_comparison

ROOT = Path(__file__).resolve().parents[3]
COMMAND = [sys.executable, "-m", "tests.gpu"]


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report(tmp_path / "gpu.jsonl", "faults", "cpu")


# --- The command ----------------------------------------------------------------------------------


def test_a_dry_run_passes(tmp_path: Path) -> None:
    options = ["--dry-run", "--parts", "facts,connectors", "--out", tmp_path]
    done = subprocess.run([*COMMAND, *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = read_lines(tmp_path / "gpu.jsonl")
    passed = [line["part"] for line in lines if line["name"] == "outcome" and line["code"] == 0]
    assert passed == ["facts", "connectors"]
    assert sum("checked_bytes" in line for line in lines) > 15
    machine, (rows, *_) = table.section_of(lines)
    assert "torch" in machine
    assert rows.count("\n") > 5


def test_all_parts_fit_into_two_calls() -> None:
    *others, last = PARTS.values()
    assert sum(others) <= 540  # of 600: the rest is for starting them
    assert last <= 600


def test_the_list_names_every_kernel_check_and_profile() -> None:
    folder = Path(lmcache_kernels.__path__[0])
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    assert packages == set(kernels.KERNELS)
    assert packages | {f"cachegen:{profile}" for profile in Profile} == set(kernels.described())
    files = {file for files in kernels.KERNELS.values() for file in files}
    assert files == {path.name for path in kernels.CHECKS.glob("check_*.py")}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--dry-run", "--parts", "facts,figure"], "no part is named figure"),
        pytest.param(
            [],
            "torch sees no CUDA device; --dry-run",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_what_cannot_run_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    error: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["tests.gpu", *options])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("codes", "code"),
    [([0, WRONG, FAILED], WRONG), ([FAILED, 0], FAILED), ([0, 0], 0), ([], 0)],
)
def test_a_wrong_byte_is_not_hidden_by_another_failure(codes: list[int], code: int) -> None:
    assert worst(codes) == code


def test_an_error_is_not_a_wrong_byte(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Report) -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr(faults, "run", fail)
    with pytest.raises(RuntimeError, match="no driver"):
        run_part(report)
    assert not read_lines(report.path)
    assert run_apart(report, 60.0, ["false"]) == FAILED
    assert read_lines(report.path)[-1]["text"] == "ended with code 1"


def test_a_part_that_hangs_is_killed_and_keeps_its_lines(
    report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    report.note("before")
    assert run_apart(report, 0.2, ["sleep", "600"]) == FAILED
    assert [line["name"] for line in read_lines(report.path)] == ["before", "outcome"]
    assert "killed after 0.2 s" in capsys.readouterr().out


def test_wrong_bytes_of_a_part_that_then_hangs_count(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hanging:
        def __init__(self, *_: object, **__: object) -> None:
            report.note("outcome", text="wrong bytes", code=WRONG)

        def wait(self, limit_s: float) -> int:
            raise subprocess.TimeoutExpired("part", limit_s)

        def poll(self) -> int:
            return 0

    monkeypatch.setattr(subprocess, "Popen", Hanging)
    assert run_apart(report, 1.0, ["part"]) == WRONG


# --- Wrong bytes ----------------------------------------------------------------------------------


def test_a_wrong_byte_of_a_load_is_distinguished(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_gpu = PagedGPUConnector.to_gpu

    def wrong(connector: PagedGPUConnector, memory: Any, *args: int, **kwargs: Any) -> None:
        memory.byte_array[0] ^= 1
        try:
            to_gpu(connector, memory, *args, **kwargs)
        finally:
            memory.byte_array[0] ^= 1

    monkeypatch.setattr(PagedGPUConnector, "to_gpu", wrong)
    with pytest.raises(WrongBytes, match="bfloat16 NHD split"):
        connectors.run(report)


@pytest.mark.parametrize("part", [streams, faults])
def test_wrong_kv_in_the_engine_is_distinguished(
    report: Report, monkeypatch: pytest.MonkeyPatch, part: ModuleType
) -> None:
    class Late(streams.Engine):
        """Whose blocks are written again after each step."""

        def step(self) -> bool:
            for worker in self.workers:
                for pages in worker.memory.by_name.values():
                    pages.add_(1)
            return super().step()

    monkeypatch.setattr("tests.fixtures.vllm_engine.engine.Engine", Late)
    with pytest.raises(WrongBytes, match="reads wrong KV"):
        part.run(report)


def test_only_a_failed_comparison_of_a_check_is_a_wrong_byte(tmp_path: Path) -> None:
    checks = tmp_path / "checks"
    checks.mkdir()
    source = "def check(): assert [1] == [2]\ndef compile(): raise RuntimeError('no compiler')\n"
    found: dict[str, Any] = {}
    exec(compile(source, str(checks / "check_bytes.py"), "exec"), found)

    def raised(work: Any) -> Exception:
        with pytest.raises(Exception) as excinfo:
            work()
        return excinfo.value

    wrong, other = raised(found["check"]), raised(found["compile"])
    close = raised(lambda: torch.testing.assert_close(torch.ones(1), torch.zeros(1)))
    group = ExceptionGroup("several", [other, wrong])  # type: ignore[list-item]
    assert [is_comparison(one, checks) for one in (wrong, close, group)] == [True] * 3
    library = raised(lambda: np.testing.assert_equal(1, 2))
    assert [is_comparison(one, checks) for one in (other, library)] == [False] * 2


def test_a_check_with_a_wrong_byte_ends_as_such(report: Report) -> None:
    """Although another check cannot run at all."""
    path = report.path.with_name("check_bytes.py")
    wrong = "def test_byte(): assert [1] == [2]\n"
    path.write_text(f"def test_run(): raise RuntimeError('no compiler')\n{wrong}")
    with pytest.raises(WrongBytes, match="check_bytes"):
        kernels.check(report, path)


def test_wrong_bytes_of_a_later_file_are_not_hidden(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(_: Report, path: Path) -> None:
        raise {"a": RuntimeError, "b": WrongBytes}[path.name](path.name)

    monkeypatch.setattr(kernels, "DRY", ("a", "b"))
    monkeypatch.setattr(kernels, "check", check)
    with pytest.raises(WrongBytes, match="b"):
        kernels.run(report)


def test_a_sidecar_that_is_not_hit_is_an_error(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "KILLED", {"nothing": ("another thread", {})})
    with pytest.raises(AssertionError, match="another thread has copied nothing"):
        faults.run(report)


def test_an_installed_vllm_does_not_replace_the_stand_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("raise RuntimeError('the installed one')")
    monkeypatch.syspath_prepend(tmp_path)
    with imported_connector() as module:
        assert module.LMCacheConnector


# --- Figures --------------------------------------------------------------------------------------


def test_figures_are_of_a_sidecars_arena(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "SHAPES", dict(list(figures.SHAPES.items())[:1]))
    pins = []
    monkeypatch.setattr(SidecarChunkStore, "pin_memory", lambda *args: pins.append(args))
    figures.run(report)
    names = [line["name"] for line in read_lines(report.path) if "rate" in line]
    for arena, verify_hot in itertools.product(("pageable", "pinned"), ("always", "never")):
        for what in ("store", "load"):
            assert f"{LLAMA}: {what}, {arena} arena, verify_hot {verify_hot}" in names
    assert len(pins) == 2


def test_stores_during_matrix_products_have_a_stream_of_their_own(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = cuda_streams.install(monkeypatch)
    used, stored_on = [], []
    monkeypatch.setattr(torch, "mm", lambda *_: used.append(runtime.current()))
    case: Any = SimpleNamespace(store=lambda turn: stored_on.append(runtime.current()))
    figures.contention(report, "model", case)
    assert set(used) == {runtime.compute}
    assert runtime.compute not in stored_on
    assert len(set(stored_on)) == 1


class Scripted:
    """An engine with scripted answers.

    Args:
        reloaded: What differs about a prompt after the reset of the prefix cache.
    """

    def __init__(self, **reloaded: object) -> None:
        self._reloaded = reloaded
        self._is_reset = False

    def engine(self, *_: object) -> Scripted:
        return self

    def open(self, *_: object, **__: object) -> None: ...

    def reset(self) -> None:
        self._is_reset = True

    def kill(self) -> None: ...

    def call(self, _: float, do: str, **arguments: Any) -> dict[str, Any]:
        if do == "serve":
            return {"steps": [0.002, 0.004], "first": [0.01] * len(arguments["requests"])}
        answer = {"seconds": 0.5, "num_cached": 1024, "tokens": [1], "kv": "ab"}
        return answer | (self._reloaded if self._is_reset else {})


def measured(report: Report, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    growth = SimpleNamespace(reaches=lambda number: None)
    monkeypatch.setattr("tests.vllm.sidecars.sidecar", lambda *_, **__: "sidecar")
    monkeypatch.setattr("tests.vllm.sidecars.Growth", lambda service: growth)
    engine.directory = report.path.parent
    paths = report.path.parent, report.path.parent
    vllm.measure(report, "ours", engine, *paths, vllm.DRY_SIZES)


def test_a_real_vllm_must_load_what_it_computed(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kv in ("", "cd"):
        with pytest.raises(WrongBytes, match="other KV was loaded than was computed"):
            measured(report, Scripted(kv=kv), monkeypatch)
    with pytest.raises(AssertionError, match="ours: 768 tokens were loaded"):
        measured(report, Scripted(num_cached=768), monkeypatch)


# --- The page -------------------------------------------------------------------------------------


def test_figures_of_a_real_vllm_are_a_table_of_their_own(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    report.note("vLLM", text="1.2.3")
    measured(report, Scripted(), monkeypatch)
    _, (_, engines, _, _) = table.section_of(read_lines(report.path))
    heading, _, row = engines.splitlines()
    assert heading.startswith("| vLLM 1.2.3, ms | cold | prefix cache | after its reset |")
    assert row.startswith("| ours | 500.0 | 500.0 | 500.0 |")


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
