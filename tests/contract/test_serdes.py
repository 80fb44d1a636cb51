"""Every serde keeps the contract."""

from __future__ import annotations

import pytest
import torch
from lmcache_core.errors import SerdeError
from lmcache_core.serde import (
    Deserializer,
    DeserializerDebugWrapper,
    FastDeserializer,
    FastSerializer,
    SafeDeserializer,
    SafeSerializer,
    Serializer,
    SerializerDebugWrapper,
    TorchDeserializer,
    TorchSerializer,
)

from tests.suites.serde_suite import SerdeSuite

PAIRS = (
    (TorchSerializer, TorchDeserializer),
    (SafeSerializer, SafeDeserializer),
    (FastSerializer, FastDeserializer),
)


class TestTorch(SerdeSuite):
    def make_serializer(self) -> Serializer:
        return TorchSerializer()

    def make_deserializer(self, dtype: torch.dtype | None) -> Deserializer:
        return TorchDeserializer(dtype)


class TestSafe(SerdeSuite):
    def make_serializer(self) -> Serializer:
        return SafeSerializer()

    def make_deserializer(self, dtype: torch.dtype | None) -> Deserializer:
        return SafeDeserializer(dtype)


class TestFast(SerdeSuite):
    def make_serializer(self) -> Serializer:
        return FastSerializer()

    def make_deserializer(self, dtype: torch.dtype | None) -> Deserializer:
        return FastDeserializer(dtype)


class TestDebugWrappers(SerdeSuite):
    def make_serializer(self) -> Serializer:
        return SerializerDebugWrapper(FastSerializer())

    def make_deserializer(self, dtype: torch.dtype | None) -> Deserializer:
        return DeserializerDebugWrapper(FastDeserializer(dtype))


@pytest.mark.parametrize("writer", [writer for writer, _ in PAIRS])
@pytest.mark.parametrize("reader", [reader for _, reader in PAIRS])
def test_a_serde_reads_only_what_it_wrote(
    writer: type[Serializer], reader: type[Deserializer]
) -> None:
    given = torch.arange(6, dtype=torch.float32).view(2, 3)
    data = writer().to_bytes(given)
    if (writer, reader) in PAIRS:
        assert torch.equal(reader(None).from_bytes(data), given)
    else:
        with pytest.raises(
            SerdeError, match=f"encoded by serde .*, read as '{reader.__name__[:4].lower()}"
        ):
            reader(None).from_bytes(data)


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_the_plain_path_converts_nothing(
    writer: type[Serializer], reader: type[TorchDeserializer]
) -> None:
    data = writer().to_bytes(torch.tensor([1.5, -2.5]))
    deserializer = reader(torch.float16)
    assert deserializer.from_bytes_normal(data).dtype is torch.float32
    assert deserializer.from_bytes(data).dtype is torch.float16
    with pytest.raises(SerdeError):
        deserializer.from_bytes_normal(data[:-1])
