"""What was measured of codecs, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.bench.codec_break_even import break_even
from tests.bench.codec_plot import GBIT_OF_GB
from tests.bench.codec_quality import QualityRow
from tests.bench.codec_sizes import SizeRow
from tests.bench.codec_speed import Pace, SpeedRow
from tests.bench.report import Section


def quality(rows: Sequence[QualityRow], notes: Mapping[str, str]) -> Section:
    """The curve.

    Args:
        rows: What was measured.
        notes: By name of a scheme: what its bits count.
    """
    headings = (
        "scheme",
        "bits an element",
        "loss, bits a byte",
        "change of the loss, %",
        "KL, nats",
        "same likeliest token",
        "bits count",
    )
    cells = [
        (
            row.name,
            f"{row.bits:.3f}",
            f"{row.bits_per_byte:.4f}",
            f"{100 * row.change.value:+.3f} ± {100 * row.change.half_width:.3f}",
            f"{row.divergence:.5f}",
            f"{row.agreement:.2%}",
            notes.get(row.name, ""),
        )
        for row in rows
    ]
    return Section(
        "Quality: the shipped model's own KV, and its loss on the text after it", headings, cells
    )


def sizes(rows: Sequence[SizeRow]) -> Section:
    """Sizes by length; every row has the same schemes."""
    names = list(rows[0].shares)
    cells = [
        (
            str(row.num_tokens),
            f"{row.raw_bytes:,}",
            *(f"{row.shares[name]:.3f}" for name in names),
            row.source,
        )
        for row in rows
    ]
    return Section(
        "Size of a chunk, as a share of its raw bytes",
        ("tokens", "raw bytes", *names, "KV"),
        cells,
        left_out=frozenset({"7", "64", "100"}),
    )


def speeds(rows: Sequence[SpeedRow], yardsticks: Sequence[SpeedRow]) -> Section:
    """Speeds.

    Args:
        rows: What was measured, the yardsticks too.
        yardsticks: What the others are held against.
    """
    held = [f"times {yardstick.name}" for yardstick in yardsticks]
    headings = (
        "what",
        "threads",
        "times smaller",
        "encode, GB/s",
        "encode, slowest … fastest",
        "decode, GB/s",
        "decode, slowest … fastest",
        "share of a copy",
        *held,
        "times one thread",
    )
    cells = [
        (
            row.name,
            str(row.num_threads),
            f"{row.ratio:.2f}",
            *_pace(row.encode),
            *_pace(row.decode),
            f"{row.encode.copy_share:.3f} / {row.decode.copy_share:.3f}",
            *("" if row in yardsticks else _times(row, yardstick) for yardstick in yardsticks),
            "" if row.num_threads == 1 else f"{row.encode.scaling:.2f} / {row.decode.scaling:.2f}",
        )
        for row in rows
    ]
    return Section(
        "Speed: one chunk of 256 tokens, Llama-3.1-8B shape, 33.6 MB raw; encode / decode",
        headings,
        cells,
    )


def break_evens(rows: Sequence[SpeedRow]) -> Section:
    """Where it stops to pay, Gbit/s."""
    headings = (
        "what",
        "threads",
        "load, one after the other",
        "load, pipelined",
        "encode and load, one after the other",
        "encode and load, pipelined",
        "ratio",
    )
    cells = []
    for row in rows:
        at = break_even(row)
        links = (at.load, at.load_pipelined, at.transfer, at.transfer_pipelined)
        cells.append(
            (
                row.name,
                str(row.num_threads),
                *(f"{link * GBIT_OF_GB:.2f}" for link in links),
                f"{row.ratio:.2f} times smaller",
            )
        )
    return Section(
        "Break-even: Gbit/s of a link below which encoding is faster than raw bytes",
        headings,
        cells,
        left_out=frozenset({"1"}),
    )


def _pace(pace: Pace) -> tuple[str, str]:
    low, high = pace.spread
    return f"{pace.rate:.3f}", f"{low:.3f} … {high:.3f}"


def _times(row: SpeedRow, yardstick: SpeedRow) -> str:
    return (
        f"{row.encode.rate / yardstick.encode.rate:.1f} /"
        f" {row.decode.rate / yardstick.decode.rate:.1f}"
    )
