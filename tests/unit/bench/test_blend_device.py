"""The bench of blending's kernels, on a CPU and small: what runs, and that nothing wrong is
reported.
"""

from __future__ import annotations

import pytest
import torch

from tests.bench import blend_device
from tests.bench.blend_device import Choice, Prompt
from tests.bench.measure import ROUNDS

SHAPE = (2, 640, 2, 8)


@pytest.fixture
def prompt():
    return Prompt.make(SHAPE, torch.bfloat16, "cpu")


def test_figures_of_a_prompt(prompt):
    waits = []
    limit, *figures = blend_device.prompt_figures(prompt, lambda: waits.append(1))
    assert [figure.name.split(",")[0] for figure in figures] == ["GPU: rope_rotate"] * 2 + [
        "GPU: blend_deviation"
    ] * 2
    assert all(
        figure.limit is limit and figure.num_bytes == limit.num_bytes == 2 * 640 * 2 * 8 * 2
        for figure in figures
    )
    assert len(waits) == 5 * (ROUNDS + 1)
    for k, target in zip(prompt.layers, prompt.targets, strict=True):
        assert torch.equal(k[:512], target[:512]), "the first document stands where it stood"
        assert not torch.equal(k[512:], target[512:])


def test_figures_of_a_choice(monkeypatch):
    monkeypatch.setattr(blend_device, "CALLS", 2)
    beside, mine = blend_device.choice_figures(Choice.make(3, 100, "cpu"), lambda: None)
    assert mine.limit is beside
    assert "µs a call" in mine.note
    assert mine.num_bytes == 2 * 3 * 100 * 4


def test_a_wrong_kernel_is_not_reported(prompt, monkeypatch):
    choice = Choice.make(3, 100, "cpu")
    with monkeypatch.context() as patched:
        patched.setattr(blend_device, "rope_rotate", lambda k, _rotation: k.clone())
        with pytest.raises(AssertionError, match="another K"):
            blend_device.prompt_figures(prompt, lambda: None)
    with monkeypatch.context() as patched:
        patched.setattr(blend_device, "blend_deviation", lambda fresh, *_: torch.zeros(len(fresh)))
        with pytest.raises(AssertionError, match="not close"):
            blend_device.prompt_figures(prompt, lambda: None)
    with monkeypatch.context() as patched:
        patched.setattr(blend_device, "blend_select_reference", lambda *_: ~choice.is_valid)
        with pytest.raises(AssertionError, match="reference"):
            blend_device.choice_figures(choice, lambda: None)
    monkeypatch.setattr(Choice, "select_by_topk", lambda self: ~self.is_valid)
    with pytest.raises(AssertionError, match="topk"):
        blend_device.choice_figures(choice, lambda: None)


def test_nothing_is_reported_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert blend_device.gpu_figures() == []
