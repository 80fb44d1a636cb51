"""The debug wrappers: one line a call, and nothing else is changed."""

from __future__ import annotations

import logging

import pytest
import torch
from lmcache_core.errors import SerdeError
from lmcache_core.serde import (
    Deserializer,
    DeserializerDebugWrapper,
    FastDeserializer,
    FastSerializer,
    Serializer,
    SerializerDebugWrapper,
)

LOGGER = "lmcache_core.documented.debug_serde"


class Recorded(Serializer, Deserializer):
    """Answers with a fixed object, so that the wrapper is seen to hand on that very one."""

    def __init__(self, answer: object) -> None:
        super().__init__("float16")
        self.given: object = None
        self.answer = answer

    def to_bytes(self, t: torch.Tensor) -> bytes:
        self.given = t
        return self.answer

    from_bytes = to_bytes


def test_argument_and_result_pass_through(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, LOGGER)
    recorded, replayed = Recorded(b"four"), Recorded(torch.zeros(3, 1))
    tensor, data = torch.zeros(2, 5, dtype=torch.bfloat16), memoryview(bytes(16)).cast("d")
    assert SerializerDebugWrapper(recorded).to_bytes(tensor) is recorded.answer
    wrapper = DeserializerDebugWrapper(replayed)
    assert wrapper.from_bytes(data) is replayed.answer
    assert recorded.given is tensor
    assert replayed.given is data
    assert wrapper.dtype is torch.float16
    encoded, decoded = caplog.messages
    assert encoded.startswith("encoded: serde=Recorded dtype=torch.bfloat16 shape=(2, 5) bytes=4 ")
    assert decoded.startswith("decoded: serde=Recorded dtype=torch.float32 shape=(3, 1) bytes=16 ")
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO])
def test_failures_pass_through_and_values_are_not_logged(
    caplog: pytest.LogCaptureFixture, level: int
) -> None:
    caplog.set_level(level, LOGGER)
    with pytest.raises(SerdeError):
        DeserializerDebugWrapper(FastDeserializer(None)).from_bytes(b"damaged")
    with pytest.raises(ValueError, match="complex64"):
        SerializerDebugWrapper(FastSerializer()).to_bytes(torch.zeros(1, dtype=torch.complex64))
    assert caplog.messages == []
