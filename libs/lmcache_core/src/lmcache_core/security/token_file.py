"""The bearer token that a client presents, from a file that may be replaced at run time."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

from lmcache_core.errors import ConfigError
from lmcache_core.security.watched_files import Reloaded, read_bounded

MAX_TOKEN_FILE_BYTES: Final = 4096


class TokenFile(Reloaded[str]):
    """A token and its source.

    Args:
        path: File that contains only the token, apart from surrounding white space.
        option: Name of the option, for errors.

    Raises:
        ConfigError: The file cannot be read or contains no token. Shows none of it.
    """

    def __init__(self, path: Path, option: str) -> None:
        super().__init__(partial(_read_token, path, option), [path], f"contents of {option}")
        self._path = path

    @property
    def text(self) -> str:
        """The current token; checks the file from time to time."""
        return self.current()

    def __repr__(self) -> str:
        return f"TokenFile({str(self._path)!r})"


ShownToken = str | TokenFile | None
"""The token of a client: a fixed one, one from a file, or none."""


def token_text(token: ShownToken) -> str | None:
    """Return the current token."""
    return token.text if isinstance(token, TokenFile) else token


def _read_token(path: Path, option: str) -> str:
    where = f"{option}={str(path)!r}"
    fix = "write the token and nothing around it"
    text = read_bounded(path, where, MAX_TOKEN_FILE_BYTES, fix).decode("latin-1").strip()
    if not text:
        raise ConfigError(f"{where} is empty: write the token into it")
    if not (text.isascii() and text.isprintable() and " " not in text):
        raise ConfigError(f"{where} contains something other than visible ASCII characters: {fix}")
    return text
