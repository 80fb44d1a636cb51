"""What the curve says: its statistics, and that the model reads what the scheme decoded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.bench.codec_model import PREFIX_TOKENS, READ_TOKENS, WINDOW_TOKENS, Reader
from tests.bench.codec_quality import QualityBench, relative_change
from tests.bench.codec_schemes import Scheme, keep
from tests.training.corpus import Document


@pytest.fixture(scope="module")
def pool():
    with ThreadPoolExecutor(1) as threads:
        yield threads


@pytest.fixture(scope="module")
def reader():
    return Reader.shipped()


@pytest.fixture(scope="module")
def windows(reader, pool):
    texts = [
        "".join(f"def {name}_{i}(path):\n    return open(path).read({i})\n\n" for i in range(250))
        for name in ("load", "parse")
    ]
    return reader.windows(
        pool, [Document(f"made up {i}", "library", text) for i, text in enumerate(texts)]
    )


def test_windows_do_not_overlap_and_are_few_a_document(windows):
    assert windows.documents.tolist() == [0, 0, 1, 1]
    assert windows.ids.shape == (4, WINDOW_TOKENS + 1)
    # The last token to predict of one window is the first of the next.
    assert int(windows.ids[0, -1]) == int(windows.ids[1, 0])
    assert windows.kv.shape == (4, 2, 12, PREFIX_TOKENS, 64)
    assert windows.kv.dtype == torch.bfloat16
    assert [chunk.shape[2] for chunk in windows.chunks(0)] == [256] * 4


def test_short_documents_are_refused(reader, pool):
    with pytest.raises(ValueError, match="none of 1 documents has 1537 tokens"):
        reader.windows(pool, [Document("short", "library", "x = 1\n")])


def test_reading_from_kv_is_reading_the_text(reader, windows):
    from_kv = reader.log_probs(windows.ids[:1], windows.kv[:1])
    with torch.inference_mode():
        logits = reader._model(input_ids=windows.ids[:1, :WINDOW_TOKENS]).logits[:, PREFIX_TOKENS:]
    from_text = torch.log_softmax(logits.float(), -1)
    assert from_kv.shape == (1, READ_TOKENS, 2048)
    targets = windows.ids[:1, PREFIX_TOKENS + 1 :].unsqueeze(-1)
    # Keys and values are rounded to bfloat16, no more.
    assert float((from_kv - from_text).gather(-1, targets).abs().mean()) < 0.02


def test_what_is_kept_costs_nothing_and_what_is_lost_costs(reader, windows, pool):
    bench = QualityBench(reader, windows, pool)
    kept = bench.measure(Scheme("kept", keep))
    assert (
        kept.bits,
        kept.change.value,
        kept.change.half_width,
        kept.divergence,
        kept.agreement,
    ) == (16.0, 0.0, 0.0, 0.0, 1.0)
    lost = bench.measure(Scheme("lost", lambda kv: (torch.zeros_like(kv), 2.0 * kv.numel())))
    assert lost.bits == 2.0
    assert lost.change.value > 0.1
    assert lost.divergence > 0.1
    assert lost.agreement < 0.95
    assert lost.bits_per_byte == pytest.approx(kept.bits_per_byte * (1 + lost.change.value))


def test_the_change_is_of_totals():
    base, other = torch.tensor([10.0, 30.0]).double(), torch.tensor([11.0, 33.0]).double()
    change = relative_change(base, other, torch.tensor([0, 1]))
    assert change.value == pytest.approx(0.1)
    assert change.half_width == pytest.approx(0.0, abs=1e-12)  # both changed by the same share


def test_the_interval_is_that_of_the_ratio_estimator():
    base, other = torch.full((4,), 10.0).double(), torch.tensor([10.0, 12.0, 10.0, 12.0]).double()
    apart = relative_change(base, other, torch.tensor([0, 1, 2, 3]))
    assert apart.value == pytest.approx(0.1)
    # Residuals -1, 1, -1, 1: variance 4 * 4 / 3, of a total of 40.
    assert apart.half_width == pytest.approx(1.96 * (16 / 3) ** 0.5 / 40)
    together = relative_change(base, other, torch.tensor([0, 1, 0, 1]))
    # Two documents with residuals -2 and 2: what is alike within a document counts once.
    assert together.half_width == pytest.approx(1.96 * (8 * 2) ** 0.5 / 40)
    assert together.half_width > apart.half_width


def test_one_document_has_no_interval():
    with pytest.raises(ValueError, match="two documents"):
        relative_change(
            torch.ones(3).double(), torch.ones(3).double(), torch.zeros(3, dtype=torch.int64)
        )
