"""The documented serdes, beyond their contract: their payloads, what they refuse under a right
digest, the wrappers that log, and the codec over them.
"""

from __future__ import annotations

import io
import logging
import pickle
import zipfile
from collections.abc import Callable, Sequence

import pytest
import safetensors.torch
import torch
from lmcache_core.documented.serdes import DocumentedCodec
from lmcache_core.errors import ConfigError, SerdeError
from lmcache_core.record import RecordHeader
from lmcache_core.serde import (
    DOCUMENTED_NAMES,
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

from tests.suites.serde_suite import payload_of, sealed_by_hand

LOGGER = "lmcache_core.documented.serdes"
GIVEN = torch.tensor([[1.0, 2.0, 3.0]])
DATA = bytes(GIVEN.view(torch.uint8).numpy())


def read(
    reader: type[Deserializer],
    payload: bytes,
    dtype: str = "float32",
    shape: Sequence[int] = (1, 3),
) -> torch.Tensor:
    serde = {TorchDeserializer: "torch", SafeDeserializer: "safetensor", FastDeserializer: "fast"}
    return reader(None).from_bytes(
        sealed_by_hand(payload, serde=serde[reader], dtype=dtype, shape=shape)
    )


def fast(payload: bytes = b"1", **fields: object) -> bytes:
    return sealed_by_hand(
        payload, **({"serde": "fast", "dtype": "uint8", "shape": [len(payload)]} | fields)
    )


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (fast()[:19], "19 bytes are too short"),
        (fast()[:-1] + b"2", "digest"),
        (fast(serde="torch"), "encoded by serde 'torch', read as 'fast'"),
        (fast(shape=[1] * 65), "head of an encoded tensor cannot be read"),
        (fast(dtype="float7"), "dtype 'float7' is not known"),
        (fast(b"123", shape=[2]), "3 bytes of tensor for"),
        (fast(b"", shape=[1 << 40, 1 << 40, 0]), "product of its sizes"),
        (fast(shape=[1 << 40]), "bytes of tensor; at most 4294967296"),
        (fast(b"\0\1\2", dtype="bool"), "neither 0 nor 1"),
    ],
)
def test_bytes_that_are_no_encoding_are_refused_with_the_reason(data: bytes, match: str) -> None:
    with pytest.raises(SerdeError, match=match):
        FastDeserializer(None).from_bytes(data)


