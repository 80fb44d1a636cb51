"""The CPU codec and its tables, for kernels that must read the same values."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import triton
from lmcache_core.serde.blob import Mode, Reader
from lmcache_core.serde.machine_code import load_loops
from lmcache_core.serde.plane_layout import PlaneLayout
from lmcache_core.serde.quantised import QuantisedCoder
from lmcache_core.serde.quantised_blob import Quantiser
from lmcache_core.serde.tables import TableSet, bell_curves
from lmcache_kernels.checks import WORD_DTYPES
from lmcache_kernels.codec_shape import CodecShape, EncodedPlanes
from lmcache_kernels.codec_tables import CodecTables

DEVICE = torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")
FINENESS = 144
NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.cpu().contiguous().view(torch.uint8).numpy().reshape(-1))


@dataclass(frozen=True)
class Codec:
    """What both sides work with.

    Attributes:
        set: The CPU codec's tables.
        coder: The CPU codec.
        tables: The kernels' tables.
    """

    set: TableSet
    coder: QuantisedCoder
    tables: CodecTables

    @property
    def alphabets(self):
        return {levels: self.set.of(levels) for levels in self.set.levels}

    def encode(self, x: torch.Tensor, levels, by_token: bool):
        """The CPU's blob of `x` (bytes), and its arrays as the kernel has them."""
        quantiser = (
            Quantiser(Mode.BY_TOKEN, tuple(levels))
            if by_token
            else Quantiser(Mode.BY_PLANE, tuple(levels), FINENESS)
        )
        pieces, _ = self.coder.encode(
            raw_bytes(x), NAMES[x.dtype], PlaneLayout(*x.shape), quantiser
        )
        return (
            b"".join(bytes(memoryview(piece).cast("B")) for piece in pieces),
            self.parts(x, by_token, pieces),
        )

    def parts(self, x, by_token, pieces):
        _, _, scales, shifts, shapes, lengths, *streams = pieces
        if scales.dtype == np.uint16:
            scales = scales.astype(np.uint32) << 16
        bits = (
            scales.astype(np.float32).view(np.int32)
            if scales.dtype == np.float16
            else scales.view(np.int32)
        )
        as_tensors = (
            torch.from_numpy(np.ascontiguousarray(part))
            for part in (shifts, shapes, lengths.view(np.int32).reshape(-1))
        )
        words = torch.from_numpy(np.concatenate([stream.view(np.int16) for stream in streams]))
        return torch.from_numpy(bits.reshape(x.shape[0], -1)), EncodedPlanes(*as_tensors, words)

    def decode(self, blob: bytes, x: torch.Tensor) -> torch.Tensor:
        """What the CPU makes of a blob; `x` says shape and dtype."""
        out = torch.full_like(x, -7.0, device="cpu")
        reader = Reader(memoryview(blob))
        self.coder.decode(reader, reader.head(), PlaneLayout(*x.shape), raw_bytes_writable(out))
        return out

    def shape_of(self, x: torch.Tensor) -> CodecShape:
        layout = PlaneLayout(*x.shape)
        return CodecShape(*x.shape, layout.group, layout.section)


def raw_bytes_writable(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy().reshape(-1))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype in WORD_DTYPES:
        one, other = one.view(WORD_DTYPES[one.dtype]), other.view(WORD_DTYPES[one.dtype])
    return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())


@pytest.fixture(scope="session")
def codec():
    tables = bell_curves()
    with ThreadPoolExecutor(1) as pool:
        on_device = CodecTables.of([tables.of(levels) for levels in tables.levels], DEVICE)
        yield Codec(tables, QuantisedCoder(load_loops(), tables, pool), on_device)


@pytest.fixture(autouse=True)
def poison():
    """Whatever torch allocates without a value holds NaN, or the largest number."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def device():
    return DEVICE


@pytest.fixture(scope="session")
def same():
    return same_bits


@pytest.fixture(scope="session")
def make_kv():
    """KV with channels of all sorts: drifting (deltas pay), noisy, far from zero, constant,
    zero.
    """

    def make(dtype, planes, tokens, channels, seed=0):
        random = torch.Generator().manual_seed(seed)
        x = torch.randn(planes, tokens, channels, generator=random)
        kinds = torch.arange(channels) % 5
        x = torch.where(kinds == 0, x.cumsum(1) * 0.3, x)
        x = torch.where(kinds == 1, x + 6 * torch.randn(planes, 1, channels, generator=random), x)
        x = torch.where(kinds == 2, x[:, :1], x)
        x = torch.where(kinds == 3, 0.01 * x, x)
        return (x * torch.logspace(-2, 1, planes)[:, None, None]).to(dtype).to(DEVICE)

    return make
