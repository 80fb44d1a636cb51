"""The rates of kernels, on a CPU and small: what is measured, and that a wrong one is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache_core.serde.tables import bell_curves
from lmcache_kernels.cachegen_decode import cachegen_decode_reference

from tests.bench import measure
from tests.gpu import kernel_rates
from tests.gpu.report import Report, WrongBytes, read_lines

SIZES = kernel_rates.Sizes(1, 640, 1, 2, 64, (1, 2), ((3, 100),), 2)


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    def decode(encoded: Any, scales: Any, levels: Any, shape: Any, _: Any, *rest: Any) -> Any:
        alphabets = {level: bell_curves().of(level) for level in levels}
        return cachegen_decode_reference(encoded, scales, levels, shape, alphabets, *rest)

    monkeypatch.setattr(kernel_rates, "cachegen_decode", decode)
    monkeypatch.setattr(kernel_rates, "timed", lambda work: measure.timed(work, rounds=1))
    return Report(tmp_path / "gpu.jsonl", "figures", "cpu")


def test_every_kernel_has_a_rate(report: Report) -> None:
    kernel_rates.run(report, SIZES)
    names = [line["name"] for line in read_lines(report.path) if line["share"] is not None]
    assert [name.partition(", 3 x 100")[0] for name in names] == [
        "GPU: paged gather",
        "GPU: paged scatter",
        *(
            f"GPU: cachegen {profile}: decode, {number} chunks a launch"
            for profile in kernel_rates.Profile
            for number in (1, 2)
        ),
        "GPU: rope_rotate",
        "GPU: blend_deviation",
        "GPU: rope_rotate, in plain torch",
        "GPU: blend_deviation, in plain torch",
        "GPU: blend_select",
    ]


@pytest.mark.parametrize(
    ("part", "kernel", "wrong"),
    [
        ("paged", "paged_scatter", lambda *_: None),
        ("codec", "cachegen_decode", lambda *_: None),
        ("blend", "rope_rotate", lambda k, _: k.clone()),
        ("blend", "blend_deviation", lambda fresh, *_: torch.zeros(len(fresh))),
        ("blend", "blend_select", lambda _, is_valid, *__: ~is_valid),
    ],
)
def test_a_wrong_kernel_is_not_reported(
    report: Report, monkeypatch: pytest.MonkeyPatch, part: str, kernel: str, wrong: Any
) -> None:
    monkeypatch.setattr(kernel_rates, kernel, wrong)
    with pytest.raises(WrongBytes, match="other values than the reference's"):
        list(getattr(kernel_rates, part)(report, SIZES))
