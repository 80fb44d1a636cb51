"""What the codecs of a running sidecar did, from its `/metrics` and `/v1/tiers`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import httpx
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
from prometheus_client.parser import text_string_to_metric_families

from lmcache_ctl.cluster.asking import Caller
from lmcache_ctl.cluster.figures import BUILD_INFO
from lmcache_ctl.cluster.services import HOW_TO_AUTHENTICATE
from lmcache_ctl.errors import CtlError
from lmcache_ctl.output import MICRO

_PREFIX, _SUFFIX = "lmcache_codec_", "_total"
_COUNTERS = (
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
_FIGURES = MappingProxyType(
    {name: name.removeprefix(_PREFIX).removesuffix(_SUFFIX) for name in _COUNTERS}
)
"""What a counter is called among the figures of a tier."""
_ERRORS = MappingProxyType(
    {
        CODEC_LAST_MAX_RELATIVE_ERROR: "last_max_relative",
        CODEC_LAST_RMS_RELATIVE_ERROR: "last_rms_relative",
        CODEC_WORST_MAX_RELATIVE_ERROR: "worst_max_relative",
        CODEC_WORST_RMS_RELATIVE_ERROR: "worst_rms_relative",
    }
)


class Work(msgspec.Struct, frozen=True):
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

    @classmethod
    def of(cls, num_chunks: int, raw_bytes: int, encoded_bytes: int, seconds: float) -> Work:
        """From what was counted."""
        ratio = raw_bytes / encoded_bytes if encoded_bytes else None
        return cls(
            num_chunks,
            raw_bytes,
            encoded_bytes,
            seconds,
            ratio,
            raw_bytes / seconds if raw_bytes and seconds else None,
        )


class Activity(msgspec.Struct, frozen=True):
    """What was done for one serde, or for one tier.

    Attributes:
        name: The serde's, or the tier's.
        encoded: Chunks that were written.
        decoded: Chunks that were read.
        num_kept_raw: Chunks that would not have become smaller.
    """

    name: str
    encoded: Work
    decoded: Work
    num_kept_raw: int

    @classmethod
    def of(cls, name: str, figures: Mapping[str, float]) -> Activity:
        """From counters, by the name that they have among the figures of a tier."""
        work = [
            Work.of(
                int(figures.get(f"{done}d_chunks", 0)),
                int(figures.get(f"{done}d_raw_bytes", 0)),
                int(figures.get(f"{done}d_bytes", 0)),
                figures.get(f"{done}_microseconds", 0) * MICRO,
            )
            for done in ("encode", "decode")
        ]
        return cls(name, work[0], work[1], int(figures.get("unencoded_chunks", 0)))


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
        url: Whom it was asked.
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
        CtlError: It does not answer, or answers what is not a sidecar's.
    """
    url = caller.service.url
    metrics, tiers = await caller.get("/metrics"), await caller.get("/v1/tiers")
    if metrics.status != httpx.codes.OK:
        raise CtlError(
            f"{url} answers /metrics with {metrics.phrase}; is that the REST port of a sidecar?"
        )
    return read_stats(url, metrics.body, (tiers.status, tiers.body))


def read_stats(url: str, metrics: bytes, tiers: tuple[int, bytes]) -> CodecStats:
    """Read what a sidecar answered.

    Args:
        url: Whom it was asked.
        metrics: The body of `/metrics`.
        tiers: Status and body of `/v1/tiers`.

    Raises:
        CtlError: It is not a sidecar's answer.
    """
    counted: dict[str, dict[str, float]] = {}
    errors: dict[str, dict[str, float]] = {}
    is_ours = False
    try:
        for family in text_string_to_metric_families(metrics.decode("utf-8")):
            for sample in family.samples:
                is_ours = is_ours or sample.name == BUILD_INFO
                if sample.name in _FIGURES and LABEL_TIER not in sample.labels:
                    counted.setdefault(sample.labels.get(LABEL_SERDE, ""), {})[
                        _FIGURES[sample.name]
                    ] = sample.value
                elif sample.name in _ERRORS:
                    errors.setdefault(sample.labels.get(LABEL_PROFILE, ""), {})[
                        _ERRORS[sample.name]
                    ] = sample.value
    except ValueError as exc:
        raise CtlError(f"{url}/metrics is not in Prometheus' text format: {exc}") from exc
    if not is_ours:
        raise CtlError(
            f"{url}/metrics is not that of a service of this cache (it has no {BUILD_INFO})"
        )
    of_tiers, hidden = _read_tiers(*tiers)
    return CodecStats(
        url,
        _activities(counted.items()),
        _activities(of_tiers.items()),
        [ProfileErrors(profile, **figures) for profile, figures in sorted(errors.items())],
        hidden,
    )


def _activities(figures: Iterable[tuple[str, Mapping[str, float]]]) -> list[Activity]:
    """Those who did anything, in order of their names."""
    known = [Activity.of(name, of_name) for name, of_name in sorted(figures)]
    return [
        activity
        for activity in known
        if activity.encoded.num_chunks or activity.decoded.num_chunks or activity.num_kept_raw
    ]


def _read_tiers(status: int, body: bytes) -> tuple[Mapping[str, Mapping[str, float]], str]:
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        return {}, f"it wants a token for figures by tier: give one by {HOW_TO_AUTHENTICATE}"
    if status != httpx.codes.OK:
        phrase = httpx.codes.get_reason_phrase(status)
        return {}, f"it answered {phrase!r} when asked for figures by tier"
    try:
        return msgspec.json.decode(body, type=_Tiers).tiers, ""
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}, "its figures by tier cannot be read here; it may be of another version"
