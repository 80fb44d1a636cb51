"""The bench's own encodings: what they give back and what they count."""

from __future__ import annotations

import math
import zlib

import pytest
import torch
from lmcache_core.serde.codec import EncodedPayload, EncodingReport

from tests.bench import codec_documented, codec_schemes, codec_torchac
from tests.bench.codec_sizes import LENGTHS, size_rows
from tests.bench.codec_synthetic import synthetic_kv


@pytest.fixture(scope="module")
def kv():
    return synthetic_kv(num_tokens=64, num_layers=12, hidden=64)


class Deflate:
    """A lossless codec of a few lines; keeps short payloads raw."""

    def encode(self, tensors, payload):
        if len(payload) < 1000:
            return None
        packed = memoryview(zlib.compress(payload))
        spec = tensors[0].__class__(
            tensors[0].group, tensors[0].dtype, tensors[0].shape, 0, len(packed)
        )
        return EncodedPayload(
            packed, (spec,), "deflate", "", False, EncodingReport(8.0, len(payload), len(packed))
        )

    def decode(self, header, payload, out):
        assert header.serde == "deflate"
        out[:] = zlib.decompress(payload)


def same_bits(a, b):
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def test_whole_numbers_in_groups_count_their_scales(kv):
    for bits, expected in ((8, 8.5), (4, 4.5)):
        decoded, counted = codec_schemes.grouped(bits)(kv)
        assert counted / kv.numel() == expected
        steps = kv.float().unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / (
            2 ** (bits - 1) - 1
        )
        error = (decoded.float() - kv.float()).unflatten(-1, (-1, 32)).abs()
        # Half a step, the scale's rounding over all steps, and the result's to bfloat16.
        assert bool(
            (error <= steps * 0.51 + kv.float().unflatten(-1, (-1, 32)).abs() * 2**-7).all()
        )


def test_a_group_of_zeros_decodes_to_zeros():
    decoded, _ = codec_schemes.grouped(4)(torch.zeros(2, 1, 1, 32, dtype=torch.bfloat16))
    assert not decoded.any()


def test_zstd_gives_the_same_bits_back(kv):
    decoded, bits = codec_schemes.zstd(kv)
    assert same_bits(decoded, kv)
    assert 0 < bits < 16 * kv.numel()


def test_a_codec_is_charged_for_its_payload_and_for_what_its_head_grows_by(kv):
    scheme = codec_schemes.CodecScheme(Deflate())
    decoded, bits = scheme(kv)
    assert same_bits(decoded, kv)
    packed = len(zlib.compress(codec_schemes.raw_bytes(kv)))
    assert (bits / 8 - packed) % 512 == 0  # heads come in units of 512 bytes
    assert 0 <= bits / 8 - packed <= 1024


def test_what_a_codec_keeps_raw_costs_what_raw_costs():
    short = torch.ones(2, 1, 1, 4, dtype=torch.bfloat16)
    decoded, bits = codec_schemes.CodecScheme(Deflate())(short)
    assert same_bits(decoded, short)
    assert bits == 16 * short.numel()


def test_quantisation_rounds_ties_to_even():
    # Twelve layers: layer 0 has 32 bins in keys, layer 10 has 16. m = 15 makes x C / m whole in
    # layer 0; m = 14 halves in layer 10.
    kv = torch.zeros(2, 12, 1, 5, dtype=torch.bfloat16)
    kv[0, 0, 0] = torch.tensor([15.0, -15.0, 0.5, 1.5, -0.5])
    kv[0, 10, 0] = torch.tensor([14.0, -14.0, 1.0, 3.0, -1.0])
    found = codec_documented.quantise(kv)
    assert found.symbols[0, 0, 0].tolist() == [30, 0, 16, 16, 14]
    assert found.symbols[0, 10, 0].tolist() == [14, 0, 8, 8, 6]
    assert found.values()[0, 10, 0].tolist() == [14.0, -14.0, 2.0, 2.0, -2.0]
    assert not found.values()[1].any()  # a token of zeros has no scale, and stays zeros


