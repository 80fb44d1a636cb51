"""On which links encoding pays, from ratio and speed.

A chunk of R raw bytes crosses a link of B bytes a second in R / B. Encoded, it crosses in R / (r
B), and decoding takes R / D.

- One after the other: R / (r B) + R / D < R / B, so B < D (1 - 1 / r). With encoding in the way,
  too: B < (1 - 1 / r) / (1 / D + 1 / E).
- In a pipeline, where a chunk is decoded while the next one crosses (many chunks; the first one's
  decoding is not counted): max(R / (r B), R / D) < R / B, so B < D; with encoding in the pipeline,
  on a machine of its own, B < min(D, E).
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.bench.codec_speed import SpeedRow


@dataclass(frozen=True)
class BreakEven:
    """The bandwidths below which encoding is faster than raw bytes, GB/s; 0 where it never is.

    Attributes:
        load: Encoded before, decoded after the transfer.
        load_pipelined: Decoded during it.
        transfer: Encoded, transferred, decoded, one after the other.
        transfer_pipelined: All three at once.
    """

    load: float
    load_pipelined: float
    transfer: float
    transfer_pipelined: float


def break_even(row: SpeedRow) -> BreakEven:
    """Where a subject stops to pay."""
    if row.ratio <= 1:
        return BreakEven(0.0, 0.0, 0.0, 0.0)
    saved = 1 - 1 / row.ratio
    encode, decode = row.encode.rate, row.decode.rate
    return BreakEven(decode * saved, decode, saved / (1 / decode + 1 / encode), min(decode, encode))


def gain(row: SpeedRow, bandwidth: float, is_pipelined: bool) -> float:
    """How many times faster a load over a link is than one of raw bytes.

    Args:
        row: What was measured.
        bandwidth: Of the link, GB/s.
        is_pipelined: Chunks are decoded while the next ones cross.
    """
    transfer, decode = 1 / (row.ratio * bandwidth), 1 / row.decode.rate
    return 1 / bandwidth / (max(transfer, decode) if is_pipelined else transfer + decode)
