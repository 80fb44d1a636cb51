"""The Safe serde: safetensors reads its file, and what is no such file is refused under a right
digest.
"""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch
from lmcache_core.errors import SerdeError
from lmcache_core.serde import SafeDeserializer, SafeSerializer

from tests.suites.serde_suite import sealed_by_hand

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
def test_lengths_that_do_not_fit_are_refused(payload: bytes, match: str) -> None:
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
def test_another_header_is_refused(header: object) -> None:
    with pytest.raises(SerdeError, match=r"header is not that of one tensor of float32 \(1, 3\)"):
        read(file_of(header))


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
