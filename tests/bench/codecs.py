"""The section `codecs` of docs/benchmarks.md: quality, sizes and speed of every codec of the
library, and on which links encoding pays.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
import zstandard
from lmcache_core.serde import CODEC_NAMES
from lmcache_demo.model import load_model

from tests.bench import documented_codec
from tests.bench.chunk_codec import opened, raw_bytes, synthetic_kv
from tests.bench.measure import GB, OtherLoad, Run, in_turn
from tests.bench.plot import Axis, Chart
from tests.bench.report import WITH_ROUNDS, Findings, Section
from tests.training.corpus import Document, collect_corpus
from tests.training.evaluate import MEASURED_KINDS

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PREFIX_TOKENS, READ_TOKENS, CHUNK_TOKENS = 1024, 512, 256
WINDOW_TOKENS = PREFIX_TOKENS + READ_TOKENS
MAX_WINDOWS_OF_DOCUMENT = 2
"""Windows of one document resemble one another: more of a long one would add little that is new."""
BATCH_WINDOWS = 4
NUM_SIZED_WINDOWS = 8
LENGTHS = (1, 16, 256)
NORMAL_95 = 1.96
RAW = "bf16, raw"
GROUP_SIZE, SCALE_BITS = 32, 16
ZSTD_LEVEL = 3
ZSTD_BLOCKS = 8
"""A zstd frame has no parts that threads could share: the chunk is cut into blocks, a frame
each, the same with any number of threads.
"""
THREADS = (1, 2)
GBIT_OF_GB = 8
LINKS_GBIT = (0.1, 1.0, 10.0, 100.0)
GAINS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
NUM_POINTS = 96

Scheme = Callable[[torch.Tensor], tuple[torch.Tensor, float]]
"""Given a chunk, bf16 `[2, num_layers, num_tokens, hidden]`: returns what it decodes to, and how
many bits it took, all counted.
"""


def measure(run: Run) -> Findings:
    """Measure everything with one torch thread; takes some minutes. It remarks why a yardstick is
    missing.
    """
    kv = synthetic_kv()
    with ExitStack() as stack:
        schemes = BASELINES | {
            name: stack.enter_context(opened(name, max(THREADS))) for name in CODEC_NAMES
        }
        quality, sizes = _on_the_model(run, schemes)
        sizes += run("codecs: sizes, synthetic", lambda: size_rows("synthetic", [kv], schemes))
    with OtherLoad() as others:
        speeds, absent = _speeds(run, kv)
    best = [one for one in speeds if one.num_threads == max(THREADS)]
    # Of torchac's builds the faster one is drawn.
    drawn = best + [one for one in speeds if one.name.startswith("torchac")][-1:]
    title = f"Loading KV over a link, encoded and raw; {max(THREADS)} threads (torchac: one)"
    remark = others.remark.replace("this was measured", "speeds were taken")
    svg = break_even_plot(drawn, title)
    return Findings(
        [quality, _size_table(sizes, schemes), _speed_table(speeds), break_even_table(best)],
        [*absent, remark],
        WITH_ROUNDS,
        ("codec-break-even.svg", "Gain over raw bytes by bandwidth of the link", svg),
    )


# --- Schemes --------------------------------------------------------------------------------------


def keep(kv: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Leave the chunk as it is."""
    return kv, 8.0 * kv.nbytes


def grouped(bits: int) -> Scheme:
    """Return signed integers in groups of 32 channels, the largest magnitude of a group its scale,
    kept in float16.
    """
    top = 2 ** (bits - 1) - 1

    def apply(kv: torch.Tensor) -> tuple[torch.Tensor, float]:
        groups = kv.float().unflatten(-1, (-1, GROUP_SIZE))
        scales = (groups.abs().amax(-1, keepdim=True) / top).half().float()
        whole = (groups / scales.masked_fill(scales == 0, 1.0)).round().clamp(-top, top)
        num_bits = kv.numel() * bits + scales.numel() * SCALE_BITS
        return (whole * scales).flatten(-2).to(kv.dtype), float(num_bits)

    return apply


