"""The Safe serde: its file is read by safetensors alone, and what is no such file is refused
under a right digest.
"""

from __future__ import annotations

import json

import pytest
import safetensors
import safetensors.torch
import torch
from lmcache_core.errors import SerdeError
from lmcache_core.serde import SafeDeserializer, SafeSerializer
from lmcache_core.testing.serde_suite import sealed_by_hand

SAFETENSOR, FLOAT32, BOOL = 2, 2, 12
GIVEN = torch.tensor([[1.0, 2.0, 3.0]])
DATA = bytes(GIVEN.view(torch.uint8).numpy())
ENTRY = {"dtype": "F32", "shape": [1, 3], "data_offsets": [0, 12]}
HEADER = b'{"tensor_bytes":{"dtype":"F32","shape":[1,3],"data_offsets":[0,12]}}'


def file_of(header: object, data: bytes = DATA, header_bytes: int | None = None) -> bytes:
    text = (
        header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    )
    return (len(text) if header_bytes is None else header_bytes).to_bytes(8, "little") + text + data


def read(payload: bytes, dtype: int = FLOAT32, shape: tuple[int, ...] = (1, 3)) -> torch.Tensor:
    return SafeDeserializer(None).from_bytes(
        sealed_by_hand(payload, serde=SAFETENSOR, dtype=dtype, shape=shape)
    )


def not_to_be_called(*_: object) -> None:
    pytest.fail("this was shown to the library")


def test_the_payload_is_a_safetensors_file() -> None:
    payload = SafeSerializer().to_bytes(GIVEN)[16 + 2 * 8 + 16 :]
    assert list(safetensors.torch.load(payload)) == ["tensor_bytes"]
    assert torch.equal(safetensors.torch.load(payload)["tensor_bytes"], GIVEN)


@pytest.mark.parametrize("padding", [b"", b" ", b" " * 100])
def test_a_file_made_by_hand_is_read(padding: bytes) -> None:
    assert torch.equal(read(file_of(HEADER + padding)), GIVEN)


@pytest.mark.parametrize(
    ("payload", "match"),
    [
        (DATA, "a header of"),
        (file_of(HEADER, header_bytes=0), "a header of 0"),
        (file_of(HEADER, header_bytes=(1 << 64) - 1), "a header of 18446744073709551615"),
        (file_of(HEADER + b" " * 9000), "a header of 90"),
        (file_of(HEADER, DATA + b"1"), "does not hold 12 bytes"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(
    payload: bytes, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors.torch, "load", not_to_be_called)
    with pytest.raises(SerdeError, match=match):
        read(payload)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{}",
        b"[" * 2000,
        b"\xff\xfe",
        b" " + HEADER,
        HEADER + b"\n",
        HEADER + HEADER,
        {"tensor": ENTRY},
        {"tensor_bytes": ENTRY, "other": ENTRY | {"data_offsets": [0, 0]}},
        {"tensor_bytes": ENTRY, "__metadata__": {"a": "b" * 1000}},
        HEADER[:-1] + b"," + HEADER[1:],
        {"tensor_bytes": ENTRY | {"shape": [3]}},
        {"tensor_bytes": ENTRY | {"shape": [3, 1]}},
        {"tensor_bytes": ENTRY | {"shape": [1 << 80]}},
        {"tensor_bytes": ENTRY | {"data_offsets": [0, 11]}},
        {"tensor_bytes": ENTRY | {"data_offsets": [-12, 12]}},
        {"tensor_bytes": ENTRY | {"dtype": "I32"}},
        {"tensor_bytes": ENTRY | {"dtype": "F64"}},
        {"tensor_bytes": ENTRY | {"dtype": "F99"}},
    ],
    ids=repr,
)
def test_another_header_is_never_shown_to_the_library(
    header: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors.torch, "load", not_to_be_called)
    with pytest.raises(SerdeError, match=r"header is not that of one tensor of float32 \(1, 3\)"):
        read(file_of(header))


@pytest.mark.parametrize(
    ("found", "match"),
    [
        ({}, "holds a NoneType, not a plain tensor"),
        (
            {"tensor_bytes": GIVEN.double()},
            r"holds torch.float64 \(1, 3\), its head says float32 \(1, 3\)",
        ),
        (
            {"tensor_bytes": GIVEN.view(3)},
            r"holds torch.float32 \(3,\), its head says float32 \(1, 3\)",
        ),
        (
            {"tensor_bytes": torch.nn.Parameter(GIVEN, requires_grad=False)},
            "holds a Parameter, not a plain tensor",
        ),
        ({"tensor_bytes": GIVEN.clone().requires_grad_()}, "not a plain tensor"),
        ({"tensor_bytes": torch.zeros(1, 3, device="meta")}, "not a plain tensor"),
        ({"tensor_bytes": torch.zeros(1).expand(1, 3)}, "view of other memory"),
        ({"tensor_bytes": torch.zeros(2, 3)[:1]}, "view of other memory"),
    ],
)
def test_what_the_library_makes_of_it_is_checked(
    found: object, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors.torch, "load", lambda data: found)
    with pytest.raises(SerdeError, match=match):
        read(file_of(HEADER))


@pytest.mark.parametrize(
    "error", [safetensors.SafetensorError("bad"), KeyError("bad"), RuntimeError("bad")], ids=repr
)
def test_what_the_library_raises_is_named(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(data: bytes) -> None:
        raise error

    monkeypatch.setattr(safetensors.torch, "load", fail)
    with pytest.raises(
        SerdeError, match=f"safetensors refuses the payload: {type(error).__name__}: .*bad"
    ) as caught:
        read(file_of(HEADER))
    assert caught.value.__cause__ is error


def test_too_little_memory_says_nothing_of_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(data: bytes) -> None:
        raise MemoryError

    monkeypatch.setattr(safetensors.torch, "load", fail)
    with pytest.raises(MemoryError):
        read(file_of(HEADER))


def test_a_library_that_writes_otherwise_is_found_out_when_writing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        safetensors.torch, "save", lambda tensors: file_of({"tensor_bytes": ENTRY | {"order": "C"}})
    )
    with pytest.raises(
        SerdeError, match=r"safetensors \S+ writes files of another form; use the Fast serde"
    ):
        SafeSerializer().to_bytes(GIVEN)


def test_a_bool_is_0_or_1() -> None:
    entry = {"dtype": "BOOL", "shape": [3], "data_offsets": [0, 3]}
    assert read(file_of({"tensor_bytes": entry}, b"\0\1\1"), BOOL, (3,)).tolist() == [
        False,
        True,
        True,
    ]
    with pytest.raises(SerdeError, match="neither 0 nor 1"):
        read(file_of({"tensor_bytes": entry}, b"\0\1\2"), BOOL, (3,))
