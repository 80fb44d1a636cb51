"""`python -m tests.gpu` without a GPU: it runs, it covers the tree, and it can fail.

`make test-gpu GPU_ARGS=--dry-run` runs every part on a CPU, which takes a minute and more.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lmcache_kernels
import numpy as np
import pytest
import torch
from lmcache_core.gpu_connectors import PagedGPUConnector
from lmcache_core.serde.chunk_codec import Profile

from tests.gpu import __main__ as command
from tests.gpu import connectors, estimates, kernels, streams, table
from tests.gpu.__main__ import FAILED, PARTS, WRONG, run_apart, worst
from tests.gpu.pytests import run_pytest
from tests.gpu.report import Report, WrongBytes, read_lines
from tests.gpu.wrong_bytes import WRONG_BYTES, is_comparison


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report(tmp_path / "gpu.jsonl", "faults", "cpu")


# --- The command ----------------------------------------------------------------------------------


def test_a_dry_run_passes(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part as its own process runs it."""
    for part in ("facts", "connectors"):
        options = ["--dry-run", "--part", part, "--out", str(report.path.parent)]
        monkeypatch.setattr(sys, "argv", ["tests.gpu", *options])
        assert command.main() == 0
    lines = read_lines(report.path)
    passed = [line["part"] for line in lines if line["name"] == "outcome" and line["code"] == 0]
    assert passed == ["facts", "connectors"]
    assert sum("checked_bytes" in line for line in lines) > 15
    machine, (rows, *_) = table.section_of(lines)
    assert "torch" in machine
    assert rows.count("\n") > 5


def test_all_parts_fit_into_three_calls() -> None:
    *others, vllm, sglang = PARTS.values()
    assert sum(others) <= 540  # of 600: the rest is for starting them
    assert max(vllm, sglang) <= 600


def test_the_list_names_every_kernel_check_and_profile() -> None:
    folder = Path(lmcache_kernels.__path__[0])
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    assert packages == set(kernels.KERNELS)
    assert packages | {f"cachegen:{profile}" for profile in Profile} == set(kernels.described())
    files = {file for files in kernels.KERNELS.values() for file in files}
    assert files == {path.name for path in kernels.CHECKS.glob("check_*.py")}


@pytest.mark.parametrize(
    ("codes", "code"), [([0, WRONG, FAILED], WRONG), ([FAILED, 0], FAILED), ([0, 0], 0), ([], 0)]
)
def test_a_wrong_byte_is_not_hidden_by_another_failure(codes: list[int], code: int) -> None:
    assert worst(codes) == code


def test_an_error_is_not_a_wrong_byte(report: Report) -> None:
    assert run_apart(report, 60.0, ["false"]) == FAILED
    assert read_lines(report.path)[-1]["text"] == "ended with code 1"


def test_a_part_that_hangs_is_killed_and_keeps_its_lines(
    report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    report.note("before")
    assert run_apart(report, 0.2, ["sleep", "600"]) == FAILED
    assert [line["name"] for line in read_lines(report.path)] == ["before", "outcome"]
    assert "killed after 0.2 s" in capsys.readouterr().out


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


def test_wrong_kv_in_the_engine_is_distinguished(
    report: Report, monkeypatch: pytest.MonkeyPatch
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
        streams.run(report)


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


@pytest.mark.long
@pytest.mark.parametrize("processes", [(), ("-n", "2")], ids=["one process", "two"])
def test_a_wrong_byte_decides_the_code_in_whatever_process(
    tmp_path: Path, processes: tuple[str, ...]
) -> None:
    checks, config = tmp_path / "test_bytes.py", tmp_path / "pytest.ini"
    config.write_text("[pytest]\n")
    compiles = "def test_compiling(): raise RuntimeError('no compiler')\n"
    checks.write_text(f"{compiles}def test_bytes(): assert [1] == [2]\n")
    assert run_pytest(config, *processes, checks).returncode == WRONG_BYTES
    checks.write_text(compiles)
    assert run_pytest(config, *processes, checks).returncode == 1


# --- The page -------------------------------------------------------------------------------------


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
