"""What every GPU connector must do. A test module subclasses `ConnectorSuite` or
`PagedConnectorSuite` and gives it `under_test`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from lmcache_core.gpu_connectors.base import GPUConnectorInterface
from lmcache_core.gpu_connectors.engine_memory import LogicalMemory
from lmcache_core.gpu_connectors.layout import KVLayout
from lmcache_core.memory.base import MemoryFormat, MemoryObj, MemoryObjMetadata
from lmcache_core.memory.buffer import BytesBufferMemoryObj
from lmcache_core.memory.dtypes import num_bytes

from tests.suites.kv_caches import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    make_kv_caches,
    overlapping,
    same,
    snapshot,
)

POISON = 0xA5
PREFIX = 4
"""Tokens at the begin of the sequence whose KV the engine has anyway: their slots are -1."""
SLOTS = (-1, -1, -1, -1, 20, 21, 22, 23, 8, 9, 10, 11, 27, 3, 14)
OTHER_SLOTS = (-1, -1, -1, -1, 6, 24, 25, 26, 27, 0, 1, 2, 3, 13, 9)
NUM_TOKENS = len(SLOTS)


class ConnectorUnderTest(ABC):
    """A connector, engines for it, and the way around it. Raw access must not go through the
    connector's own code.

    Attributes:
        connector: The connector.
        layout: What its memory objects hold.
    """

    connector: GPUConnectorInterface
    layout: KVLayout

    @abstractmethod
    def make_engine(self, seed: int) -> Any:
        """Engine memory (`kvcaches`) full of random bytes, the same for the same seed."""

    @abstractmethod
    def read(self, engine: Any, group: int, layer: int, token: int) -> torch.Tensor:
        """KV of a token of the sequence, `[sides, num_kv_heads, head_size]`."""

    @abstractmethod
    def write(self, engine: Any, group: int, layer: int, token: int, cells: torch.Tensor) -> None:
        """Put KV in the place of a token of the sequence."""

    @abstractmethod
    def wrong_engines(self) -> dict[str, Any]:
        """Engine memory that the connector must refuse, by what is wrong with it."""

    def kwargs(self, engine: Any) -> dict[str, Any]:
        """What the connector is called with."""
        return {"kvcaches": engine}


class PagedUnderTest(ConnectorUnderTest):
    """A connector for paged memory; raw access indexes the engine's own tensors token by token.

    Args:
        connector: The connector.
        layout: What the engine's tensors are.
        **forms: As for `make_kv_caches`.
    """

    def __init__(self, connector: GPUConnectorInterface, layout: KVLayout, **forms: Any) -> None:
        self.connector = connector
        self.layout = layout
        self._forms = forms

    def make_engine(self, seed: int) -> Any:
        return make_kv_caches(self.layout, seed, **self._forms)

    def read(self, engine: Any, group: int, layer: int, token: int) -> torch.Tensor:
        return LogicalMemory(self.layout, engine).read(group, layer, SLOTS[token])

    def write(self, engine: Any, group: int, layer: int, token: int, cells: torch.Tensor) -> None:
        LogicalMemory(self.layout, engine).write(group, layer, SLOTS[token], cells)

    def kwargs(self, engine: Any) -> dict[str, Any]:
        return {"kvcaches": engine, "slot_mapping": torch.tensor(SLOTS)}

    def wrong_engines(self) -> dict[str, Any]:
        engine = self.make_engine(0)

        def changed(change: Any) -> list[Any]:
            last = engine[-1]
            return [
                *engine[:-1],
                (
                    change(last)
                    if isinstance(last, torch.Tensor)
                    else tuple(change(side) for side in last)
                ),
            ]

        return {
            "a layer too few": engine[:-1],
            "a layer too many": [*engine, engine[-1]],
            "another head size": changed(lambda t: torch.cat([t, t], dim=-1)),
            "a dimension too many": changed(lambda t: t[None]),
            "a dimension too few": changed(lambda t: t[0, 0]),
            "another dtype": changed(
                lambda t: t.view(torch.uint8)[..., : t.shape[-1]].view(torch.int8)
            ),
            "elements apart": changed(lambda t: torch.cat([t, t], dim=-1)[..., ::2]),
            "heads or tokens that overlap": changed(overlapping),
            "something that is no tensor": [*engine[:-1], None],
        }


def make_memory(
    shape: Sequence[int],
    dtype: str,
    fmt: MemoryFormat = MemoryFormat.KV_BLOB,
    is_readonly: bool = False,
) -> MemoryObj:
    """A memory object full of poison."""
    content = bytearray([POISON]) * num_bytes(shape, dtype)
    return BytesBufferMemoryObj(
        bytes(content) if is_readonly else content,
        MemoryObjMetadata(tuple(shape), dtype, 0, 0, 1, fmt),
    )


class ConnectorSuite:
    """The contract of `GPUConnectorInterface`; `under_test` is the fixture to provide."""

    @pytest.fixture
    def engine(self, under_test: ConnectorUnderTest) -> Any:
        """Engine memory to copy from."""
        return under_test.make_engine(1)

    @pytest.mark.parametrize(
        ("start", "end"), [(PREFIX, NUM_TOKENS), (5, 13), (8, 12), (14, 15), (6, 6)]
    )
    def test_kv_goes_out_and_in_bit_for_bit_and_nothing_else_changes(
        self, under_test: ConnectorUnderTest, engine: Any, start: int, end: int
    ) -> None:
        before, memory = snapshot(engine), self.memory_for(under_test, end - start)
        under_test.connector.from_gpu(memory, start, end, **under_test.kwargs(engine))
        assert same(snapshot(engine), before)
        assert bytes(memory.byte_array) == self.expected_bytes(under_test, engine, start, end)
        target, expected = under_test.make_engine(50), under_test.make_engine(50)
        under_test.connector.to_gpu(memory, start, end, **under_test.kwargs(target))
        for group, layer, token in self.cells(under_test, start, end):
            under_test.write(
                expected, group, layer, token, under_test.read(engine, group, layer, token)
            )
        assert same(snapshot(target), snapshot(expected))

    def test_the_same_connector_serves_other_tensors(self, under_test: ConnectorUnderTest) -> None:
        for seed in (1, 2, 1):
            engine, memory = under_test.make_engine(seed), self.memory_for(under_test, 3)
            under_test.connector.from_gpu(memory, PREFIX, PREFIX + 3, **under_test.kwargs(engine))
            assert bytes(memory.byte_array) == self.expected_bytes(
                under_test, engine, PREFIX, PREFIX + 3
            )

    def test_read_only_memory_is_read_but_not_written(
        self, under_test: ConnectorUnderTest, engine: Any
    ) -> None:
        memory = self.memory_for(under_test, 3, is_readonly=True)
        with pytest.raises(ValueError, match="read-only"):
            under_test.connector.from_gpu(memory, 5, 8, **under_test.kwargs(engine))
        under_test.connector.to_gpu(memory, 5, 8, **under_test.kwargs(engine))
        assert bytes(memory.byte_array) == bytes([POISON]) * memory.get_size()
        assert (under_test.read(engine, 0, 0, 6).view(torch.uint8) == POISON).all()

    @pytest.mark.parametrize("method", ["from_gpu", "to_gpu"])
    def test_engine_memory_that_is_not_as_declared_is_refused(
        self, under_test: ConnectorUnderTest, method: str
    ) -> None:
        for wrong in (*under_test.wrong_engines().values(), None):
            self.check_refused(under_test, method, {**under_test.kwargs(wrong)})

    @pytest.mark.parametrize("method", ["from_gpu", "to_gpu"])
    @pytest.mark.parametrize(
        ("start", "end", "num_tokens"),
        [(5, 8, 4), (5, 8, 2), (-3, 2, 5), (6, 5, 0), (NUM_TOKENS - 1, NUM_TOKENS + 2, 3)],
    )
    def test_a_range_that_is_not_there_is_refused(
        self,
        under_test: ConnectorUnderTest,
        engine: Any,
        method: str,
        start: int,
        end: int,
        num_tokens: int,
    ) -> None:
        self.check_refused(
            under_test,
            method,
            under_test.kwargs(engine),
            self.memory_for(under_test, num_tokens),
            (start, end),
        )

    @pytest.mark.parametrize("method", ["from_gpu", "to_gpu"])
    def test_memory_of_another_dtype_or_shape_is_refused(
        self, under_test: ConnectorUnderTest, engine: Any, method: str
    ) -> None:
        shape = tuple(under_test.connector.get_shape(3))
        for memory in (
            make_memory((*shape[:-1], shape[-1] + 1), under_test.layout.kv_dtype),
            make_memory(shape, "int32"),
        ):
            self.check_refused(under_test, method, under_test.kwargs(engine), memory)
        self.check_refused(
            under_test,
            "to_gpu",
            under_test.kwargs(engine),
            make_memory(shape, under_test.layout.kv_dtype, MemoryFormat.BINARY),
        )

    @pytest.mark.parametrize("method", ["from_gpu", "to_gpu"])
    def test_memory_without_a_tensor_is_a_programming_error(
        self, under_test: ConnectorUnderTest, engine: Any, method: str
    ) -> None:
        class Empty(BytesBufferMemoryObj):
            tensor = None  # type: ignore[assignment]

        empty = Empty(b"", MemoryObjMetadata((0,), None, 0, 0, 1, MemoryFormat.KV_BLOB))
        with pytest.raises(AssertionError):
            getattr(under_test.connector, method)(empty, 5, 8, **under_test.kwargs(engine))

    def memory_for(
        self, under_test: ConnectorUnderTest, num_tokens: int, is_readonly: bool = False
    ) -> MemoryObj:
        return make_memory(
            under_test.connector.get_shape(num_tokens),
            under_test.layout.kv_dtype,
            is_readonly=is_readonly,
        )

    def cells(
        self, under_test: ConnectorUnderTest, start: int, end: int
    ) -> list[tuple[int, int, int]]:
        groups = enumerate(under_test.layout.groups)
        return [
            (i, layer, token)
            for i, group in groups
            for layer in range(group.num_layers)
            for token in range(start, end)
        ]

    def expected_bytes(
        self, under_test: ConnectorUnderTest, engine: Any, start: int, end: int
    ) -> bytes:
        """What a memory object must hold, built token by token: `[sides, layers, tokens,
        hidden]` of each group, zeros between groups.
        """
        content = bytearray()
        for i, group in enumerate(under_test.layout.groups):
            content += bytes(-len(content) % 512 if i else 0)
            content += b"".join(
                under_test.read(engine, i, layer, token)[side]
                .contiguous()
                .view(torch.uint8)
                .numpy()
                .tobytes()
                for side in range(group.sides)
                for layer in range(group.num_layers)
                for token in range(start, end)
            )
        return bytes(content)

    def check_refused(
        self,
        under_test: ConnectorUnderTest,
        method: str,
        kwargs: dict[str, Any],
        memory: MemoryObj | None = None,
        tokens: tuple[int, int] = (5, 8),
    ) -> None:
        """A ValueError, and neither engine memory nor the memory object is touched."""
        memory = memory or self.memory_for(under_test, 3)
        before, fmt = snapshot(kwargs["kvcaches"]), memory.get_memory_format()
        with pytest.raises(ValueError):
            getattr(under_test.connector, method)(memory, *tokens, **kwargs)
        assert same(snapshot(kwargs["kvcaches"]), before)
        assert bytes(memory.byte_array) == bytes([POISON]) * memory.get_size()
        assert memory.get_memory_format() is fmt


class PagedConnectorSuite(ConnectorSuite):
    """The contract of connectors for paged memory."""

    def test_kv_may_go_into_other_slots(self, under_test: PagedUnderTest, engine: Any) -> None:
        memory = self.memory_for(under_test, NUM_TOKENS - PREFIX)
        target, expected = under_test.make_engine(50), under_test.make_engine(50)
        under_test.connector.from_gpu(memory, PREFIX, NUM_TOKENS, **under_test.kwargs(engine))
        under_test.connector.to_gpu(
            memory, PREFIX, NUM_TOKENS, kvcaches=target, slot_mapping=torch.tensor(OTHER_SLOTS)
        )
        wanted = LogicalMemory(under_test.layout, expected)
        for group, layer, token in self.cells(under_test, PREFIX, NUM_TOKENS):
            wanted.write(
                group, layer, OTHER_SLOTS[token], under_test.read(engine, group, layer, token)
            )
        assert same(snapshot(target), snapshot(expected))

    @pytest.mark.parametrize("method", ["from_gpu", "to_gpu"])
    @pytest.mark.parametrize(
        "slots",
        [
            pytest.param(None, id="missing"),
            pytest.param(list(SLOTS), id="a list"),
            pytest.param(torch.tensor(SLOTS).int(), id="int32"),
            pytest.param(torch.tensor(SLOTS)[:, None], id="two dimensions"),
            pytest.param(torch.tensor(SLOTS)[:7], id="too short"),
            pytest.param(torch.tensor(SLOTS).roll(2), id="the engine's own prefix"),
            pytest.param(
                torch.tensor((*SLOTS[:6], NUM_BLOCKS * BLOCK_SIZE, *SLOTS[7:])),
                id="after the last",
            ),
            pytest.param(torch.tensor((*SLOTS[:6], 1 << 62, *SLOTS[7:])), id="far after the last"),
            pytest.param(torch.tensor((*SLOTS[:6], SLOTS[5], *SLOTS[7:])), id="another token's"),
        ],
    )
    def test_slots_that_are_none_are_refused(
        self, under_test: PagedUnderTest, engine: Any, method: str, slots: torch.Tensor | None
    ) -> None:
        self.check_refused(under_test, method, {"kvcaches": engine, "slot_mapping": slots})
