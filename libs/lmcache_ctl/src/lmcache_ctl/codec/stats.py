"""What the codecs of a running sidecar did, from its `/metrics` and `/v1/tiers`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Final

import msgspec
from lmcache_core.telemetry import (
    CODEC_DECODE_MICROSECONDS_TOTAL,
    CODEC_DECODED_BYTES_TOTAL,
    CODEC_DECODED_CHUNKS_TOTAL,
    CODEC_DECODED_RAW_BYTES_TOTAL,
    CODEC_ENCODE_MICROSECONDS_TOTAL,
    CODEC_ENCODED_BYTES_TOTAL,
    CODEC_ENCODED_CHUNKS_TOTAL,
    CODEC_ENCODED_RAW_BYTES_TOTAL,
    CODEC_LAST_MAX_RELATIVE_ERROR,
    CODEC_LAST_RMS_RELATIVE_ERROR,
    CODEC_UNENCODED_CHUNKS_TOTAL,
    CODEC_WORST_MAX_RELATIVE_ERROR,
    CODEC_WORST_RMS_RELATIVE_ERROR,
    LABEL_PROFILE,
    LABEL_SERDE,
    LABEL_TIER,
)

from lmcache_ctl.asking import Caller, status_phrase
from lmcache_ctl.errors import CtlError
from lmcache_ctl.output import (
    MICRO,
    Columns,
    error_text,
    print_table,
    print_text,
    ratio_text,
    size_text,
    speed_text,
)
from lmcache_ctl.services import HOW_TO_AUTHENTICATE
from lmcache_ctl.states import BUILD_INFO, Metrics

_FIGURES: Final = {
    name: name.removeprefix("lmcache_codec_").removesuffix("_total")
    for name in (
        CODEC_ENCODED_CHUNKS_TOTAL,
        CODEC_ENCODED_RAW_BYTES_TOTAL,
        CODEC_ENCODED_BYTES_TOTAL,
        CODEC_ENCODE_MICROSECONDS_TOTAL,
        CODEC_UNENCODED_CHUNKS_TOTAL,
        CODEC_DECODED_CHUNKS_TOTAL,
        CODEC_DECODED_RAW_BYTES_TOTAL,
        CODEC_DECODED_BYTES_TOTAL,
        CODEC_DECODE_MICROSECONDS_TOTAL,
    )
}
"""What a counter is called among the figures of a tier."""
_ERRORS: Final = {
    CODEC_LAST_MAX_RELATIVE_ERROR: "last_max_relative",
    CODEC_LAST_RMS_RELATIVE_ERROR: "last_rms_relative",
    CODEC_WORST_MAX_RELATIVE_ERROR: "worst_max_relative",
    CODEC_WORST_RMS_RELATIVE_ERROR: "worst_rms_relative",
}


class CodecWork(msgspec.Struct, frozen=True):
    """Chunks that were encoded, or decoded.

    Attributes:
        num_chunks: How many.
        raw_bytes: Their payloads decoded.
        encoded_bytes: Their payloads encoded.
        seconds: Time in the codec, seconds.
        ratio: How many times smaller encoded; None before the first.
        raw_bytes_per_s: Speed in raw bytes a second; None before the first.
    """

    num_chunks: int
    raw_bytes: int
    encoded_bytes: int
    seconds: float
    ratio: float | None
    raw_bytes_per_s: float | None


class Activity(msgspec.Struct, frozen=True):
    """What was done for one serde, or for one tier.

    Attributes:
        name: The serde's, or the tier's.
        encoded: Chunks that were written.
        decoded: Chunks that were read.
        num_kept_raw: Chunks that would not have become smaller.
    """

    name: str
    encoded: CodecWork
    decoded: CodecWork
    num_kept_raw: int


class ProfileErrors(msgspec.Struct, frozen=True):
    """Relative errors that encoders measured; None where the sidecar does not tell.

    Attributes:
        profile: Serde and profile of the records.
        last_max_relative: Largest error of the last chunk.
        last_rms_relative: Root mean square error of its worst group of layers.
        worst_max_relative: Largest error of any chunk.
        worst_rms_relative: Largest root mean square error of any chunk.
    """

    profile: str
    last_max_relative: float | None = None
    last_rms_relative: float | None = None
    worst_max_relative: float | None = None
    worst_rms_relative: float | None = None


class CodecStats(msgspec.Struct, frozen=True):
    """What the codecs of a process did since it started.

    Attributes:
        url: Where it was asked.
        serdes: By serde, over all tiers and peers.
        tiers: By tier, over all serdes; empty where they may not be seen (`tiers_hidden`) or there
            are none.
        errors: By profile.
        tiers_hidden: Why figures by tier are missing, "" if they are not.
    """

    url: str
    serdes: list[Activity]
    tiers: list[Activity]
    errors: list[ProfileErrors]
    tiers_hidden: str = ""


class _Tiers(msgspec.Struct):
    tiers: dict[str, dict[str, int]]


async def fetch_stats(caller: Caller) -> CodecStats:
    """Ask a sidecar.

    Raises:
        CtlError: It does not answer, or is not a sidecar.
    """
    url = caller.service.url
    metrics, tiers = await caller.get("/metrics"), await caller.get("/v1/tiers")
    if metrics.status != HTTPStatus.OK:
        phrase = status_phrase(metrics.status)
        raise CtlError(f"{url} answers /metrics with {phrase}; is that the REST port of a sidecar?")
    return read_stats(url, metrics.body, (tiers.status, tiers.body))


def read_stats(url: str, metrics: bytes, tiers: tuple[int, bytes]) -> CodecStats:
    """Read what a sidecar answered.

    Args:
        url: Where it was asked.
        metrics: The body of `/metrics`.
        tiers: Status and body of `/v1/tiers`.

    Raises:
        CtlError: It is not a sidecar's answer.
    """
    counted: dict[str, dict[str, float]] = {}
    errors: dict[str, dict[str, float]] = {}
    try:
        samples = Metrics(metrics.decode("utf-8"))
    except (CtlError, ValueError) as exc:
        why = exc.__cause__ or exc
        raise CtlError(f"{url}/metrics is not in Prometheus' text format: {why}") from exc
    if not samples.of(BUILD_INFO):
        raise CtlError(
            f"{url}/metrics is not that of a service of this cache (it has no {BUILD_INFO})"
        )
    for name, figure in _FIGURES.items():
        for labels, value in samples.of(name):
            if LABEL_TIER not in labels:
                counted.setdefault(labels.get(LABEL_SERDE, ""), {})[figure] = value
    for name, figure in _ERRORS.items():
        for labels, value in samples.of(name):
            errors.setdefault(labels.get(LABEL_PROFILE, ""), {})[figure] = value
    of_tiers, hidden = _read_tiers(*tiers)
    return CodecStats(
        url,
        _activities(counted.items()),
        _activities(of_tiers.items()),
        [ProfileErrors(profile, **figures) for profile, figures in sorted(errors.items())],
        hidden,
    )


def _activities(figures: Iterable[tuple[str, Mapping[str, float]]]) -> list[Activity]:
    """Return those with any activity, in order of name."""
    known = [
        Activity(
            name,
            _work(of_name, "encode"),
            _work(of_name, "decode"),
            int(of_name.get("unencoded_chunks", 0)),
        )
        for name, of_name in sorted(figures)
    ]
    return [
        one for one in known if one.encoded.num_chunks or one.decoded.num_chunks or one.num_kept_raw
    ]


def _work(figures: Mapping[str, float], done: str) -> CodecWork:
    num_chunks, raw_bytes, encoded_bytes = (
        int(figures.get(f"{done}d_{name}", 0)) for name in ("chunks", "raw_bytes", "bytes")
    )
    seconds = figures.get(f"{done}_microseconds", 0) * MICRO
    return CodecWork(
        num_chunks,
        raw_bytes,
        encoded_bytes,
        seconds,
        raw_bytes / encoded_bytes if encoded_bytes else None,
        raw_bytes / seconds if raw_bytes and seconds else None,
    )


def _read_tiers(status: int, body: bytes) -> tuple[Mapping[str, Mapping[str, float]], str]:
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return {}, f"it requires a token for figures by tier: give one with {HOW_TO_AUTHENTICATE}"
    if status != HTTPStatus.OK:
        return {}, f"it answered {status_phrase(status)} when asked for figures by tier"
    try:
        return msgspec.json.decode(body, type=_Tiers).tiers, ""
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}, "its figures by tier cannot be read here; it may be of another version"


def print_stats(stats: CodecStats) -> None:
    """Print what codecs did: by serde, by tier, and errors by profile."""
    if not stats.serdes and not stats.tiers:
        print_text(f"{stats.url}: nothing has been encoded or decoded since it started.")
    for title, heading, activities in (
        ("By serde, over all tiers and peers", "serde", stats.serdes),
        ("By tier", "tier", stats.tiers),
    ):
        rows = [row for activity in activities for row in _activity_rows(activity)]
        if rows:
            headings = (heading, "", "chunks", "raw", "encoded", "ratio", "GB/s", "kept raw")
            print_table(title, Columns(headings, left=2), rows)
    if stats.errors:
        rows = [
            (
                one.profile,
                error_text(one.last_max_relative),
                error_text(one.worst_max_relative),
                error_text(one.last_rms_relative),
                error_text(one.worst_rms_relative),
            )
            for one in stats.errors
        ]
        columns = Columns(("profile", "last max", "worst max", "last rms", "worst rms"))
        print_table("Errors that encoders measured", columns, rows)
    if stats.tiers_hidden:
        print_text(f"No figures by tier: {stats.tiers_hidden}.")


def _activity_rows(activity: Activity) -> Iterator[tuple[str, ...]]:
    for done, work, num_raw in (
        ("encoded", activity.encoded, activity.num_kept_raw),
        ("decoded", activity.decoded, 0),
    ):
        if work.num_chunks or num_raw:
            yield (
                activity.name,
                done,
                str(work.num_chunks),
                size_text(work.raw_bytes),
                size_text(work.encoded_bytes),
                ratio_text(work.ratio),
                speed_text(work.raw_bytes_per_s),
                str(num_raw) if done == "encoded" else "",
            )
