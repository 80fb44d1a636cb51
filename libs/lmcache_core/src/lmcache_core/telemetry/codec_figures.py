"""Statistics of codecs: bytes before and after, time, and how much decoded values differ from the
stored ones.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from lmcache_core.telemetry.counters import Counters
from lmcache_core.telemetry.names import (
    CODEC_DECODE_MICROSECONDS_TOTAL,
    CODEC_DECODED_BYTES_TOTAL,
    CODEC_DECODED_CHUNKS_TOTAL,
    CODEC_DECODED_RAW_BYTES_TOTAL,
    CODEC_ENCODE_MICROSECONDS_TOTAL,
    CODEC_ENCODED_BYTES_TOTAL,
    CODEC_ENCODED_CHUNKS_TOTAL,
    CODEC_ENCODED_RAW_BYTES_TOTAL,
    CODEC_UNENCODED_CHUNKS_TOTAL,
)

MAX_PROFILES = 64
"""Profiles whose errors are kept: they come from others' records, and a label's values must be
bounded.
"""
MAX_ERROR = 1e6
"""Upper bound on the error displayed: the figure comes from records, which may contain anything."""
_PARTS_PER_MILLION = 1e6
_PREFIX, _SUFFIX = "lmcache_codec_", "_total"


@dataclass(frozen=True, slots=True)
class MeasuredError:
    """Relative errors that an encoder measured.

    Attributes:
        max_relative: The largest, over all groups of layers.
        rms_relative: The largest root of the mean square, over all groups of layers.
    """

    max_relative: float
    rms_relative: float

    def worst_with(self, other: MeasuredError) -> MeasuredError:
        """Return the larger of each error."""
        return MeasuredError(
            max(self.max_relative, other.max_relative), max(self.rms_relative, other.rms_relative)
        )


class CodecFigures:
    """Counts and errors of one user of codecs (a tier, a server), also added to those of the
    process. Thread-safe.

    Args:
        counters: Counters, by serde.
        whole: The statistics of the process, updated along.
    """

    def __init__(self, counters: Counters | None = None, whole: CodecFigures | None = None) -> None:
        self._counters = Counters() if counters is None else counters
        self._whole = whole
        self._lock = threading.Lock()
        self._last: dict[str, MeasuredError] = {}
        self._worst: dict[str, MeasuredError] = {}

    def encoded(self, serde: str, raw_bytes: int, encoded_bytes: int, elapsed_s: float) -> None:
        """Count a chunk that was encoded."""
        self._add(
            serde,
            {
                CODEC_ENCODED_CHUNKS_TOTAL: 1,
                CODEC_ENCODED_RAW_BYTES_TOTAL: raw_bytes,
                CODEC_ENCODED_BYTES_TOTAL: encoded_bytes,
                CODEC_ENCODE_MICROSECONDS_TOTAL: int(elapsed_s * 1e6),
            },
        )

    def left_raw(self, serde: str, elapsed_s: float) -> None:
        """Count a chunk that stays raw because encoding would not make it smaller."""
        self._add(
            serde,
            {
                CODEC_UNENCODED_CHUNKS_TOTAL: 1,
                CODEC_ENCODE_MICROSECONDS_TOTAL: int(elapsed_s * 1e6),
            },
        )

    def decoded(self, serde: str, raw_bytes: int, encoded_bytes: int, elapsed_s: float) -> None:
        """Count a chunk that was decoded."""
        self._add(
            serde,
            {
                CODEC_DECODED_CHUNKS_TOTAL: 1,
                CODEC_DECODED_RAW_BYTES_TOTAL: raw_bytes,
                CODEC_DECODED_BYTES_TOTAL: encoded_bytes,
                CODEC_DECODE_MICROSECONDS_TOTAL: int(elapsed_s * 1e6),
            },
        )

    def _add(self, serde: str, amounts: Mapping[str, int]) -> None:
        for name, amount in amounts.items():
            self._counters.add(name, amount, serde)
        if self._whole is not None:
            self._whole._add(serde, amounts)

    def measured(self, profile: str, error: MeasuredError) -> None:
        """Record the errors that the encoder of a chunk with that profile measured."""
        bounded = MeasuredError(_bounded(error.max_relative), _bounded(error.rms_relative))
        with self._lock:
            if profile in self._last or len(self._last) < MAX_PROFILES:
                self._last[profile] = bounded
                self._worst[profile] = bounded.worst_with(self._worst.get(profile, bounded))
        if self._whole is not None:
            self._whole.measured(profile, bounded)

    def errors(self) -> dict[str, tuple[MeasuredError, MeasuredError]]:
        """Return the last and the worst errors, by profile."""
        with self._lock:
            return {profile: (last, self._worst[profile]) for profile, last in self._last.items()}

    def stats(self) -> dict[str, int]:
        """Return the figures for status pages, over all serdes: `encoded_raw_bytes`,
        `encoded_bytes` and so on; errors in parts per million.
        """
        figures: dict[str, int] = {}
        for (name, _), value in self._counters.snapshot().items():
            if name.startswith(_PREFIX):
                figure = name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
                figures[figure] = figures.get(figure, 0) + value
        worst = MeasuredError(0.0, 0.0)
        errors = self.errors()
        for _, of_profile in errors.values():
            worst = worst.worst_with(of_profile)
        if errors:
            figures["worst_max_error_ppm"] = round(worst.max_relative * _PARTS_PER_MILLION)
            figures["worst_rms_error_ppm"] = round(worst.rms_relative * _PARTS_PER_MILLION)
        return figures


def _bounded(error: float) -> float:
    return MAX_ERROR if math.isnan(error) else min(max(error, 0.0), MAX_ERROR)
