"""The documented functions that encode KV into streams of channels: against the coder written down
once more, and what they refuse. Any stream under any table:
`tests/property/test_cachegen_streams.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lmcache_core.documented.cachegen.quantization import channel_distributions
from lmcache_core.errors import LayoutError, SerdeError
from lmcache_core.serde.cachegen import (
    CacheGenConfig,
    CacheGenGPUBytestream,
    CacheGenGPUEncoderOutput,
    collect_bytes,
    decode_chunk,
    decode_function_gpu,
    encode_function,
    encode_ntokens,
    recombine_bytes,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def kv_of(layers: int, tokens: int, heads: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(layers * 1000 + tokens)
    drawn = torch.randn(layers, 2, tokens, heads, size, generator=generator)
    return (drawn * 4).bfloat16().to(DEVICE)


def encode(
    kv: torch.Tensor, chunk_size: int, config: CacheGenConfig | None = None
) -> CacheGenGPUEncoderOutput:
    config = config or CacheGenConfig.for_num_layers(kv.shape[0])
    return encode_function(
        kv,
        config,
        torch.tensor(config.bins_of_keys()),
        torch.tensor(config.bins_of_values()),
        chunk_size,
    )


def test_an_output_has_a_row_for_each_token() -> None:
    """Layers of the keys, then of the values."""
    kv = kv_of(3, 9, 2, 2)
    made, output = encode(kv, 4), torch.full((9, 24), 0xA5, dtype=torch.uint8, device=DEVICE)
    sides = decode_function_gpu(made.cdf, made.data_chunks, 3, 4, output)
    assert [(side.dtype, side.shape) for side in sides] == [(torch.float32, (3, 9, 4))] * 2
    rows = torch.cat(sides).permute(1, 0, 2).reshape(9, 24)
    assert torch.equal(output, rows.to(torch.uint8))


@pytest.mark.parametrize(
    ("kv", "chunk_size", "message"),
    [
        (torch.ones(2, 3, 3, 1, 4), 4, "num_heads, head_size"),
        (torch.ones(2, 2, 3, 1, 0), 4, "no channels"),
        (torch.ones(2, 2, 3, 1, 4, dtype=torch.int32), 4, "cannot be quantised"),
        (torch.ones(2, 2, 3, 1, 4), 0, "at least 1"),
        (torch.ones(3, 2, 3, 1, 4), 4, r"for_num_layers\(3\)"),
    ],
)
def test_unusable_kv_is_refused(kv: torch.Tensor, chunk_size: int, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        encode(kv, chunk_size, CacheGenConfig.for_num_layers(2))


MADE = encode(kv_of(2, 9, 1, 3), 4)
CHUNKS = list(MADE.data_chunks)
EMPTY = CacheGenGPUBytestream(CHUNKS[0].bytestream, CHUNKS[0].bytestream_lengths, -1)


@pytest.mark.parametrize(
    "change",
    [
        {"chunk_size": 3},
        {"layers_in_key": 1},
        {"output": torch.zeros(8, 12, dtype=torch.uint8)},
        {"output": torch.zeros(9, 24, dtype=torch.uint8)[:, ::2]},
        {"output": torch.zeros(9, 12)},
        {"data_chunks": CHUNKS[:-1]},
        {"data_chunks": [*CHUNKS, EMPTY]},
    ],
)
def test_decoding_checks_what_it_is_given(change) -> None:
    given = {
        "cdf": MADE.cdf,
        "data_chunks": CHUNKS,
        "layers_in_key": 2,
        "chunk_size": 4,
        "output": torch.zeros(9, 12, dtype=torch.uint8),
    }
    with pytest.raises((LayoutError, SerdeError), match=r"chunk|give"):
        decode_function_gpu(**(given | change))


def tables(*rows: list[int]) -> torch.Tensor:
    """A cdf of one layer with these channels."""
    return torch.from_numpy(np.array([rows], dtype=np.uint16).view(np.int16)).to(DEVICE)


def reference_stream(cdf: list[int], symbols: list[int]) -> bytes:
    """The coder written down once more: 32 states in turn, each of which gives a word away where
    the symbol would not fit otherwise.
    """
    bins = len(cdf) - 1
    slots = [part * (4096 - bins) // 65536 + i for i, part in enumerate([*cdf[:-1], 65536])]
    states, words = [2**15] * 32, []
    for i, symbol in reversed(list(enumerate(symbols))):
        low, frequency = slots[symbol], slots[symbol + 1] - slots[symbol]
        state = states[i % 32]
        if (state // frequency) * 4096 + state % frequency + low >= 2**31:
            words.append(state % 65536)
            state //= 65536
        states[i % 32] = (state // frequency) * 4096 + state % frequency + low
    halves = [half for state in states for half in (state >> 16, state & 0xFFFF)]
    return b"".join(word.to_bytes(2, "little") for word in (*halves, *reversed(words)))


def encoded(cdf: torch.Tensor, symbols: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return streams and their lengths."""
    layers, tokens, channels = symbols.shape
    room = 2 * tokens + 128
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


