"""The codecs of chunks: CacheGen in its profiles, and lossless."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_core._typing import override
from lmcache_core.concurrency import StartedPool
from lmcache_core.errors import SerdeError
from lmcache_core.memory.dtypes import num_bytes
from lmcache_core.record import RecordHeader, TensorSpec
from lmcache_core.serde.blob import Head, Mode, Reader
from lmcache_core.serde.cachegen import CacheGenConfig
from lmcache_core.serde.codec import (
    CACHEGEN_SERDE,
    LOSSLESS_SERDE,
    TABLES_MARK,
    ChunkCodec,
    EncodedPayload,
    EncodingReport,
    GroupError,
)
from lmcache_core.serde.lossless import LosslessCoder
from lmcache_core.serde.machine_code import Loops, load_loops
from lmcache_core.serde.plane_layout import PlaneLayout
from lmcache_core.serde.quantised import QuantisedCoder, group_errors
from lmcache_core.serde.quantised_blob import (
    KINDS,
    NotQuantisableError,
    Quantiser,
    can_be_quantised,
)
from lmcache_core.serde.tables import TableSet, bell_curves

MAX_THREADS = 8
_STORED_HEAD = Head(Mode.STORED, 0, 0, (0, 0, 0, 0)).pack()

Pieces = list[Any]
SHORT_TOKENS = 64
"""Below this, a channel has too few values to measure its spread: our own profiles then quantise
like the documented one.
"""
PLANE_LEVELS = 127


class Profile(StrEnum):
    """How much is kept.

    `STANDARD`: the documented bins, the same values as the documented algorithm. `HIGH` and `LOW`:
    one step for each layer of keys or values, 9/16 or 15/16 of the standard deviation within its
    channels (docs/codec.md has the curve that they were chosen from).
    """

    STANDARD = "standard"
    HIGH = "high"
    LOW = "low"


_FINENESS = {Profile.HIGH: 144, Profile.LOW: 240}


def quantiser_of(profile: Profile, shape: Sequence[int]) -> Quantiser:
    """Return the quantiser of a tensor `[sides, layers, tokens, channels]`: keys first, then
    values; a single side is treated as keys.
    """
    sides, layers, tokens, _ = shape
    if profile is Profile.STANDARD or tokens < SHORT_TOKENS:
        config = CacheGenConfig.for_num_layers(layers)
        bins = (
            [*config.bins_of_keys(), *config.bins_of_values()]
            if sides == 2
            else list(config.bins_of_keys()) * sides
        )
        return Quantiser(Mode.BY_TOKEN, tuple(count // 2 - 1 for count in bins))
    return Quantiser(Mode.BY_PLANE, (PLANE_LEVELS,) * (sides * layers), _FINENESS[profile])


def error_groups(profile: Profile, shape: Sequence[int]) -> list[tuple[str, slice]]:
    """Return the groups of planes whose errors are reported together: layers of keys, and of
    values, with the same quantisation.
    """
    sides, layers, _, _ = shape
    levels = quantiser_of(profile, shape).levels
    names = ("keys", "values") if sides == 2 else ("kv", *(f"kv{side}" for side in range(1, sides)))
    groups = []
    for side in range(sides):
        start = 0
        for layer in range(1, layers + 1):
            at = side * layers
            if layer == layers or levels[at + layer] != levels[at + start]:
                groups.append((f"{names[side]} {start}-{layer - 1}", slice(at + start, at + layer)))
                start = layer
    return groups


class _Tools:
    """What an open codec works with."""

    def __init__(self, loops: Loops, tables: TableSet, threads: int) -> None:
        self.tables = tables
        self.pool = StartedPool(threads, "lmcache-codec")
        self.quantised = QuantisedCoder(loops, tables, self.pool)
        self.lossless = LosslessCoder(loops, self.pool)


class CacheGenCodec(ChunkCodec):
    """Encodes with one profile; decodes every profile, and what was encoded without loss.

    Args:
        profile: How much is kept; None: everything.
        threads: How many work on one payload; 0: as many as there are processors for this process,
            at most `MAX_THREADS`.
    """

    def __init__(self, profile: Profile | None, threads: int = 0) -> None:
        self._profile = profile
        self._threads = threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._tools: _Tools | None = None

    @property
    @override
    def serde(self) -> str:
        return LOSSLESS_SERDE if self._profile is None else CACHEGEN_SERDE

    @property
    @override
    def lossy(self) -> bool:
        return self._profile is not None

    @override
    def open(self) -> None:
        if self._tools is None:
            self._tools = _Tools(load_loops(), bell_curves(), self._threads)

    @override
    def close(self) -> None:
        tools, self._tools = self._tools, None
        if tools is not None:
            tools.pool.shutdown(wait=False)

    @override
    def encode(self, tensors: Sequence[TensorSpec], payload: memoryview) -> EncodedPayload | None:
        tools = self._opened
        pieces: Pieces = []
        specs: list[TensorSpec] = []
        groups: list[GroupError] = []
        is_lossy = False
        at = 0
        for spec in tensors:
            blob, errors = self._encode_tensor(
                tools, spec, payload[spec.offset : spec.offset + spec.length]
            )
            length = sum(memoryview(piece).nbytes for piece in blob)
            pieces += blob
            specs.append(TensorSpec(spec.group, spec.dtype, spec.shape, at, length))
            at += length
            if errors is not None and self._profile is not None:
                is_lossy = True
                prefix = f"{spec.group} " if spec.group else ""
                figures = group_errors(errors, error_groups(self._profile, spec.shape))
                groups += [
                    GroupError(prefix + name, largest, rms) for name, largest, rms in figures
                ]
        if at >= len(payload):
            return None
        elements = sum(int(np.prod(spec.shape, dtype=np.int64)) for spec in tensors)
        report = EncodingReport(8 * at / elements, len(payload), at, tuple(groups))
        profile = f"{self._profile}{TABLES_MARK}{tools.tables.id}" if is_lossy else ""
        serde = CACHEGEN_SERDE if is_lossy else LOSSLESS_SERDE
        return EncodedPayload(
            memoryview(b"".join(pieces)), tuple(specs), serde, profile, is_lossy, report
        )

    @override
    def decodes(self, header: RecordHeader) -> bool:
        if header.serde == CACHEGEN_SERDE:
            return header.profile.rpartition(TABLES_MARK)[2] == self._opened.tables.id
        return header.serde == LOSSLESS_SERDE

    @override
    def decode(self, header: RecordHeader, payload: memoryview, out: memoryview) -> None:
        tools = self._opened
        at = 0
        for spec in header.tensors:
            size = num_bytes(spec.shape, spec.dtype)
            if at + size > len(out):
                raise SerdeError(f"a record of tensors of more than {len(out)} bytes")
            self._decode_tensor(
                tools,
                spec,
                payload[spec.offset : spec.offset + spec.length],
                out[at : at + size],
                header.lossy,
            )
            at += size
        if at != len(out):
            raise SerdeError(f"a record of tensors of {at} bytes, expected {len(out)}")

    @property
    def _opened(self) -> _Tools:
        if self._tools is None:
            raise SerdeError(f"the codec {self.serde} is not open")
        return self._tools

    def _encode_tensor(
        self, tools: _Tools, spec: TensorSpec, raw: memoryview
    ) -> tuple[Pieces, npt.NDArray[Any] | None]:
        if self._profile is not None and can_be_quantised(spec.dtype, spec.shape):
            layout = PlaneLayout(spec.shape[0] * spec.shape[1], spec.shape[2], spec.shape[3])
            try:
                return tools.quantised.encode(
                    raw, spec.dtype, layout, quantiser_of(self._profile, spec.shape)
                )
            except NotQuantisableError:
                pass
        pieces = tools.lossless.encode(raw, spec.dtype, spec.shape)
        if sum(memoryview(piece).nbytes for piece in pieces) >= len(raw):
            pieces = [_STORED_HEAD, raw]
        return pieces, None

    def _decode_tensor(
        self, tools: _Tools, spec: TensorSpec, blob: memoryview, out: memoryview, may_be_lossy: bool
    ) -> None:
        reader = Reader(blob)
        head = reader.head()
        if head.mode is Mode.STORED:
            if head.pack() != _STORED_HEAD:
                raise SerdeError("a stored tensor whose head says more than that")
            out[:] = reader.take(len(out))
            reader.finish()
        elif head.mode is Mode.LOSSLESS:
            tools.lossless.decode(reader, head, out)
        elif not may_be_lossy:
            raise SerdeError("a quantised tensor in a record that claims to be without loss")
        elif can_be_quantised(spec.dtype, spec.shape) and head.dtype == KINDS[spec.dtype]:
            layout = PlaneLayout(spec.shape[0] * spec.shape[1], spec.shape[2], spec.shape[3])
            tools.quantised.decode(reader, head, layout, out)
        else:
            raise SerdeError(
                f"a tensor quantised as dtype {head.dtype}, which {spec.dtype} {list(spec.shape)}"
                " is not"
            )