def test_layers_have_the_documented_bins():
    centres = (
        codec_documented.quantise(torch.ones(2, 12, 1, 2, dtype=torch.bfloat16))
        .centres.flatten(1)
        .tolist()
    )
    assert centres == [[15.0] * 10 + [7.0] * 2, [15.0] * 2 + [7.0] * 10]
    few = codec_documented.quantise(torch.ones(2, 9, 1, 2, dtype=torch.bfloat16)).centres
    assert set(few.flatten().tolist()) == {15.0}


def test_tables_and_bits_are_those_of_a_plain_loop(kv):
    part = codec_documented.quantise(kv[:, :, :7, :3].contiguous())
    cdf, bits = part.cdf(), 0.0
    for side, layer, channel in ((0, 0, 0), (1, 11, 2)):
        symbols = part.symbols[side, layer, :, channel].tolist()
        below = [sum(symbol < i for symbol in symbols) for i in range(33)]
        expected = [65503 * count // 7 + i for i, count in enumerate(below)]
        assert cdf[side, layer, channel].tolist() == [*expected[:-1], 65536]
    assert bool((cdf.diff(dim=-1) > 0).all())
    for side, layer, token, channel in torch.cartesian_prod(
        *map(torch.arange, part.symbols.shape)
    ).tolist():
        symbol = int(part.symbols[side, layer, token, channel])
        table = cdf[side, layer, channel]
        bits -= math.log2(int(table[symbol + 1] - table[symbol]) / 65536)
    assert part.stream_bits() == pytest.approx(bits)
    assert part.bits() == pytest.approx(bits + 2 * 12 * 3 * (33 * 16 + 32) + 2 * 12 * 7 * 16)


def test_torchac_is_given_channels_one_behind_the_other_and_tables_as_uint16(kv):
    quantised = codec_documented.quantise(kv)
    symbols, tables = codec_torchac.spread(quantised, ((1, 11), (0, 2)))
    num_tokens, hidden = kv.shape[2:]
    assert symbols.shape == (2 * hidden * num_tokens,)
    assert symbols[num_tokens : 2 * num_tokens].tolist() == quantised.symbols[1, 11, :, 1].tolist()
    at = (hidden + 5) * num_tokens + 3
    unsigned = tables[at].to(torch.int64) % 65536
    assert unsigned[:-1].tolist() == quantised.cdf()[0, 2, 5, :-1].tolist()
    assert int(unsigned[-1]) == 0  # 65,536 has no room: the coder knows the end of the last symbol


def test_sizes_are_shares_of_raw(kv):
    chunk = synthetic_kv(num_tokens=256, num_layers=2, hidden=32)
    schemes = [
        codec_schemes.Scheme("raw", codec_schemes.keep),
        codec_schemes.Scheme("half", lambda part: (part, 8.0 * part.numel())),
    ]
    rows = size_rows("made up", [chunk, chunk], schemes)
    assert [row.num_tokens for row in rows] == list(LENGTHS)
    assert all(row.shares == {"raw": 1.0, "half": 0.5} for row in rows)
    assert rows[-1].raw_bytes == chunk.nbytes


def test_synthetic_kv_is_what_its_recipe_says():
    chunk = synthetic_kv(num_tokens=256, num_layers=4, hidden=512)
    assert same_bits(chunk, synthetic_kv(num_tokens=256, num_layers=4, hidden=512))
    centred = chunk.float() - chunk.float().mean(2, keepdim=True)
    correlation = (centred[:, :, 1:] * centred[:, :, :-1]).mean(2) / centred.square().mean(2)
    assert float(correlation.mean()) == pytest.approx(0.6, abs=0.03)
    scales = centred.square().mean(2).sqrt()
    assert float(scales[1].median()) == pytest.approx(0.3, rel=0.1)
    assert 0.01 < float((scales[0] > 8).float().mean()) < 0.05
    assert not bool((scales[1] > 8).any())
