"""The figures of codecs: bits, the yardstick, statistics, break-even, and that the model reads what
a scheme decoded.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.bench import codecs, documented_codec
from tests.bench.chunk_codec import ChunkScheme, synthetic_kv
from tests.bench.codecs import PREFIX_TOKENS, WINDOW_TOKENS, QualityBench, Reader, Speed
from tests.training.corpus import Document


@pytest.fixture(scope="module")
def kv() -> torch.Tensor:
    return synthetic_kv(num_tokens=64, num_layers=12, hidden=64)


def test_whole_numbers_in_groups_count_their_scales(kv: torch.Tensor) -> None:
    for bits, expected in ((8, 8.5), (4, 4.5)):
        decoded, counted = codecs.grouped(bits)(kv)
        assert counted / kv.numel() == expected
        values, error = (one.unflatten(-1, (-1, 32)) for one in (kv.float(), decoded - kv.float()))
        step = values.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
        # Half a step, the scale's rounding over all steps, and the result's to bfloat16.
        assert bool((error.abs() <= step * 0.51 + values.abs() * 2**-7).all())


def test_schemes_count_every_bit_and_lose_none_that_they_promise(kv: torch.Tensor) -> None:
    decoded, bits = codecs.BASELINES["zstd -3 on bf16"](kv)
    assert torch.equal(decoded.view(torch.int16), kv.view(torch.int16))
    assert 0 < bits < 16 * kv.numel()

    class Refusing:
        def encode(self, *_: object) -> None: ...

    _, bits = ChunkScheme(Refusing())(kv)  # type: ignore[arg-type]
    assert bits == 16 * kv.numel(), "what a codec keeps raw costs what raw costs"
    sizes = codecs.size_rows(
        "x", [synthetic_kv(256, 2, 32)], {"half": lambda c: (c, 4.0 * c.nbytes)}
    )
    assert sizes == [(str(length), "0.500", "x") for length in codecs.LENGTHS]


def test_the_documented_quantisation_rounds_ties_to_even() -> None:
    # Twelve layers: layer 0 has 32 bins in keys, layer 10 has 16. m = 15 makes x C / m whole in
    # layer 0; m = 14 halves in layer 10.
    kv = torch.zeros(2, 12, 1, 5, dtype=torch.bfloat16)
    kv[0, 0, 0] = torch.tensor([15.0, -15.0, 0.5, 1.5, -0.5])
    kv[0, 10, 0] = torch.tensor([14.0, -14.0, 1.0, 3.0, -1.0])
    found = documented_codec.quantise(kv)
    assert found.symbols[0, 0, 0].tolist() == [30, 0, 16, 16, 14]
    assert found.symbols[0, 10, 0].tolist() == [14, 0, 8, 8, 6]
    assert found.values()[0, 10, 0].tolist() == [14.0, -14.0, 2.0, 2.0, -2.0]
    assert not found.values()[1].any()  # a token of zeros has no scale, and stays zeros
    centres = found.centres.flatten(1).tolist()
    assert centres == [[15.0] * 10 + [7.0] * 2, [15.0] * 2 + [7.0] * 10]
    few = documented_codec.quantise(torch.ones(2, 9, 1, 2, dtype=torch.bfloat16)).centres
    assert set(few.flatten().tolist()) == {15.0}


def test_the_documented_size_is_that_of_a_plain_loop(kv: torch.Tensor) -> None:
    part = documented_codec.quantise(kv[:, :, :7, :3].contiguous())
    cdf, bits = part.cdf(), 0.0
    for place in torch.cartesian_prod(*map(torch.arange, part.symbols.shape)).tolist():
        side, layer, token, channel = place
        symbols = part.symbols[side, layer, :, channel].tolist()
        below = [sum(symbol < i for symbol in symbols) for i in range(33)]
        table = [65503 * count // 7 + i for i, count in enumerate(below)]
        table[-1] = 65536
        assert cdf[side, layer, channel].tolist() == table
        symbol = symbols[token]
        bits -= math.log2((table[symbol + 1] - table[symbol]) / 65536)
    assert part.stream_bits() == pytest.approx(bits)
    assert part.bits() == pytest.approx(bits + 2 * 12 * 3 * (33 * 16 + 32) + 2 * 12 * 7 * 16)


def test_torchac_is_given_channel_after_channel_and_tables_as_uint16(kv: torch.Tensor) -> None:
    quantised = documented_codec.quantise(kv)
    symbols, tables = documented_codec.torchac_input(quantised, ((1, 11), (0, 2)))
    num_tokens, hidden = kv.shape[2:]
    assert symbols[num_tokens : 2 * num_tokens].tolist() == quantised.symbols[1, 11, :, 1].tolist()
    unsigned = tables[(hidden + 5) * num_tokens + 3].to(torch.int64) % 65536
    assert unsigned[:-1].tolist() == quantised.cdf()[0, 2, 5, :-1].tolist()
    assert int(unsigned[-1]) == 0  # 65,536 has no room: the coder knows the end of the last symbol


def test_reading_from_kv_is_reading_the_text_and_what_is_lost_costs() -> None:
    reader = Reader.shipped()
    texts = [
        "".join(f"def {name}_{i}(path):\n    return open(path).read({i})\n\n" for i in range(100))
        for name in ("load", "parse")
    ]
    with ThreadPoolExecutor(1) as pool:
        documents = [Document(f"made up {i}", "library", text) for i, text in enumerate(texts)]
        windows = reader.windows(pool, documents)
        assert windows.documents.tolist() == [0, 1]
        bench = QualityBench(reader, windows, pool)
        kept = bench.measure(codecs.keep)
        lost = bench.measure(lambda chunk: (torch.zeros_like(chunk), 2.0 * chunk.numel()))
    assert (kept.bits, kept.change, kept.agreement) == (16.0, codecs.Change(0.0, 0.0), 1.0)
    assert lost.bits == 2.0
    assert lost.change.value > 0.1
    assert lost.agreement < 0.95
    ids = windows.ids[:1]
    with torch.inference_mode():
        logits = reader.model(input_ids=ids[:, :WINDOW_TOKENS]).logits[:, PREFIX_TOKENS:]
    differences = reader.log_probs(ids, windows.kv[:1]) - torch.log_softmax(logits.float(), -1)
    targets = ids[:, PREFIX_TOKENS + 1 :].unsqueeze(-1)
    # Keys and values are rounded to bfloat16, no more.
    assert float(differences.gather(-1, targets).abs().mean()) < 0.02


def test_an_interval_counts_what_is_alike_within_a_document_once() -> None:
    base, other = torch.full((4,), 10.0).double(), torch.tensor([10.0, 12.0, 10.0, 12.0]).double()
    apart = codecs.relative_change(base, other, torch.tensor([0, 1, 2, 3]))
    assert apart.value == pytest.approx(0.1)
    # Residuals -1, 1, -1, 1: variance 4 * 4 / 3, of a total of 40.
    assert apart.half_width == pytest.approx(1.96 * (16 / 3) ** 0.5 / 40)
    together = codecs.relative_change(base, other, torch.tensor([0, 1, 0, 1]))
    # Two documents with residuals -2 and 2.
    assert together.half_width == pytest.approx(1.96 * (8 * 2) ** 0.5 / 40)
    with pytest.raises(ValueError, match="two documents"):
        codecs.relative_change(base, other, torch.zeros(4, dtype=torch.int64))


def test_at_the_break_even_a_load_takes_as_long_as_raw() -> None:
    coder = Speed("coder", 2, 4.0, 0.5, 2.0)
    in_turn, pipelined = codecs.break_even(coder)
    assert codecs.gain(coder, in_turn, is_pipelined=False) == pytest.approx(1.0)
    assert codecs.gain(coder, pipelined, is_pipelined=True) == pytest.approx(1.0)
    assert codecs.gain(coder, 0.001, is_pipelined=True) == pytest.approx(4.0)
    assert codecs.break_even_table([coder]).rows == [("coder", "2", "12.00", "16.00", "")]
    assert codecs.break_even(Speed("coder", 2, 1.0, 0.5, 2.0)) == (0.0, 0.0)