def _zstd(kv: torch.Tensor) -> tuple[torch.Tensor, float]:
    packed = _compress(raw_bytes(kv))
    decoded = torch.frombuffer(bytearray(_decompress(packed)), dtype=kv.dtype)
    return decoded.view(kv.shape), 8.0 * len(packed)


def _compress(block: memoryview) -> bytes:
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(block)


def _decompress(frame: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(frame)


def _documented(kv: torch.Tensor) -> tuple[torch.Tensor, float]:
    quantised = documented_codec.quantise(kv)
    return quantised.values(), quantised.bits()


BASELINES: dict[str, Scheme] = {
    RAW: keep,
    "zstd -3 on bf16": _zstd,
    "int8, groups of 32": grouped(8),
    "int4, groups of 32": grouped(4),
    "documented algorithm, ideal coder": _documented,
}


# --- Quality --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Windows:
    """Pieces of held-out text that do not overlap, and the KV of their prefixes.

    Attributes:
        ids: int64 `[n, 1537]`: the prefix, then what is read after it, then the last token to
            predict.
        documents: int64 `[n]`, which document each is from.
        kv: bf16 `[n, 2, num_layers, 1024, hidden]`; keys as a serving engine keeps them, turned by
            their positions.
    """

    ids: torch.Tensor
    documents: torch.Tensor
    kv: torch.Tensor

    def chunks(self, window: int) -> list[torch.Tensor]:
        """Return the four chunks of a window's prefix, each contiguous, bf16 `[2, num_layers, 256,
        hidden]`.
        """
        return [chunk.contiguous() for chunk in self.kv[window].split(CHUNK_TOKENS, dim=2)]


class Reader:
    """A model that computes in float32 on KV that is kept in bfloat16."""

    def __init__(self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
        self.model = model
        self._tokenizer = tokenizer
        self._num_heads = int(model.config.num_key_value_heads)

    @classmethod
    def shipped(cls) -> Reader:
        """Return a reader with the model in the demo's package."""
        return cls(*load_model("float32"))

    def windows(self, pool: Executor, documents: Sequence[Document]) -> Windows:
        """Cut documents into windows and compute the KV of each prefix.

        Args:
            pool: Computes; threads, each with a torch of one thread, since what torch's own threads
                share is too little here.

        Raises:
            ValueError: No document is long enough.
        """
        ids, origins = [], []
        for number, document in enumerate(documents):
            text = self._tokenizer(document.text, add_special_tokens=False, verbose=False)
            tokens = [self.model.config.bos_token_id, *text["input_ids"]]
            end = min(len(tokens) - WINDOW_TOKENS, MAX_WINDOWS_OF_DOCUMENT * WINDOW_TOKENS)
            for begin in range(0, end, WINDOW_TOKENS):
                ids.append(tokens[begin : begin + WINDOW_TOKENS + 1])
                origins.append(number)
        if not ids:
            raise ValueError(
                f"none of {len(documents)} documents has {WINDOW_TOKENS + 1} tokens: give longer"
                " ones"
            )
        table = torch.tensor(ids)
        kv = torch.cat(list(pool.map(self._prefix_kv, table.split(BATCH_WINDOWS))))
        return Windows(table, torch.tensor(origins), kv)

    @torch.inference_mode()
    def _prefix_kv(self, ids: torch.Tensor) -> torch.Tensor:
        cache = self.model(
            input_ids=ids[:, :PREFIX_TOKENS], use_cache=True, logits_to_keep=1
        ).past_key_values
        sides = [
            torch.stack([getattr(layer, side) for layer in cache.layers], 1)
            for side in ("keys", "values")
        ]
        # [batch, 2, layers, heads, tokens, size] -> [batch, 2, layers, tokens, hidden]
        return torch.stack(sides, 1).transpose(3, 4).flatten(4).to(torch.bfloat16)

    @torch.inference_mode()
    def log_probs(self, ids: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Return what the model expects at each of the 512 places after the prefix, every earlier
        token of the text being given.

        Args:
            ids: int64 `[batch, 1537]`.
            kv: bf16 `[batch, 2, num_layers, 1024, hidden]`, of the prefix; only this is read of it.

        Returns:
            float32 `[batch, 512, vocabulary]`, natural logarithms.
        """
        from transformers import DynamicCache

        heads = kv.float().unflatten(-1, (self._num_heads, -1)).transpose(3, 4).contiguous()
        cache = DynamicCache()
        for layer in range(kv.shape[2]):
            cache.update(heads[:, 0, layer], heads[:, 1, layer], layer)
        logits = self.model(
            input_ids=ids[:, PREFIX_TOKENS:WINDOW_TOKENS], past_key_values=cache, use_cache=True
        ).logits
        return F.log_softmax(logits.float(), -1)


@dataclass(frozen=True)
class Change:
    """A change with its uncertainty: `value` plus or minus `half_width` at 95 %."""

    value: float
    half_width: float


@dataclass(frozen=True)
class Quality:
    """What a scheme costs the model.

    Attributes:
        bits: For each element, all counted.
        change: Of the model's loss on the text after the prefix, relative to reading unencoded KV.
        agreement: Share of the places where the likeliest token is the same.
    """

    bits: float
    change: Change
    agreement: float


def relative_change(base: torch.Tensor, other: torch.Tensor, groups: torch.Tensor) -> Change:
    """Return the relative change of a total, from pairs: its 95 % interval counts what is in one
    group as one observation.

    Args:
        base: Losses without the change, float64 `[n]`.
        other: Losses with it.
        groups: int64 `[n]`, which document each is from; two at least.

    Raises:
        ValueError: There is only one group: its spread says nothing.
    """
    total = base.sum()
    value = (other - base).sum() / total
    names, places = groups.unique(return_inverse=True)
    if len(names) < 2:
        raise ValueError("an interval needs text from two documents at least")
    residuals = torch.zeros(len(names), dtype=torch.float64)
    residuals.index_add_(0, places, other - base - value * base)
    variance = residuals.square().sum() * len(names) / (len(names) - 1)
    return Change(float(value), NORMAL_95 * float(variance.sqrt() / total))


class QualityBench:
    """Reads the same windows with each scheme; pairs with the windows read from unencoded KV."""

    def __init__(self, reader: Reader, windows: Windows, pool: Executor) -> None:
        self._reader = reader
        self._windows = windows
        self._pool = pool
        numbers = torch.arange(len(windows.ids))
        self._batches = [batch.tolist() for batch in numbers.split(BATCH_WINDOWS)]
        self._expected = list(
            pool.map(
                lambda batch: reader.log_probs(windows.ids[batch], windows.kv[batch]), self._batches
            )
        )

    def measure(self, scheme: Scheme) -> Quality:
        """Encode, decode and read every window; a scheme is applied in several threads at once."""
        read = self._pool.map(partial(self._read, scheme), self._batches, self._expected)
        bits, base, nats, agreement = zip(*read, strict=True)
        return Quality(
            bits=sum(bits) / self._windows.kv.numel(),
            change=relative_change(torch.cat(base), torch.cat(nats), self._windows.documents),
            agreement=float(torch.cat(agreement).mean()),
        )

    def _read(
        self, scheme: Scheme, batch: Sequence[int], expected: torch.Tensor
    ) -> tuple[float, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the bits of some windows, and of each window the loss from unencoded KV, the loss
        from decoded KV and the share of equal likeliest tokens.
        """
        ids, num_bits, prefixes = self._windows.ids[batch], 0.0, []
        for window in batch:
            decoded, bits = zip(*map(scheme, self._windows.chunks(window)), strict=True)
            prefixes.append(torch.cat(decoded, dim=2))
            num_bits += sum(bits)
        kv = torch.stack(prefixes)
        # The same bits give the same predictions: computing them again would only take time.
        is_same = torch.equal(kv.view(torch.int16), self._windows.kv[batch].view(torch.int16))
        found = expected if is_same else self._reader.log_probs(ids, kv)
        targets = ids[:, -READ_TOKENS:].unsqueeze(-1)
        base, nats = (-one.gather(-1, targets).double().sum((1, 2)) for one in (expected, found))
        agreement = (expected.argmax(-1) == found.argmax(-1)).double().mean(1)
        return num_bits, base, nats, agreement


def _held_out() -> list[Document]:
    return [doc for doc in collect_corpus().held_out if doc.kind in MEASURED_KINDS]


def _on_the_model(run: Run, schemes: Mapping[str, Scheme]) -> tuple[Section, list[tuple[str, ...]]]:
    """Return the table of quality, and sizes on the model's own KV."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        reader = Reader.shipped()
        windows = run("codecs: KV of the model", lambda: reader.windows(pool, _held_out()))
        bench = run("codecs: what the model expects", lambda: QualityBench(reader, windows, pool))
        rows = [
            (name, *_quality_cells(run(f"codecs: quality, {name}", lambda: bench.measure(scheme))))  # noqa: B023 (run at once)
            for name, scheme in schemes.items()
        ]
        step = max(1, len(windows.ids) // NUM_SIZED_WINDOWS)
        chunks = [windows.chunks(window)[0] for window in range(0, len(windows.ids), step)]
        sizes = run("codecs: sizes", lambda: size_rows("shipped model", chunks, schemes))
    title = "Quality: the shipped model's own KV, and its loss on the text after it"
    headings = ("scheme", "bits an element", "change of the loss, %", "same likeliest token", "")
    return Section(title, headings, rows), sizes


def _quality_cells(found: Quality) -> tuple[str, ...]:
    change = f"{100 * found.change.value:+.3f} ± {100 * found.change.half_width:.3f}"
    return (f"{found.bits:.3f}", change, f"{found.agreement:.2%}", "")


def chunk_of_the_model() -> torch.Tensor:
    """Return the first chunk of the longest held-out document."""
    longest = max(_held_out(), key=lambda doc: len(doc.text))
    with ThreadPoolExecutor(1) as pool:
        return Reader.shipped().windows(pool, [longest]).chunks(0)[0]


# --- Sizes and speed ------------------------------------------------------------------------------


def size_rows(
    source: str, chunks: Sequence[torch.Tensor], schemes: Mapping[str, Scheme]
) -> list[tuple[str, ...]]:
    """Encode the first tokens of chunks at each length; return sizes as shares of raw bytes.

    Args:
        source: What the rows call the KV.
        chunks: bf16 `[2, num_layers, at least 256, hidden]`; sizes are totals over them.
        schemes: `RAW` is left out.
    """
    rows = []
    for num_tokens in LENGTHS:
        heads = [chunk[:, :, :num_tokens].contiguous() for chunk in chunks]
        raw_bits = sum(8 * head.nbytes for head in heads)
        shares = (
            f"{sum(scheme(head)[1] for head in heads) / raw_bits:.3f}"
            for name, scheme in schemes.items()
            if name != RAW
        )
        rows.append((str(num_tokens), *shares, source))
    return rows


def _size_table(rows: Sequence[tuple[str, ...]], schemes: Mapping[str, Scheme]) -> Section:
    headings = ("tokens", *(name for name in schemes if name != RAW), "KV")
    return Section("Size of a chunk, as a share of its raw bytes", headings, rows)


@dataclass(frozen=True)
class Subject:
    """Something that encodes one chunk and decodes it.

    Attributes:
        raw_bytes: Bytes that a call goes over.
        encoded_bytes: What they become.
    """

    name: str
    num_threads: int
    raw_bytes: int
    encoded_bytes: float
    encode: Callable[[], object]
    decode: Callable[[], object]


@dataclass(frozen=True)
class Speed:
    """A subject's speed.

    Attributes:
        ratio: How many times smaller chunks become.
        encode: Median, GB/s (10^9 raw bytes).
        decode: Likewise.
    """

    name: str
    num_threads: int
    ratio: float
    encode: float
    decode: float


def timed(subjects: Sequence[Subject]) -> list[Speed]:
    """Time subjects that do the same with other numbers of threads, in turn."""
    medians = [
        [
            statistics.median(seconds)
            for seconds in in_turn(*(lambda _, work=work: work() for work in works))  # type: ignore[misc]
        ]
        for works in ([one.encode for one in subjects], [one.decode for one in subjects])
    ]
    return [
        Speed(
            one.name,
            one.num_threads,
            one.raw_bytes / one.encoded_bytes,
            one.raw_bytes / encode_s / GB,
            one.raw_bytes / decode_s / GB,
        )
        for one, encode_s, decode_s in zip(subjects, *medians, strict=True)
    ]


def _speeds(run: Run, kv: torch.Tensor) -> tuple[list[Speed], list[str]]:
    """Return the speeds of everything, and which yardsticks are missing and why."""
    found = run("codecs: speed, zstd", lambda: _time_zstd(kv))
    for name in CODEC_NAMES:
        found += run(f"codecs: speed, {name}", lambda: _time_codec(name, kv))  # noqa: B023 (run at once)
    absent = []
    for name in documented_codec.TORCHAC_BUILDS:
        try:
            coder = run(
                f"codecs: compiling {name}",
                lambda: documented_codec.compiled_torchac(name),  # noqa: B023
            )
        except (ImportError, RuntimeError) as exc:
            absent.append(f"{name}: not measured, {str(exc).splitlines()[0]}.")
            continue
        found += run(f"codecs: {name}", lambda: _time_torchac(kv, name, coder))  # noqa: B023
    return found, absent


def _time_codec(name: str, kv: torch.Tensor) -> list[Speed]:
    """Time a codec of the library, from payload to payload, with each number of threads.

    Raises:
        AssertionError: It kept the chunk raw, or numbers of threads give other bytes or values, or
            a lossless one lost something.
    """
    with ExitStack() as stack:
        schemes = [stack.enter_context(opened(name, threads)) for threads in THREADS]
        encoded = schemes[0].encode(kv)
        if encoded is None:
            raise AssertionError(f"{name} kept the chunk raw: there is nothing to time")
        header = schemes[0].header(encoded)
        subjects, outs = [], []
        for scheme, threads in zip(schemes, THREADS, strict=True):
            again = scheme.encode(kv)
            if again is None or again.payload != encoded.payload:
                raise AssertionError(f"{name} encodes to other bytes with {threads} threads")
            outs.append(torch.zeros_like(kv))
            encode = partial(scheme.encode, kv)
            decode = partial(scheme.decode, header, encoded, outs[-1])
            size = len(encoded.payload)
            subjects.append(Subject(name, threads, kv.nbytes, size, encode, decode))
        found = timed(subjects)
    expected = outs[0] if encoded.lossy else kv
    if not all(torch.equal(out.view(torch.int16), expected.view(torch.int16)) for out in outs):
        raise AssertionError(f"{name} decoded other values than it should")
    return found


def _time_zstd(kv: torch.Tensor) -> list[Speed]:
    """Time zstd on the same bytes, in blocks that threads share."""
    data = raw_bytes(kv)
    size = -(-len(data) // ZSTD_BLOCKS)
    blocks = [data[begin : begin + size] for begin in range(0, len(data), size)]
    frames = [_compress(block) for block in blocks]
    if b"".join(map(_decompress, frames)) != data:
        raise AssertionError("zstd gave other bytes back")
    with ExitStack() as stack:
        subjects = []
        for threads in THREADS:
            pool = stack.enter_context(ThreadPoolExecutor(threads))
            encode = partial(_map, pool, _compress, blocks)
            decode = partial(_map, pool, _decompress, frames)
            encoded_bytes = sum(map(len, frames))
            subjects.append(
                Subject(f"zstd -{ZSTD_LEVEL}", threads, len(data), encoded_bytes, encode, decode)
            )
        return timed(subjects)


def _map(pool: Executor, work: Callable[[Any], bytes], blocks: Sequence[Any]) -> list[bytes]:
    return list(pool.map(work, blocks))


def _time_torchac(kv: torch.Tensor, name: str, coder: Any) -> list[Speed]:
    """Time one build on a sample of a chunk's symbols; it has one thread. Only its coder is timed:
    quantisation, the tables, and spreading a table over the symbols, as its interface wants it, are
    left out.
    """
    quantised = documented_codec.quantise(kv)
    symbols, tables = documented_codec.torchac_input(quantised)
    stream = coder.encode_cdf(tables, symbols)
    if not torch.equal(coder.decode_cdf(tables, stream), symbols):
        raise AssertionError("torchac gave other symbols back")
    encode = partial(coder.encode_cdf, tables, symbols)
    decode = partial(coder.decode_cdf, tables, stream)
    num_bytes = symbols.numel() * kv.itemsize
    # With tables and maxima of the whole chunk: the streams alone could not be decoded.
    encoded_bytes = num_bytes * quantised.bits() / (8 * kv.nbytes)
    return timed([Subject(name, 1, num_bytes, encoded_bytes, encode, decode)])


def _speed_table(speeds: Sequence[Speed]) -> Section:
    rows = [
        (
            one.name,
            str(one.num_threads),
            f"{one.ratio:.2f}",
            f"{one.encode:.3f}",
            f"{one.decode:.3f}",
            "",
        )
        for one in speeds
    ]
    title = "Speed: one chunk of 256 tokens, Llama-3.1-8B shape, 33.6 MB raw; encode / decode"
    headings = ("what", "threads", "times smaller", "encode, GB/s", "decode, GB/s", "")
    return Section(title, headings, rows)


# --- Break-even -----------------------------------------------------------------------------------


def gain(speed: Speed, bandwidth: float, is_pipelined: bool) -> float:
    """Return how many times faster a load over a link of so many GB/s is than one of raw bytes.

    A chunk of R raw bytes crosses a link of B bytes a second in R / B. Encoded r times smaller, it
    crosses in R / (r B), and decoding at D takes R / D: one after the other, or both at once where
    a chunk is decoded while the next one crosses (pipelined).
    """
    transfer, decode = 1 / (speed.ratio * bandwidth), 1 / speed.decode
    return 1 / bandwidth / (max(transfer, decode) if is_pipelined else transfer + decode)


def break_even(speed: Speed) -> tuple[float, float]:
    """Return the bandwidths, GB/s, below which encoding is faster than raw bytes, one after the
    other and pipelined; 0 where it never is. See `gain`: B < D (1 - 1 / r), and B < D.
    """
    if speed.ratio <= 1:
        return 0.0, 0.0
    return speed.decode * (1 - 1 / speed.ratio), speed.decode


def break_even_table(speeds: Sequence[Speed]) -> Section:
    """Return the table of Gbit/s."""
    rows = [
        (
            one.name,
            str(one.num_threads),
            *(f"{bandwidth * GBIT_OF_GB:.2f}" for bandwidth in break_even(one)),
            "",
        )
        for one in speeds
    ]
    title = "Break-even: Gbit/s of a link below which encoding is faster than raw bytes"
    headings = ("what", "threads", "load, one after the other", "load, pipelined", "")
    return Section(title, headings, rows)


def break_even_plot(speeds: Sequence[Speed], title: str) -> str:
    """Return the gain over raw bytes by the link's bandwidth, both logarithmic, as SVG."""
    least, most = LINKS_GBIT[0], LINKS_GBIT[-1]
    x = Axis(
        "bandwidth of the link, Gbit/s",
        {link: f"{link:g}" for link in LINKS_GBIT},
        lambda link: math.log(link / least) / math.log(most / least),
    )
    y = Axis(
        "times faster than raw bytes",
        {times: f"{times:g}" for times in GAINS},
        lambda times: math.log(max(times, GAINS[0]) / GAINS[0]) / math.log(GAINS[-1] / GAINS[0]),
        dark=(1.0,),
    )
    chart = Chart(title, 440, x, y)
    links = [least * (most / least) ** (index / (NUM_POINTS - 1)) for index in range(NUM_POINTS)]
    for one in speeds:
        curves = [
            [
                (link, times)
                for link in links
                if (times := gain(one, link / GBIT_OF_GB, mode)) >= GAINS[0]
            ]
            for mode in (True, False)
        ]
        crossings = [bandwidth * GBIT_OF_GB for bandwidth in break_even(one)]
        dots = [(link, 1.0) for link in crossings if least < link < most]
        chart.add(f"{one.name}: {one.ratio:.2f} times smaller", *curves, dots=dots)
    return chart.svg(
        "solid: decoded while the next crosses",
        "dashed: one after the other",
        "dots: as fast as raw bytes",
    )
