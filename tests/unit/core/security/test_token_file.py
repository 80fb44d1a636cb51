from pathlib import Path

import pytest
from lmcache_core.errors import ConfigError
from lmcache_core.security import TokenFile, token_text
from lmcache_core.security.token_file import MAX_TOKEN_FILE_BYTES
from lmcache_core.security.watched_files import WatchedFiles

from tests.fixtures.limits import without_descriptors


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def due(token: TokenFile, clock: Clock, path: Path) -> None:
    """Let the file be looked at by that clock."""
    token._watch = WatchedFiles([path], 1.0, clock)


def test_the_token_is_what_the_file_holds_without_what_is_around_it(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("  one-token-0123456789\n\n")
    token = TokenFile(path, "service_token_file")
    assert token.text == token_text(token) == "one-token-0123456789"
    assert repr(token) == f"TokenFile({str(path)!r})"
    assert token_text("as it is") == "as it is"
    assert token_text(None) is None


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"two words", "visible ASCII"),
        ("é".encode(), "visible ASCII"),
        (b"a\0b", "visible ASCII"),
    ],
)
def test_what_is_no_token_is_refused_without_being_shown(
    tmp_path: Path, data: bytes, why: str
) -> None:
    path = tmp_path / "token"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=why) as caught:
        TokenFile(path, "service_token_file")
    assert str(caught.value).startswith(f"service_token_file={str(path)!r}")
    assert "two words" not in str(caught.value)


def test_a_missing_or_huge_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        TokenFile(tmp_path / "absent", "o")
    path = tmp_path / "huge"
    path.write_bytes(b"a" * (MAX_TOKEN_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than 4096 bytes"):
        TokenFile(path, "o")


def test_a_replaced_file_is_seen_and_a_spoilt_one_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "token", Clock()
    path.write_text("first-token")
    token = TokenFile(path, "o")
    due(token, clock, path)
    path.write_text("second-token")
    assert token.text == "first-token", "looked at a moment ago"
    clock.now = 1.0
    assert token.text == "second-token"
    path.unlink()
    for clock.now in (2.0, 3.0, 4.0):
        assert token.text == "second-token"
    assert caplog.text.count("keeping what was read before") == 1
    path.write_text("third-token")
    clock.now = 5.0
    assert token.text == "third-token"
    assert "-token\n" not in caplog.text


def test_a_file_that_could_not_be_read_is_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "token", Clock()
    path.write_text("first-token")
    token = TokenFile(path, "o")
    due(token, clock, path)
    path.write_text("second-token")
    with without_descriptors():
        for clock.now in (1.0, 2.0, 3.0):
            assert token.text == "first-token"
    assert caplog.text.count("Too many open files") == 1
    clock.now = 4.0
    assert token.text == "second-token"


def test_watched_files_follow_links(tmp_path: Path) -> None:
    """A mounted secret is replaced by moving a link to its directory."""
    clock = Clock()
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "token").write_text(name)
    data = tmp_path / "data"
    data.symlink_to(tmp_path / "old")
    watch = WatchedFiles([data / "token", tmp_path / "never-there"], 1.0, clock)
    clock.now = 1.0
    assert not watch.have_changed()
    (tmp_path / "data.new").symlink_to(tmp_path / "new")
    (tmp_path / "data.new").replace(data)
    assert not watch.have_changed(), "too early"
    clock.now = 2.0
    assert watch.have_changed()
    clock.now = 3.0
    assert not watch.have_changed()
