"""Streams of channels: their bytes are pinned, they come back, and whatever is damaged is
refused or decoded wrong, never more.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lmcache_core.documented.cachegen.quantization import channel_distributions
from lmcache_core.errors import LayoutError, SerdeError
from lmcache_core.serde.cachegen import (
    CacheGenGPUBytestream,
    collect_bytes,
    decode_chunk,
    encode_ntokens,
    recombine_bytes,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tables(*rows: list[int]) -> torch.Tensor:
    """A cdf of one layer with these channels."""
    return torch.from_numpy(np.array([rows], dtype=np.uint16).view(np.int16)).to(DEVICE)


def reference_stream(cdf: list[int], symbols: list[int]) -> bytes:
    """The coder written down once more, with unbounded numbers: bytes leave the state while the
    symbol would not fit otherwise.
    """
    state, out = 2**23, []
    for symbol in reversed(symbols):
        low = cdf[symbol]
        frequency = (cdf[symbol + 1] if symbol + 2 < len(cdf) else 2**16) - low
        while (state // frequency) * 2**16 + state % frequency + low >= 2**31:
            out.append(state % 256)
            state //= 256
        state = (state // frequency) * 2**16 + state % frequency + low
    return state.to_bytes(4, "little") + bytes(reversed(out))


def encoded(
    cdf: torch.Tensor, symbols: torch.Tensor, room: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Streams and their lengths."""
    layers, tokens, channels = symbols.shape
    room = 2 * tokens + 4 if room is None else room
    buffer = torch.full((layers, channels, room), 0xA5, dtype=torch.uint8, device=DEVICE)
    lengths = torch.full((layers, channels), -1, dtype=torch.int32, device=DEVICE)
    return encode_ntokens(cdf, symbols, buffer, lengths), lengths


