"""The Torch serde: archives that `torch.load` would read, but that `torch.save` does not write
for a plain tensor, are refused.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable

import pytest
import torch
from lmcache_core.errors import SerdeError
from lmcache_core.memory.dtypes import DTYPE_ITEMSIZE
from lmcache_core.serde import TorchDeserializer, TorchSerializer
from lmcache_core.serde.torch_serde import pickle_of_tensor
from lmcache_core.testing.serde_suite import sealed_by_hand

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


def test_a_storage_that_is_claimed_to_be_longer_than_its_bytes_is_refused() -> None:
    """`torch.load` makes a tensor over memory that is not its own of it, which is why it may not
    see it; so this test does not either.
    """
    longer = PICKLE.replace(b"K\3tq\5Q", b"J\0\0\0\x10tq\5Q")
    assert longer != PICKLE
    with pytest.raises(SerdeError, match="pickle is not that of a plain tensor"):
        read(with_members(data_pkl=longer))


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
        match=r"does not hold 12 bytes of tensor|pickle is not that of a plain tensor|twice",
    ):
        read(saved(value))


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\2cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
        b"\x80\2cos\nsystem\nX\4\0\0\0true\x85R.",
        PICKLE[:-1],
        PICKLE + b".",
        b"",
        PICKLE.replace(b"FloatStorage", b"DoubleStorage"),
        PICKLE.replace(b"cpu", b"gpu"),
        PICKLE.replace(b"\x89", b"\x88"),
    ],
)
def test_another_pickle_is_never_run(pickled: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "load", not_to_be_called)
    with pytest.raises(SerdeError, match="pickle is not that of a plain tensor"):
        read(with_members(data_pkl=pickled))


@pytest.mark.parametrize(
    ("archive", "match"),
    [
        (b"", "a payload of 0 bytes"),
        (bytes(97), "97 bytes are too short for an archive"),
        (bytes(98), "does not end as an archive"),
        (archived(MEMBERS)[:-1], "does not end as an archive"),
        (archived(MEMBERS) + b"\0", "does not end as an archive"),
        (with_members(data__0=bytes(11)), "does not hold 12 bytes"),
        (with_members(data__0=bytes(13)), "does not hold 12 bytes"),
        (with_members(byteorder=b"big"), "little-endian"),
        (
            archived({name: data for name, data in MEMBERS.items() if name != "byteorder"}),
            "little-endian",
        ),
        (with_members(constants_pkl=b"\x80\2)."), "'constants.pkl' of 4 bytes|b'constants.pkl'"),
        (with_members(data__1=b""), "b'data/1' of 0 bytes"),
        (with_members(versions=b""), "b'versions' of 0 bytes"),
        (with_members(DATA__0=bytes(12)), "b'DATA/0' of 12 bytes"),
        (with_members(version=b"3" * 257), "b'version' of 257 bytes"),
        (archived(MEMBERS | {"/other/data": b""}), "directory is not as torch writes it"),
        (
            archived(MEMBERS | {f".{'a' * i}": b"" for i in range(1, 20)}),
            "does not end as an archive",
        ),
        (with_members(version=b"not a number"), "torch refuses the payload"),
    ],
)
def test_an_archive_of_other_members_is_refused(archive: bytes, match: str) -> None:
    with pytest.raises(SerdeError, match=match):
        read(archive)


def test_what_is_compressed_is_refused() -> None:
    """A member that unfolds to a thousand times its length; `zipfile` gives the end records that
    torch gives only when it is told to.
    """
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in MEMBERS.items():
            archive.writestr(PREFIX + name, data)
    with pytest.raises(SerdeError, match="does not end as an archive"):
        read(file.getvalue())
    for at, value in ((10, 8), (8, 1)):
        with pytest.raises(
            SerdeError, match=f"not stored as it is: method {value if at == 10 else 0}, flags"
        ):
            read(edited("PK\1\2", at, struct.pack("<H", value)))


def edited(signature: str, at: int, value: bytes, archive: bytes | None = None) -> bytes:
    """An archive with other bytes at a place of its last record of that signature."""
    data = bytearray(archived(MEMBERS) if archive is None else archive)
    begin = data.rindex(signature.encode("latin-1")) + at
    data[begin : begin + len(value)] = value
    return bytes(data)


def short(value: int) -> bytes:
    return struct.pack("<H", value)


def word(value: int) -> bytes:
    return struct.pack("<I", value)


EDITS = {
    "the sizes in the directory differ": lambda: edited("PK\1\2", 20, word(5)),
    "the size says that it is elsewhere": lambda: edited("PK\1\2", 20, word(0xFFFFFFFF) * 2),
    "an extra field in the directory": lambda: edited("PK\1\2", 30, short(1)),
    "a comment in the directory": lambda: edited("PK\1\2", 32, short(1)),
    "another disk": lambda: edited("PK\1\2", 34, short(1)),
    "a member behind the directory": lambda: edited("PK\1\2", 42, word(1 << 20)),
    "a member where there is none": lambda: edited("PK\1\2", 42, word(1)),
    "a name that goes on behind the directory": lambda: edited("PK\1\2", 28, short(60000)),
    "no entry of a directory": lambda: edited("PK\1\2", 0, b"PK\1\3"),
    "another method where it lies": lambda: edited("PK\3\4", 8, short(8)),
    "other flags where it lies": lambda: edited("PK\3\4", 6, short(8)),
    "another length of its name where it lies": lambda: edited("PK\3\4", 26, short(3)),
    "another name where it lies": lambda: edited("PK\3\4", 30, b"A"),
    "an extra field that goes on into the directory": lambda: edited("PK\3\4", 28, short(60000)),
    "more members than there are": lambda: edited(
        "PK\5\6", 8, short(8) * 2, edited("PK\6\6", 24, struct.pack("<2Q", 8, 8))
    ),
    "fewer members than there are": lambda: edited(
        "PK\5\6", 8, short(6) * 2, edited("PK\6\6", 24, struct.pack("<2Q", 6, 6))
    ),
    "one number of members in each end": lambda: edited("PK\5\6", 8, short(6) * 2),
    "a directory elsewhere": lambda: edited("PK\6\6", 48, struct.pack("<Q", 0)),
    "a directory of another length": lambda: edited(
        "PK\5\6", 12, word(1), edited("PK\6\6", 40, struct.pack("<Q", 1))
    ),
    "the large end elsewhere": lambda: edited("PK\6\7", 8, struct.pack("<Q", 0)),
    "a large end of another length": lambda: edited("PK\6\6", 4, struct.pack("<Q", 45)),
    "two disks": lambda: edited("PK\6\7", 16, word(2)),
    "a comment": lambda: edited("PK\5\6", 20, short(5)),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_what_two_readers_could_see_differently_is_refused(
    edit: Callable[[], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert edit() != archived(MEMBERS)
    monkeypatch.setattr(torch, "load", not_to_be_called)
    with pytest.raises(SerdeError):
        read(edit())


def test_a_member_twice_is_refused() -> None:
    data = archived(MEMBERS | {"versiom": b"3\n"}).replace(b"versiom", b"version")
    with pytest.raises(SerdeError, match="b'version' twice"):
        read(data)


def test_a_bool_is_0_or_1() -> None:
    members = members_of(saved(torch.tensor([False, True, True])))
    assert read(archived(members), BOOL, (3,)).tolist() == [False, True, True]
    with pytest.raises(SerdeError, match="neither 0 nor 1"):
        read(archived(members | {"data/0": b"\0\1\2"}), BOOL, (3,))


def test_a_torch_that_writes_otherwise_is_found_out_when_writing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        torch, "save", lambda tensor, file: file.write(archived(MEMBERS | {"data.json": b"{}"}))
    )
    with pytest.raises(
        SerdeError,
        match=r"torch \S+ writes archives of another form; use the Safe or the Fast serde",
    ):
        TorchSerializer().to_bytes(GIVEN)
