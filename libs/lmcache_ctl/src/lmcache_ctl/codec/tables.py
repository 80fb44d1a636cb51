"""What the commands of `lmcachectl codec` print for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from lmcache_ctl.codec.layer_errors import LayerErrors
from lmcache_ctl.codec.records import InspectedFile, InspectedRecord
from lmcache_ctl.codec.stats import Activity, CodecStats, Work
from lmcache_ctl.output import (
    UNKNOWN,
    Columns,
    error_text,
    print_table,
    print_text,
    ratio_text,
    size_text,
    speed_text,
)

if TYPE_CHECKING:
    from lmcache_ctl.codec.measurement import MeasuredKv

_WORK_HEADINGS = ("", "chunks", "raw", "encoded", "ratio", "GB/s", "kept raw")


def print_stats(stats: CodecStats) -> None:
    """Tables of what codecs did: by serde, by tier, and errors by profile."""
    if not stats.serdes and not stats.tiers:
        print_text(f"{stats.url}: nothing has been encoded or decoded since it started.")
    for title, headings, activities in (
        ("By serde, over all tiers and peers", ("serde",), stats.serdes),
        ("By tier", ("tier",), stats.tiers),
    ):
        rows = [row for activity in activities for row in _activity_rows(activity)]
        if rows:
            print_table(title, Columns((*headings, *_WORK_HEADINGS), left=2), rows)
    if stats.errors:
        rows = [
            (
                errors.profile,
                error_text(errors.last_max_relative),
                error_text(errors.worst_max_relative),
                error_text(errors.last_rms_relative),
                error_text(errors.worst_rms_relative),
            )
            for errors in stats.errors
        ]
        print_table(
            "Errors that encoders measured",
            Columns(("profile", "last max", "worst max", "last rms", "worst rms")),
            rows,
        )
    if stats.tiers_hidden:
        print_text(f"No figures by tier: {stats.tiers_hidden}.")


def _activity_rows(activity: Activity) -> Iterator[tuple[str, ...]]:
    if activity.encoded.num_chunks or activity.num_kept_raw:
        yield (activity.name, "encoded", *_work_cells(activity.encoded), str(activity.num_kept_raw))
    if activity.decoded.num_chunks:
        yield (activity.name, "decoded", *_work_cells(activity.decoded), "")


def _work_cells(work: Work) -> tuple[str, ...]:
    raw, encoded = size_text(work.raw_bytes), size_text(work.encoded_bytes)
    return (
        str(work.num_chunks),
        raw,
        encoded,
        ratio_text(work.ratio),
        speed_text(work.raw_bytes_per_s),
    )


def print_files(files: Sequence[InspectedFile]) -> None:
    """A paragraph for each file, then what they are together."""
    for file in files:
        print_text(file.path)
        for name, value in _file_lines(file):
            print_text(f"  {name:<10} {value}")
    records = [file.record for file in files if file.record is not None]
    raw, encoded = (
        sum(record.raw_bytes for record in records),
        sum(record.encoded_bytes for record in records),
    )
    ratio = ratio_text(raw / encoded if encoded else None)
    faults = sum(bool(file.fault) for file in files)
    print_text(
        f"{len(files)} files, {faults} with a fault; {size_text(raw)} raw, {size_text(encoded)}"
        f" encoded, {ratio}"
    )


def _file_lines(file: InspectedFile) -> Iterator[tuple[str, str]]:
    if file.record is not None:
        yield from _record_lines(file.record)
    if file.fault:
        yield "FAULT", file.fault


def _record_lines(record: InspectedRecord) -> Iterator[tuple[str, str]]:
    key = record.key
    yield "chunk", key.chunk_hash
    yield (
        "of",
        f"{key.model_name} ({key.fmt}), worker {key.worker_id} of {key.world_size}"
        + (f", group {key.group}" if key.group else ""),
    )
    lossy = "lossy" if record.lossy else "lossless"
    yield (
        "serde",
        f"{record.serde}, {lossy}" + (f", profile {record.profile}" if record.profile else ""),
    )
    for tensor in record.tensors:
        group = f"{tensor.group}: " if tensor.group else ""
        yield (
            "tensor",
            (
                f"{group}{tensor.dtype} {list(tensor.shape)}, {size_text(tensor.raw_bytes)} in"
                f" {size_text(tensor.encoded_bytes)}"
            ),
        )
    bits = UNKNOWN if record.bits_per_element is None else f"{record.bits_per_element:.3f}"
    yield (
        "size",
        f"{size_text(record.encoded_bytes)}, {ratio_text(record.ratio)}, {bits} bits an element",
    )
    if record.errors:
        yield "errors", _groups_text(record.errors)
    elif record.lossy:
        yield "errors", "the record does not tell them"
    yield "digest", "right" if record.is_digest_right else "WRONG"
    if not record.is_named_after_key:
        yield "note", "the file is not named after its key: no tier would find it here"


def _groups_text(groups: Iterable[LayerErrors]) -> str:
    return "; ".join(
        f"{group.layers}: max {error_text(group.max_relative)}, rms"
        f" {error_text(group.rms_relative)}"
        for group in groups
    )


def print_measurements(measured: MeasuredKv) -> None:
    """A table with a line for each profile."""
    rows = [
        (
            result.profile,
            f"{result.bits_per_element:.2f}",
            ratio_text(result.ratio),
            (
                "0"
                if result.is_equal
                else error_text(max(group.max_relative for group in result.errors))
            ),
            "0" if result.is_equal else error_text(result.rms_relative),
            "yes" if result.is_equal else "no",
            speed_text(result.encode_bytes_per_s),
            speed_text(result.decode_bytes_per_s),
        )
        for result in measured.profiles
    ]
    title = (
        f"{measured.source}: {measured.num_tokens} tokens,"
        f" {size_text(measured.profiles[0].raw_bytes)}"
    )
    headings = (
        "profile",
        "bits",
        "ratio",
        "max error",
        "rms error",
        "equal",
        "enc GB/s",
        "dec GB/s",
    )
    print_table(title, Columns(headings), rows)
    print_text(
        "bits: of an element, everything counted. max: largest error, relative to the largest value"
        " of its token or channel, as the encoder says; rms: of all values, measured on what was"
        " decoded. equal: bit for bit. GB: 10^9 raw bytes, best of 3."
    )
