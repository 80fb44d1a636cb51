"""The bench of the codec's kernel, with its reference on a CPU: several chunks in a launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lmcache_core.serde.chunk_codec import Profile
from lmcache_core.serde.tables import bell_curves
from lmcache_kernels.cachegen_decode import cachegen_decode_reference

from tests.bench import codec_device
from tests.bench.measure import Figure

SHAPE = (2, 2, 70, 32)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(encoded: Any, scales: Any, levels: Any, shape: Any, _: Any, *rest: Any) -> Any:
        alphabets = {level: bell_curves().of(level) for level in levels}
        return cachegen_decode_reference(encoded, scales, levels, shape, alphabets, *rest)

    monkeypatch.setattr(codec_device, "cachegen_decode", decode)
    monkeypatch.setattr(codec_device, "NUM_CHUNKS", 2)
    monkeypatch.setattr(codec_device, "PER_LAUNCH", (1, 2))
    monkeypatch.setattr(codec_device, "timed", lambda work: (work(0), 1.0)[1:])


def record(profile: Profile) -> codec_device.Record:
    random = torch.Generator().manual_seed(0)
    return codec_device.Record.of(profile, torch.randn(SHAPE, generator=random).bfloat16())


def figures(profile: Profile, of: codec_device.Record) -> list[Figure]:
    limit = Figure("limit", 2 * of.values.nbytes, (1.0,))
    return codec_device.launch_figures(profile, of, CPU, limit, lambda: None)


@pytest.mark.parametrize("profile", Profile)
def test_figures_by_chunks_in_a_launch(profile: Profile) -> None:
    names = [figure.name.rpartition(": ")[2] for figure in figures(profile, record(profile))]
    assert names == ["decode, 1 chunks a launch", "decode, 2 chunks a launch"]


def test_other_values_are_no_figure() -> None:
    of = record(Profile.STANDARD)
    of.values[1, 1, 3, 5] += 1
    with pytest.raises(AssertionError, match="other values than the CPU codec"):
        figures(Profile.STANDARD, of)