def example(
    layers: int = 3, tokens: int = 40, channels: int = 5, bins: int = 32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Symbols that look like quantised KV, and their distributions."""
    generator = torch.Generator().manual_seed(7)
    drawn = torch.randn(layers, tokens, channels, generator=generator) * bins / 8 + bins / 2 - 1
    symbols = drawn.round().clamp(0, bins - 2).to(torch.uint8).view(torch.int8).to(DEVICE)
    return symbols, channel_distributions(symbols, bins)


def decoded(
    cdf: torch.Tensor, stream: torch.Tensor, lengths: torch.Tensor, tokens: int
) -> torch.Tensor:
    target = torch.full((cdf.shape[0], tokens, cdf.shape[1]), -91, dtype=torch.int8, device=DEVICE)
    decode_chunk(cdf, CacheGenGPUBytestream(stream, lengths, tokens), target)
    return target


@pytest.mark.parametrize(
    ("cdf", "symbols", "stream"),
    [
        # Nothing said is the state at the beginning.
        ([0, 0x8000, 0xFFFF], [], "00008000"),
        # A half for each symbol adds one bit to the state each time: 2^23 becomes 2^24, plus where
        # the symbol lies.
        ([0, 0x8000, 0xFFFF], [0], "00000001"),
        ([0, 0x8000, 0xFFFF], [1], "00800001"),
        # All of the probability, and next to none of it.
        ([0, 0xFFFF], [0, 0, 0], "00008000"),
        # 2^23 gives two bytes of zeros away, 2^7 is left; times 2^16, plus where the symbol lies:
        # 0x80ffff.
        ([0, 0xFFFF, 0xFFFF], [1], "ffff80000000"),
    ],
)
def test_streams_are_pinned(cdf: list[int], symbols: list[int], stream: str) -> None:
    assert reference_stream(cdf, symbols).hex() == stream
    made, lengths = encoded(
        tables(cdf), torch.tensor(symbols, dtype=torch.int8, device=DEVICE).reshape(1, -1, 1)
    )
    assert bytes(made.tolist()).hex() == stream
    assert lengths.tolist() == [[len(stream) // 2]]
    assert decoded(tables(cdf), made, lengths, len(symbols)).flatten().tolist() == symbols


@pytest.mark.parametrize("bins", [4, 16, 32, 130, 256])
def test_every_stream_is_the_references(bins: int) -> None:
    symbols, cdf = example(layers=2, tokens=50, channels=3, bins=bins)
    stream, lengths = encoded(cdf, symbols)
    numbers = (cdf.cpu().numpy().view(np.uint16)).tolist()
    values = symbols.view(torch.uint8).cpu()
    wanted = [
        [
            reference_stream(numbers[layer][channel], values[layer, :, channel].tolist())
            for channel in range(3)
        ]
        for layer in range(2)
    ]
    assert bytes(stream.tolist()) == b"".join(streams for layer in wanted for streams in layer)
    assert lengths.tolist() == [[len(streams) for streams in layer] for layer in wanted]
    assert torch.equal(decoded(cdf, stream, lengths, 50), symbols)


@pytest.mark.parametrize("tokens", [0, 1, 2, 255, 256, 257])
def test_worst_symbols_fit_two_bytes_each(tokens: int) -> None:
    cdf = tables([0, 1, 0xFFFF])
    symbols = torch.zeros(1, tokens, 1, dtype=torch.int8, device=DEVICE)
    stream, lengths = encoded(cdf, symbols)
    assert lengths.item() == 2 * tokens + 4, (
        "the smallest probability for each symbol: the bound is reached, and no more"
    )
    assert torch.equal(decoded(cdf, stream, lengths, tokens), symbols)


@pytest.mark.parametrize("room", [0, 1, 3, 4, 5, 22, 23])
def test_a_buffer_that_is_too_short(room: int) -> None:
    cdf = tables([0, 1, 0xFFFF])
    with pytest.raises(SerdeError, match=r"layer 0, channel 0.*too short"):
        encoded(cdf, torch.zeros(1, 10, 1, dtype=torch.int8, device=DEVICE), room=room)


def test_nothing_is_written_outside_a_buffer() -> None:
    symbols, cdf = example(layers=1, tokens=64, channels=2)
    around = torch.full((1, 2, 300), 0xA5, dtype=torch.uint8)
    inner = around[:, :, 50:250]
    lengths = torch.zeros(1, 2, dtype=torch.int32)
    stream = encode_ntokens(cdf.cpu(), symbols.cpu(), inner, lengths)
    assert (around[:, :, :50] == 0xA5).all()
    assert (around[:, :, 250:] == 0xA5).all()
    assert torch.equal(torch.cat([inner[0, i, : lengths[0, i]] for i in range(2)]), stream)
    with pytest.raises(SerdeError, match="too short"):
        encode_ntokens(cdf.cpu(), symbols.cpu(), around[:, :, 50:60], lengths)
    assert (around[:, :, :50] == 0xA5).all()
    assert (around[:, :, 250:] == 0xA5).all()


def test_a_symbol_without_a_probability() -> None:
    with pytest.raises(SerdeError, match=r"layer 0, channel 1.*beyond the last"):
        encoded(
            tables([0, 1, 9], [0, 1, 9]), torch.tensor([[[1, 2]]], dtype=torch.int8, device=DEVICE)
        )
    with pytest.raises(SerdeError, match=r"layer 0, channel 0.*does not rise"):
        encoded(tables([0, 5, 5, 9]), torch.tensor([[[1]]], dtype=torch.int8, device=DEVICE))


def test_distributions_are_the_documented_ones() -> None:
    symbols = torch.tensor([[[3, 0], [3, 1], [30, 0]]], dtype=torch.int8, device=DEVICE)
    cdf = channel_distributions(symbols, 32)
    assert (cdf.dtype, cdf.shape) == (torch.int16, (1, 2, 33))
    numbers = cdf.cpu().numpy().view(np.uint16)
    scale = 0xFFFF - 32
    assert numbers[0, 0].tolist() == [
        i + (0 if i <= 3 else 2 * scale // 3 if i <= 30 else scale) for i in range(33)
    ]
    assert numbers[0, 1].tolist() == [
        i + (0 if i < 1 else 2 * scale // 3 if i < 2 else scale) for i in range(33)
    ]
    assert numbers[0, 0, -1] == 0xFFFF
    assert (
        channel_distributions(torch.zeros(2, 0, 3, dtype=torch.int8), 4).tolist()
        == [[[0, 1, 2, 3, 4]] * 3] * 2
    )


@pytest.mark.parametrize("bins", [4, 256])
@pytest.mark.parametrize("tokens", [1, 1000])
def test_distributions_always_rise(bins: int, tokens: int) -> None:
    symbols = torch.full((1, tokens, 1), bins - 1, dtype=torch.uint8)
    for value in (0, bins // 2, bins - 1):
        cdf = channel_distributions(symbols.fill_(value), bins).numpy().view(np.uint16)
        assert (np.diff(cdf.astype(np.int64)) >= 1).all()


def test_collecting_and_recombining() -> None:
    buffer = torch.arange(24, dtype=torch.uint8, device=DEVICE).reshape(2, 3, 4)
    lengths = torch.tensor([[0, 4, 1], [2, 0, 3]], dtype=torch.int32, device=DEVICE)
    collected = collect_bytes(buffer, lengths)
    assert collected.tolist() == [4, 5, 6, 7, 8, 12, 13, 20, 21, 22]
    assert recombine_bytes(collected, lengths).tolist() == [
        [[0] * 4, [4, 5, 6, 7], [8, 0, 0, 0]],
        [[12, 13, 0, 0], [0] * 4, [20, 21, 22, 0]],
    ]
    nothing = torch.zeros(2, 3, dtype=torch.int32)
    assert collect_bytes(buffer, nothing).tolist() == []
    assert recombine_bytes(torch.empty(0, dtype=torch.uint8), nothing).shape == (2, 3, 0)
    assert recombine_bytes(torch.empty(0, dtype=torch.uint8), nothing[:0]).shape == (0, 3, 0)


@pytest.mark.parametrize("lengths", [[[5, 0]], [[-1, 4]]])
def test_lengths_that_no_buffer_has(lengths: list[list[int]]) -> None:
    with pytest.raises(SerdeError, match="buffers have 4 bytes"):
        collect_bytes(
            torch.zeros(1, 2, 4, dtype=torch.uint8), torch.tensor(lengths, dtype=torch.int32)
        )


@pytest.mark.parametrize(
    "lengths", [[[5, 0]], [[-1, 5]], [[1, 2]], [[2**31 - 1, 2**31 - 1]], [[-(2**31), 4]]]
)
def test_lengths_that_do_not_add_up(lengths: list[list[int]]) -> None:
    with pytest.raises(SerdeError, match="lengths of streams"):
        recombine_bytes(torch.zeros(4, dtype=torch.uint8), torch.tensor(lengths, dtype=torch.int32))
    with pytest.raises(SerdeError, match="lengths of streams"):
        decoded(
            tables([0, 1, 9], [0, 1, 9]),
            torch.zeros(4, dtype=torch.uint8),
            torch.tensor(lengths, dtype=torch.int32),
            1,
        )


def test_recombining_is_bounded() -> None:
    lengths = torch.zeros(1 << 10, 1 << 10, dtype=torch.int32)
    lengths[5, 5] = 1 << 20
    with pytest.raises(SerdeError, match="are more than"):
        recombine_bytes(torch.zeros(1 << 20, dtype=torch.uint8), lengths)


def test_damaged_streams_are_refused_or_decoded_wrong() -> None:
    symbols, cdf = example(layers=2, tokens=40, channels=3)
    stream, lengths = encoded(cdf, symbols)
    refused = 0
    for position in range(len(stream)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = stream.clone()
            damaged[position] ^= flip
            try:
                assert not torch.equal(decoded(cdf, damaged, lengths, 40), symbols), (
                    "another stream is another text"
                )
            except SerdeError:
                refused += 1
    assert refused > len(stream), "most damage is noticed"


@pytest.mark.parametrize("row", [[1, 2, 3], [0, 0, 3], [0, 5, 5, 9], [0, 5, 4, 9], [0xFFFF, 0, 1]])
def test_tables_that_do_not_rise(row: list[int]) -> None:
    stream = torch.tensor([0, 0, 0x80, 0], dtype=torch.uint8)
    with pytest.raises(SerdeError, match="does not rise"):
        decoded(tables(row), stream, torch.tensor([[4]], dtype=torch.int32), 0)


@pytest.mark.parametrize(("dtype", "shape"), [(torch.int8, (2, 9, 3)), (torch.uint8, (2, 9, 3))])
def test_targets_of_any_strides(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    symbols, cdf = example(layers=2, tokens=9, channels=3)
    stream, lengths = encoded(cdf, symbols)
    for target in (
        torch.zeros(shape, dtype=dtype),
        torch.zeros((9, 3, 2), dtype=dtype).permute(2, 0, 1),
    ):
        decode_chunk(cdf, CacheGenGPUBytestream(stream, lengths, 9), target)
        assert torch.equal(target.view(torch.int8), symbols.cpu())


def test_a_chunk_of_another_number_of_tokens() -> None:
    symbols, cdf = example(tokens=9)
    stream, lengths = encoded(cdf, symbols)
    with pytest.raises(SerdeError, match="9 tokens, a buffer for 8"):
        decode_chunk(
            cdf, CacheGenGPUBytestream(stream, lengths, 9), torch.zeros(3, 8, 5, dtype=torch.uint8)
        )
    with pytest.raises(SerdeError, match="damaged"):
        decoded(cdf, stream, lengths, 8)


def test_tensors_of_other_shapes_or_dtypes() -> None:
    symbols, cdf = example(layers=2, tokens=4, channels=3)
    buffer, lengths = torch.zeros(2, 3, 12, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.int32)
    right = [cdf, symbols, buffer, lengths]
    wrong = [
        [cdf.int(), cdf[:1], cdf[:, :, :1], cdf.repeat(1, 1, 8)],
        [symbols.float(), symbols[0]],
        [buffer.to(torch.int8), buffer[:, :2]],
        [lengths.long(), lengths[:1]],
    ]
    for place, tensors in enumerate(wrong):
        for tensor in tensors:
            with pytest.raises(LayoutError, match="give"):
                encode_ntokens(*right[:place], tensor, *right[place + 1 :])
    encode_ntokens(*right)