@pytest.mark.parametrize("bins", [4, 32, 256])
def test_every_stream_is_that_of_the_reference(bins: int) -> None:
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


def test_a_symbol_without_a_probability_is_refused() -> None:
    with pytest.raises(SerdeError, match=r"layer 0, channel 1.*beyond the last"):
        encoded(
            tables([0, 1, 9], [0, 1, 9]), torch.tensor([[[1, 2]]], dtype=torch.int8, device=DEVICE)
        )
    with pytest.raises(SerdeError, match=r"layer 0, channel 0.*does not rise"):
        encoded(tables([0, 5, 5, 9]), torch.tensor([[[1]]], dtype=torch.int8, device=DEVICE))


@pytest.mark.parametrize("lengths", [[[5, 0]], [[-1, 4]]])
def test_lengths_that_no_buffer_has_are_refused(lengths: list[list[int]]) -> None:
    with pytest.raises(SerdeError, match="buffers have 4 bytes"):
        collect_bytes(
            torch.zeros(1, 2, 4, dtype=torch.uint8), torch.tensor(lengths, dtype=torch.int32)
        )


@pytest.mark.parametrize("lengths", [[[-1, 5]], [[1, 2]], [[2**31 - 1, 2**31 - 1]]])
def test_lengths_that_do_not_add_up_are_refused(lengths: list[list[int]]) -> None:
    with pytest.raises(SerdeError, match="lengths of streams"):
        recombine_bytes(torch.zeros(4, dtype=torch.uint8), torch.tensor(lengths, dtype=torch.int32))
    with pytest.raises(SerdeError, match="lengths of streams"):
        decoded(
            tables([0, 1, 9], [0, 1, 9]),
            torch.zeros(4, dtype=torch.uint8),
            torch.tensor(lengths, dtype=torch.int32),
            1,
        )


def test_tensors_of_other_shapes_or_dtypes_are_refused() -> None:
    symbols, cdf = example(layers=2, tokens=4, channels=3)
    buffer, lengths = (
        torch.zeros(2, 3, 136, dtype=torch.uint8),
        torch.zeros(2, 3, dtype=torch.int32),
    )
    right = [cdf, symbols, buffer, lengths]
    for place, wrong in enumerate((cdf[:, :, :1], symbols[0], buffer[:, :2], lengths.long())):
        with pytest.raises(LayoutError, match="give"):
            encode_ntokens(*right[:place], wrong, *right[place + 1 :])
    encode_ntokens(*right)


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


def test_recombining_is_bounded() -> None:
    lengths = torch.zeros(1 << 10, 1 << 10, dtype=torch.int32)
    lengths[5, 5] = 1 << 20
    with pytest.raises(SerdeError, match="are more than"):
        recombine_bytes(torch.zeros(1 << 20, dtype=torch.uint8), lengths)


def test_a_chunk_of_another_number_of_tokens_is_refused() -> None:
    symbols, cdf = example(tokens=9)
    stream, lengths = encoded(cdf, symbols)
    with pytest.raises(SerdeError, match="9 tokens, a buffer for 8"):
        decode_chunk(
            cdf, CacheGenGPUBytestream(stream, lengths, 9), torch.zeros(3, 8, 5, dtype=torch.uint8)
        )
    with pytest.raises(SerdeError, match="damaged"):
        decoded(cdf, stream, lengths, 8)


def test_nothing_is_written_outside_a_buffer() -> None:
    symbols, cdf = example(layers=1, tokens=64, channels=2)
    around = torch.full((1, 2, 400), 0xA5, dtype=torch.uint8)
    inner = around[:, :, 50:350]
    lengths = torch.zeros(1, 2, dtype=torch.int32)
    stream = encode_ntokens(cdf.cpu(), symbols.cpu(), inner, lengths)
    assert (around[:, :, :50] == 0xA5).all()
    assert (around[:, :, 350:] == 0xA5).all()
    assert torch.equal(torch.cat([inner[0, i, : lengths[0, i]] for i in range(2)]), stream)
    with pytest.raises(SerdeError, match="too short"):
        encode_ntokens(cdf.cpu(), symbols.cpu(), around[:, :, 50:60], lengths)
    assert (around[:, :, :50] == 0xA5).all()
    assert (around[:, :, 350:] == 0xA5).all()
