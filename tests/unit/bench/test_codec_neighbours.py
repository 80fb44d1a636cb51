"""Who else uses the machine."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.bench.codec_neighbours import Neighbours, busy_ticks


def test_idle_and_waiting_are_not_busy():
    assert (
        busy_ticks("cpu  1 2 4 1000 2000 8 16 32 64 128\ncpu0 9 9 9 9 9 9 9 9 9 9\n")
        == 1 + 2 + 4 + 8 + 16 + 32
    )


def test_another_process_is_counted():
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        with Neighbours() as others:
            time.sleep(1.0)
    finally:
        busy.kill()
        busy.wait()
    assert others.cores > 0.3  # it shares the machine with whatever else runs


@pytest.mark.parametrize(("own_s", "cores"), [(3.0, 0.0), (1.0, 1.0)])
def test_what_this_process_did_is_taken_off(monkeypatch, tmp_path, own_s, cores):
    stat = tmp_path / "stat"
    stat.write_text("cpu  0 0 0 0 0 0 0 0\n")
    own, wall = iter([0.0, own_s]), iter([0.0, 2.0])
    monkeypatch.setattr("tests.bench.codec_neighbours.PROC_STAT", stat)
    monkeypatch.setattr("tests.bench.codec_neighbours.os.sysconf", lambda _name: 100)
    monkeypatch.setattr("tests.bench.codec_neighbours.time.process_time", lambda: next(own))
    monkeypatch.setattr("tests.bench.codec_neighbours.time.perf_counter", lambda: next(wall))
    with Neighbours() as others:
        stat.write_text("cpu  300 0 0 500 0 0 0 0\n")
    assert others.cores == pytest.approx(cores)
