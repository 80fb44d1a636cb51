"""Tokens: the table of a service's callers, and the file with a client's own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from lmcache_core.errors import AuthenticationError, ConfigError
from lmcache_core.security import (
    Principal,
    TokenFile,
    TokenTable,
    token_file,
    token_text,
    tokens,
    validate_instance_id,
    validate_tenant,
)
from lmcache_core.security.tokens import MAX_TOKENS
from lmcache_core.security.watched_files import WatchedFiles

from tests.fixtures.held_clock import HeldClock, watch_files_by
from tests.fixtures.limits import without_descriptors

CLIENT = "client-token-0123456789"
ADMIN = "admin-token-0123456789"
FRESH = "fresh-token-0123456789"
SHA_CLIENT = hashlib.sha256(CLIENT.encode()).hexdigest()


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


TOO_MANY = "tokens:\n" + "".join(
    f"- {{name: n{i}, tenant: t, role: client, token: token-of-sixteen-{i}}}\n"
    for i in range(MAX_TOKENS + 1)
)


def entry(**changes: str | None) -> str:
    """A token file with one entry, with some of its fields changed or left out."""
    fields = {"name": "a", "tenant": "t", "role": "client", "token": "0123456789abcdef"} | changes
    set_fields = (f"{name}: {value}" for name, value in fields.items() if value is not None)
    return f"tokens: [{{{', '.join(set_fields)}}}]"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(
        tmp_path / "tokens.yaml",
        f"tokens:\n- {{name: vllm, tenant: prod, role: client, token_sha256: {SHA_CLIENT}}}\n"
        f"- {{name: ops, tenant: prod, role: admin, token: {ADMIN}}}\n",
    )


def test_tokens_name_their_principals(file: Path) -> None:
    table = TokenTable.from_file(file)
    assert table.authenticate(CLIENT) == Principal("prod", "client", "vllm")
    assert table.authenticate(ADMIN) == Principal("prod", "admin", "ops")
    assert not table.is_anonymous


@pytest.mark.parametrize(
    "token", [None, "", CLIENT + "x", CLIENT[:-1], SHA_CLIENT, "\ud800" * 20, "x" * 100_000]
)
def test_unknown_token_is_refused_and_not_shown(file: Path, token: str | None) -> None:
    with pytest.raises(AuthenticationError) as error:
        TokenTable.from_file(file).authenticate(token)
    assert not token or token not in str(error.value)


def test_anonymous_table_admits_every_caller() -> None:
    table = TokenTable.anonymous()
    assert table.is_anonymous
    for token in (None, "any"):
        assert table.authenticate(token) == Principal("default", "admin", "anonymous")
    table.reload_if_changed()
    assert table.is_anonymous
    assert repr(table) == "TokenTable(anonymous)"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "Expected `object`"),
        ("tokens: []", "list 1 to"),
        (TOO_MANY, "list 1 to"),
        (f"tokens:\n- {{name: a, token: {ADMIN}, ]\n", "line 2 is not YAML"),
        ("tokens: 2001-99-99", "not YAML"),
        (entry() + "\nextra: 1", "extra"),
        (entry(scope="x"), r"scope.*tokens\[0\]"),
        (entry(role="root"), r"root.*tokens\[0\].role"),
        (entry(tenant="T"), r"tokens\[0\] \(a\): tenant 'T'"),
        (entry(name="'a b'"), r"tokens\[0\]: name"),
        (entry(token=None), "exactly one"),
        (entry(token_sha256=SHA_CLIENT), "exactly one"),
        (entry(token="short"), "16 to 512"),
        (entry(token="'0123456789abcdef '"), "visible ASCII"),
        (entry(token="1234567890123456"), r"\$.tokens\[0\].token"),
        (entry(token=None, token_sha256="abc"), "64 hex digits"),
        # The last role would count, or all tokens of the first list be gone.
        (entry(role="client, role: admin"), "line 1 has a name twice; keep one of them"),
        ("#" * (tokens.MAX_TOKEN_FILE_BYTES + 1), "larger than"),
    ],
)
def test_malformed_file_is_refused_with_entry_and_fix_and_not_shown(
    tmp_path: Path, text: str, complaint: str
) -> None:
    path = write(tmp_path / "bad.yaml", text)
    with pytest.raises(ConfigError, match=complaint) as error:
        TokenTable.from_file(path)
    assert str(path) in str(error.value)
    assert "0123456789" not in str(error.value)
    assert error.value.__suppress_context__ or error.value.__context__ is None


@pytest.mark.parametrize("shared", ["name", "token"])
def test_entries_share_neither_name_nor_token(tmp_path: Path, shared: str) -> None:
    second = {"name": "b", "token": "another-token-0123"} | {
        shared: {"name": "a", "token": "0123456789abcdef"}[shared]
    }
    both = entry()[:-1] + ", " + entry(**second).removeprefix("tokens: [")
    with pytest.raises(ConfigError, match=f"share a {shared}"):
        TokenTable.from_file(write(tmp_path / "t.yaml", both))


def test_replaced_file_is_read_again_and_until_it_is_usable_the_old_table_stays(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = TokenTable.from_file(file)

    def num_problems() -> int:
        caplog.clear()
        for _ in range(3):
            table.reload_if_changed()
        assert table.authenticate(CLIENT).name == "vllm"
        return caplog.text.count("keeping what was read before")

    file.write_text("tokens: []")
    assert num_problems() == 1
    file.unlink()
    assert num_problems() == 1
    write(file.with_suffix(".new"), entry(tenant="other", token=FRESH)).replace(file)
    with without_descriptors():
        assert num_problems() == 1
    table.reload_if_changed()
    assert table.authenticate(FRESH).tenant == "other"
    with pytest.raises(AuthenticationError):
        table.authenticate(CLIENT)


@pytest.mark.parametrize(
    ("validate", "good", "bad"),
    [
        (validate_tenant, "a" * 63, ["", "A", "-a", "a/b", "a\n", "a" * 64, "ä"]),
        (validate_instance_id, "vllm-0.Pod_1", ["", "-a", "../x", "a:b", "a\n", "a" * 129]),
    ],
)
def test_malformed_name_is_refused(
    validate: Callable[[str], str], good: str, bad: list[str]
) -> None:
    assert validate(good) == good
    for name in bad:
        with pytest.raises(ValueError):
            validate(name)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HeldClock:
    held = HeldClock()
    watch_files_by(held, monkeypatch)
    return held


def test_token_is_the_content_of_the_file_without_white_space(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("  one-token-0123456789\n\n")
    token = TokenFile(path, "service_token_file")
    assert token.text == token_text(token) == "one-token-0123456789"
    assert repr(token) == f"TokenFile({str(path)!r})"
    assert token_text(None) is None


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b" \n", "is empty"),
        (b"two words", "visible ASCII"),
        ("é".encode(), "visible ASCII"),
        (b"a\0b", "visible ASCII"),
        (b"a" * (token_file.MAX_TOKEN_FILE_BYTES + 1), "larger than 4096 bytes"),
        (None, "cannot be read"),
    ],
)
def test_file_without_a_token_is_refused_and_not_shown(
    tmp_path: Path, data: bytes | None, why: str
) -> None:
    path = tmp_path / "token"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ConfigError, match=why) as caught:
        TokenFile(path, "service_token_file")
    assert str(caught.value).startswith(f"service_token_file={str(path)!r}")
    assert "two words" not in str(caught.value)


def test_replaced_file_is_noticed_and_one_that_cannot_be_read_is_logged_once(
    tmp_path: Path, clock: HeldClock, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "token"
    path.write_text("first-token")
    token = TokenFile(path, "o")
    path.write_text("second-token")
    assert token.text == "first-token", "looked at a moment ago"
    clock.now_s += 1.0
    assert token.text == "second-token"
    path.unlink()
    for _ in range(3):
        clock.now_s += 1.0
        assert token.text == "second-token"
    assert caplog.text.count("keeping what was read before") == 1
    path.write_text("third-token")
    with without_descriptors():
        for _ in range(3):
            clock.now_s += 1.0
            assert token.text == "second-token"
    assert caplog.text.count("Too many open files") == 1
    clock.now_s += 1.0
    assert token.text == "third-token"
    assert "-token\n" not in caplog.text


def test_watched_files_follow_links(tmp_path: Path) -> None:
    """A mounted secret is replaced by moving a link to its directory."""
    clock = HeldClock()
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "token").write_text(name)
    data = tmp_path / "data"
    data.symlink_to(tmp_path / "old")
    watch = WatchedFiles([data / "token", tmp_path / "never-there"], 1.0, clock)
    clock.now_s += 1.0
    assert not watch.have_changed()
    (tmp_path / "data.new").symlink_to(tmp_path / "new")
    (tmp_path / "data.new").replace(data)
    assert not watch.have_changed(), "too early"
    clock.now_s += 1.0
    assert watch.have_changed()
    clock.now_s += 1.0
    assert not watch.have_changed()


def test_repr_shows_no_secret(file: Path) -> None:
    table = TokenTable.from_file(file)
    assert repr(table) == f"TokenTable({str(file)!r}, num_tokens=2)"
    assert "digest" not in repr(vars(table))
    assert ADMIN not in repr(vars(table))
