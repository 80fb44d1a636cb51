"""The Torch serde: archives that `torch.load` would read, but that `torch.save` does not write
for a plain tensor, are refused.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile

import pytest
import torch
from lmcache_core.errors import SerdeError
from lmcache_core.memory.dtypes import DTYPE_ITEMSIZE
from lmcache_core.serde import TorchDeserializer, TorchSerializer
from lmcache_core.serde.torch_serde import pickle_of_tensor

from tests.suites.serde_suite import sealed_by_hand

TORCH, FLOAT32, BOOL = 1, 2, 12
GIVEN = torch.tensor([[1.0, 2.0, 3.0]])
HEAD_BYTES = 16 + 2 * 8 + 16
PREFIX = "archive/"


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def members_of(archive: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        return {name.removeprefix(PREFIX): file.read(name) for name in file.namelist()}


def archived(members: dict[str, bytes]) -> bytes:
    """An archive of these members as torch lays it out: stored, with both kinds of end records."""
    local, directory = b"", b""
    for name, data in members.items():
        full = (PREFIX + name).encode() if not name.startswith("/") else name.encode()
        entry = struct.pack(
            "<4s5H3I2H", b"PK\3\4", 0, 0, 0, 0, 0, 0, len(data), len(data), len(full), 0
        )[4:]
        directory += (
            b"PK\1\2"
            + struct.pack("<H", 0)
            + entry
            + struct.pack("<3H2I", 0, 0, 0, 0, len(local))
            + full
        )
        local += b"PK\3\4" + entry + full + data
    count, size, at = len(members), len(directory), len(local)
    end64 = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 0, 0, 0, 0, count, count, size, at)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, at + size, 1)
    return (
        local
        + directory
        + end64
        + locator
        + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, size, at, 0)
    )


def read(archive: bytes, dtype: int = FLOAT32, shape: tuple[int, ...] = (1, 3)) -> torch.Tensor:
    return TorchDeserializer(None).from_bytes(
        sealed_by_hand(archive, serde=TORCH, dtype=dtype, shape=shape)
    )


def not_to_be_called(*_: object, **__: object) -> None:
    pytest.fail("this was shown to the library")


MEMBERS = members_of(saved(GIVEN))
PICKLE = MEMBERS["data.pkl"]


def with_members(**changed: bytes) -> bytes:
    return archived(
        MEMBERS
        | {name.replace("__", "/").replace("_pkl", ".pkl"): data for name, data in changed.items()}
    )


def test_the_payload_is_what_torch_saves() -> None:
    payload = TorchSerializer().to_bytes(GIVEN)[HEAD_BYTES:]
    assert payload == saved(GIVEN)
    assert torch.equal(torch.load(io.BytesIO(payload), weights_only=True), GIVEN)


@pytest.mark.parametrize("name", DTYPE_ITEMSIZE)
@pytest.mark.parametrize(
    "shape",
    [
        (),
        (0,),
        (1,),
        (255,),
        (256,),
        (2, 0, 3),
        (2, 3),
        (65535, 0),
        (65536, 0),
        (0, 1 << 31),
        (1 << 40, 0),
        (1, 2, 3, 4),
        (1,) * 64,
    ],
)
def test_the_pickle_is_known_in_advance(name: str, shape: tuple[int, ...]) -> None:
    given = torch.zeros(shape, dtype=getattr(torch, name))
    assert pickle_of_tensor(name, shape) == members_of(saved(given))["data.pkl"]


def test_an_archive_made_by_hand_is_read() -> None:
    assert torch.equal(read(archived(MEMBERS)), GIVEN)
    assert torch.equal(
        read(
            archived(
                {name: MEMBERS[name] for name in ("byteorder", "data/0", "version", "data.pkl")}
            )
        ),
        GIVEN,
    )
    assert torch.equal(read(archived(MEMBERS | {".later_field": b"of a later release"})), GIVEN)


@pytest.mark.parametrize(
    "value",
    [
        [GIVEN],
        {"a": 1},
        torch.nn.Parameter(GIVEN),
        GIVEN.clone().requires_grad_(),
        torch.zeros(3, 1).t().expand(1, 3),
        torch.zeros(100)[40:43].view(1, 3),
        torch.zeros(1, 3, device="meta"),
        GIVEN.to_sparse(),
        GIVEN.double(),
        GIVEN.view(3),
        GIVEN.view(torch.int32),
        bytearray(b"12345678" * 1000),
        {1, 2, 3},
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_torch_saves_of_something_else_is_refused(value: object) -> None:
    with pytest.raises(
        SerdeError,
        match=r"does not hold 12 bytes of tensor|pickle is not that of a plain tensor|stored once",
    ):
        read(saved(value))


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\2cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
        PICKLE.replace(b"K\3tq\5Q", b"J\0\0\0\x10tq\5Q"),  # a storage longer than its bytes
        b"\x80\2cos\nsystem\nX\4\0\0\0true\x85R.",
        PICKLE[:-1],
        PICKLE + b".",
        b"",
        PICKLE.replace(b"FloatStorage", b"DoubleStorage"),
        PICKLE.replace(b"cpu", b"gpu"),
        PICKLE.replace(b"\x89", b"\x88"),
    ],
)
def test_another_pickle_is_refused_and_none_is_run(
    pickled: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((torch, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(module, name, not_to_be_called)
    assert torch.equal(read(archived(MEMBERS)), GIVEN)
    with pytest.raises(SerdeError, match="pickle is not that of a plain tensor"):
        read(with_members(data_pkl=pickled))


def without(name: str) -> bytes:
    return archived({other: data for other, data in MEMBERS.items() if other != name})


def edited(signature: bytes, at: int, value: bytes) -> bytes:
    """An archive with other bytes at a place of its last record of that signature."""
    data = bytearray(archived(MEMBERS))
    begin = data.rindex(signature) + at
    data[begin : begin + len(value)] = value
    return bytes(data)


DIRECTORY, LOCAL, END64, LOCATOR, END = (
    b"PK" + bytes(two) for two in ((1, 2), (3, 4), (6, 6), (6, 7), (5, 6))
)
METHOD, FLAGS = (10, struct.pack("<H", 8)), (8, struct.pack("<H", 1))
FAR = struct.pack("<I", 1 << 20)


@pytest.mark.parametrize(
    ("archive", "match"),
    [
        (b"", "a payload of 0 bytes"),
        (bytes(98), "no archive"),
        (archived(MEMBERS)[:-1], "no archive"),
        (with_members(data__0=bytes(11)), "does not hold 12 bytes"),
        (with_members(data__0=bytes(13)), "does not hold 12 bytes"),
        (without("data/0"), "does not hold 12 bytes"),
        (with_members(byteorder=b"big"), "little-endian"),
        (without("byteorder"), "little-endian"),
        (without("data.pkl"), "pickle is not"),
        (archived({"x/" + name: data for name, data in MEMBERS.items()}), "does not hold 12"),
        (edited(DIRECTORY, *METHOD), "not stored once"),
        (edited(DIRECTORY, *FLAGS), "not stored once"),
        (edited(DIRECTORY, 24, FAR), "not stored once"),
        (edited(DIRECTORY, 42, FAR), "no archive"),
        (edited(DIRECTORY, 0, b"PK" + bytes((1, 3))), "no archive"),
        (edited(LOCATOR, 16, struct.pack("<I", 2)), "no archive"),
        (archived(MEMBERS | {"versiom": b""}).replace(b"versiom", b"version"), "not stored once"),
    ],
)
def test_another_archive_is_refused(archive: bytes, match: str) -> None:
    with pytest.raises(SerdeError, match=match):
        read(archive)


def test_what_is_compressed_is_refused() -> None:
    """A member that unfolds to a thousand times its length."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in MEMBERS.items():
            archive.writestr(PREFIX + name, data)
    with pytest.raises(SerdeError, match="not stored once"):
        read(file.getvalue())


def test_a_bool_is_0_or_1() -> None:
    members = members_of(saved(torch.tensor([False, True, True])))
    assert read(archived(members), BOOL, (3,)).tolist() == [False, True, True]
    with pytest.raises(SerdeError, match="neither 0 nor 1"):
        read(archived(members | {"data/0": b"\0\1\2"}), BOOL, (3,))


def test_a_torch_that_writes_otherwise_is_found_out_when_writing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        torch, "save", lambda tensor, file: file.write(archived(MEMBERS | {"byteorder": b"big"}))
    )
    with pytest.raises(
        SerdeError,
        match=r"torch \S+ writes archives of another form; use the Safe or the Fast serde",
    ):
        TorchSerializer().to_bytes(GIVEN)
