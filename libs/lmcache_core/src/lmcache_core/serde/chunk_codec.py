"""The codecs of chunks that this package is for: CacheGen in its profiles, and lossless."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcache_core.errors import SerdeError
from lmcache_core.memory.dtypes import num_bytes
from lmcache_core.record import RecordHeader, TensorSpec
from lmcache_core.serde.blob import Head, Mode, Reader
from lmcache_core.serde.codec import EncodedPayload, EncodingReport, GroupError
from lmcache_core.serde.entropy.tables import TableSet, bell_curves
from lmcache_core.serde.loops import Loops, load_loops
from lmcache_core.serde.lossless.coder import LosslessCoder
from lmcache_core.serde.profiles import Profile, error_groups, quantiser_of
from lmcache_core.serde.quantised.coder import NotQuantisableError, QuantisedCoder, group_errors
from lmcache_core.serde.quantised.layout import KINDS, PlaneLayout, can_be_quantised

CACHEGEN_SERDE = "cachegen"
LOSSLESS_SERDE = "lossless"
MAX_THREADS = 8
TABLES_MARK = "@"
_STORED_HEAD = Head(Mode.STORED, 0, 0, (0, 0, 0, 0)).pack()

Pieces = list[Any]


class _Tools:
    """What an open codec works with."""

    def __init__(self, loops: Loops, tables: TableSet, threads: int) -> None:
        self.tables = tables
        self.pool = ThreadPoolExecutor(threads, "lmcache-codec")
        self.quantised = QuantisedCoder(loops, tables, self.pool)
        self.lossless = LosslessCoder(loops, self.pool)


class CacheGenCodec:
    """See `lmcache_core.serde.ChunkCodec`. Decodes every profile, and what was encoded without
    loss.

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
    def serde(self) -> str:
        """See `ChunkCodec.serde`."""
        return LOSSLESS_SERDE if self._profile is None else CACHEGEN_SERDE

    @property
    def lossy(self) -> bool:
        """See `ChunkCodec.lossy`."""
        return self._profile is not None

    def open(self) -> None:
        """See `ChunkCodec.open`."""
        if self._tools is None:
            self._tools = _Tools(load_loops(), bell_curves(), self._threads)

    def close(self) -> None:
        """See `ChunkCodec.close`."""
        tools, self._tools = self._tools, None
        if tools is not None:
            tools.pool.shutdown()

    def encode(self, tensors: Sequence[TensorSpec], payload: memoryview) -> EncodedPayload | None:
        """See `ChunkCodec.encode`."""
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

    def decodes(self, header: RecordHeader) -> bool:
        """See `ChunkCodec.decodes`."""
        if header.serde == CACHEGEN_SERDE:
            return header.profile.rpartition(TABLES_MARK)[2] == self._opened.tables.id
        return header.serde == LOSSLESS_SERDE

    def decode(self, header: RecordHeader, payload: memoryview, out: memoryview) -> None:
        """See `ChunkCodec.decode`."""
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
