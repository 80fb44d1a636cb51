from __future__ import annotations

import pytest
import torch
from lmcache_core.errors import ConfigError
from lmcache_core.keys import CacheEngineKey
from lmcache_core.token_database import MultimodalSpan, TokenDatabase


class Plain(TokenDatabase):
    """What somebody writes who has read no more than the documented interface."""

    def process_tokens(self, tokens, mask=None):
        yield 0, len(tokens), CacheEngineKey("vllm", "m", 1, 0, str(tokens.tolist()))


def test_process_tokens_is_all_that_must_be_there():
    [(start, end, key)] = Plain().process_tokens(torch.arange(3))
    assert (start, end, key.chunk_hash) == (0, 3, "[0, 1, 2]")
    with pytest.raises(TypeError):
        TokenDatabase()


def test_a_database_without_salt_takes_none_and_says_so():
    Plain().use_salt("")
    with pytest.raises(ConfigError, match="salt: Plain does not"):
        Plain().use_salt("tenant-a")


@pytest.mark.parametrize(
    "span",
    [
        (b"", 0, 1),
        (b"x" * 256, 0, 1),
        (b"cat", -1, 2),
        (b"cat", 0, 0),
        (b"cat", 3, -1),
        (b"cat", 0, 2**32),
    ],
    ids=str,
)
def test_a_span_that_covers_no_tokens_or_names_no_content_is_refused(span):
    with pytest.raises(ValueError):
        MultimodalSpan(*span)
