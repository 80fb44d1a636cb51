"""How people write token ids."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from lmcache_ctl.errors import CtlError
from lmcache_ctl.prompts import STANDARD_INPUT, read_messages, read_token_ids


@pytest.mark.parametrize("text", ["1 2\n3\n", "[1, 2, 3]", "1,2,3", " [1,\n2 , 3]\n"])
def test_token_ids_are_read_as_people_write_them(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokens").write_text(text)
    assert read_token_ids(tmp_path / "tokens") == [1, 2, 3]
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert read_token_ids(STANDARD_INPUT) == [1, 2, 3]


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"1 -2", b"1 31337x", b"[1, [2]]", b"\xff\xfe", "\u0661".encode()),
        *(b"4294967296", b"31337" * 1000),
    ],
    ids=lambda content: repr(content[:8]),
)
def test_what_is_no_token_id_is_refused_and_not_repeated(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_bytes(content)
    with pytest.raises(CtlError) as caught:
        read_token_ids(tmp_path / "tokens")
    assert "31337" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1",
        b"{",
        b"\xff",
        b"{}",
        b'{"messages": 1}',
        b"[" * 100_000,
        b'{"messages": ' + b"[" * 100_000,
    ],
    ids=lambda content: repr(content[:16]),
)
def test_what_is_no_chat_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "chat").write_bytes(content)
    with pytest.raises(CtlError, match="chat"):
        read_messages(tmp_path / "chat")