def test_bytes_in_other_units_are_read_and_with_gaps_refused() -> None:
    data = FastSerializer().to_bytes(torch.arange(13, dtype=torch.uint8))
    assert len(data) % 8 == 0
    whole = memoryview(bytearray(data)).cast("d")
    assert FastDeserializer(None).from_bytes(whole).tolist() == list(range(13))
    with_gaps = memoryview(bytes(b for byte in data for b in (byte, 0)))[::2]
    with pytest.raises(ValueError, match="gaps"):
        FastDeserializer(None).from_bytes(with_gaps)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: torch.empty((1 << 57, 0)), "product of its sizes"),
        (
            lambda: torch.zeros(1, dtype=torch.uint8).expand((4 << 30) + 1),
            "4294967297 bytes of tensor; at most 4294967296",
        ),
        (lambda: torch.zeros(1).expand((1,) * 65), "65 dimensions; at most 64"),
        (lambda: torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.quint8), "quint8"),
        (
            lambda: torch.nested.nested_tensor(
                [torch.zeros(2), torch.zeros(3)], layout=torch.strided
            ),
            "layout",
        ),
    ],
    ids=["extent", "length", "dimensions", "quantized", "nested"],
)
@pytest.mark.filterwarnings(
    "ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested tensors"
)
def test_a_tensor_out_of_bounds_is_refused_before_it_is_copied(
    make: Callable[[], torch.Tensor], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        FastSerializer().to_bytes(make())


def test_the_fast_payload_is_the_bytes_of_the_tensor() -> None:
    assert payload_of(FastSerializer().to_bytes(GIVEN)) == DATA


def test_the_safe_payload_is_a_safetensors_file() -> None:
    file = payload_of(SafeSerializer().to_bytes(GIVEN))
    assert list(safetensors.torch.load(file)) == ["tensor_bytes"]
    assert torch.equal(safetensors.torch.load(file)["tensor_bytes"], GIVEN)


@pytest.mark.parametrize(
    "file",
    [
        safetensors.torch.save({"tensor_bytes": GIVEN}) + b"1",
        safetensors.torch.save({"tensor_bytes": GIVEN.view(3)}),
        safetensors.torch.save({"tensor_bytes": GIVEN, "other": torch.zeros(0)}),
        safetensors.torch.save({"tensor_bytes": GIVEN}, {"more": "text"}),
    ],
)
def test_another_safetensors_file_is_refused(file: bytes) -> None:
    with pytest.raises(SerdeError, match=r"bytes of tensor|not the safetensors file of one tensor"):
        read(SafeDeserializer, file)


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def archived(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(f"archive/{name}", data)
    return file.getvalue()


def edited(archive: bytes, signature: bytes, at: int, value: bytes) -> bytes:
    """An archive with other bytes at a place of its last record of that signature."""
    begin = archive.rindex(signature) + at
    return archive[:begin] + value + archive[begin + len(value) :]


def test_the_torch_payload_is_what_torch_saves() -> None:
    payload = payload_of(TorchSerializer().to_bytes(GIVEN))
    assert payload == saved(GIVEN)
    assert torch.equal(torch.load(io.BytesIO(payload), weights_only=True), GIVEN)


def not_to_be_called(*_: object, **__: object) -> None:
    pytest.fail("something was unpickled")


@pytest.mark.parametrize("pickled", [b"\x80\2cos\nsystem\nX\4\0\0\0true\x85R.", b""])
def test_no_pickle_is_read(pickled: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((torch, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(module, name, not_to_be_called)
    archive = archived({"data.pkl": pickled, "data/0": DATA})
    assert torch.equal(read(TorchDeserializer, archive), GIVEN)


STORED = archived({"data/0": DATA})
DIRECTORY = b"PK\1\2"


@pytest.mark.parametrize(
    ("archive", "match"),
    [
        (saved(GIVEN.double()), "24 bytes of tensor"),
        (archived({"data/1": DATA}), "no archive"),
        (archived({"data/0": bytes(1 << 20)}, zipfile.ZIP_DEFLATED), "not stored"),
        (edited(STORED, DIRECTORY, 8, b"\1\0"), "no archive"),  # said to be encrypted
        (edited(STORED, DIRECTORY, 20, b"\0\0\1\0\0\0\1\0"), "not stored"),  # of 64 KiB
        (edited(STORED, DIRECTORY, 42, b"\0\0\1\0"), "no archive"),  # far after its end
    ],
)
def test_another_archive_is_refused(archive: bytes, match: str) -> None:
    with pytest.raises(SerdeError, match=match):
        read(TorchDeserializer, archive)


def test_a_torch_that_writes_another_archive_is_noticed_when_writing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = archived({"data/1": DATA})
    monkeypatch.setattr(torch, "save", lambda tensor, file: file.write(other))
    with pytest.raises(SerdeError, match=r"torch \S+ writes archives of another form; use the"):
        TorchSerializer().to_bytes(GIVEN)


class Recorded(Serializer, Deserializer):
    """Returns a fixed object, which the wrapper must return itself."""

    def __init__(self, answer: object) -> None:
        super().__init__("float16")
        self.given: object = None
        self.answer = answer

    def to_bytes(self, t: torch.Tensor) -> bytes:
        self.given = t
        return self.answer

    from_bytes = to_bytes


def test_a_wrapper_logs_one_line_a_call_and_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
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


def test_a_codec_decodes_only_its_own_records() -> None:
    header = RecordHeader(b"", "torch", "", False, (), b"")
    found = {serde: DocumentedCodec(serde).decodes(header) for serde in DOCUMENTED_NAMES}
    assert found == {"torch": True, "safetensor": False, "fast": False}


def test_a_codec_of_another_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="'pickle'"):
        DocumentedCodec("pickle")


def test_only_tensors_are_encoded() -> None:
    with pytest.raises(TypeError, match=r"bytes cannot be encoded: give a torch\.Tensor"):
        FastSerializer().to_bytes(b"bytes")


def test_a_lazily_negated_tensor_is_encoded_with_its_values() -> None:
    lazily = torch.tensor([1 + 2j]).conj().imag
    assert lazily.is_neg()
    assert FastSerializer().to_bytes(lazily) == FastSerializer().to_bytes(torch.tensor([-2.0]))


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO])
def test_failures_pass_through_a_wrapper_and_values_are_not_logged(
    caplog: pytest.LogCaptureFixture, level: int
) -> None:
    caplog.set_level(level, LOGGER)
    with pytest.raises(SerdeError):
        DeserializerDebugWrapper(FastDeserializer(None)).from_bytes(b"damaged")
    with pytest.raises(ValueError, match="complex64"):
        SerializerDebugWrapper(FastSerializer()).to_bytes(torch.zeros(1, dtype=torch.complex64))
    assert caplog.messages == []
