from pathlib import Path

import pytest
from lmcache_core.errors import ConfigError
from lmcache_core.security import TokenFile, token_text
from lmcache_core.security.token_file import MAX_TOKEN_FILE_BYTES
from lmcache_core.security.watched_files import WatchedFiles

from tests.fixtures.held_clock import HeldClock, watch_files_by
from tests.fixtures.limits import without_descriptors


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
        (b"a" * (MAX_TOKEN_FILE_BYTES + 1), "larger than 4096 bytes"),
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


def test_replaced_file_is_noticed_and_a_missing_one_is_logged_once(
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
    clock.now_s += 1.0
    assert token.text == "third-token"
    assert "-token\n" not in caplog.text


def test_file_that_could_not_be_read_is_read_again(
    tmp_path: Path, clock: HeldClock, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "token"
    path.write_text("first-token")
    token = TokenFile(path, "o")
    path.write_text("second-token")
    with without_descriptors():
        for _ in range(3):
            clock.now_s += 1.0
            assert token.text == "first-token"
    assert caplog.text.count("Too many open files") == 1
    clock.now_s += 1.0
    assert token.text == "second-token"


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
