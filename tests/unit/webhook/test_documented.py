"""What docs/injection.md says to write is what the webhook would have written."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lmcache_core.integrations.vllm.releases import too_old
from lmcache_webhook.injection.command_line import OPTION
from lmcache_webhook.injection.sidecar import transfer_config

from tests.fixtures.pods import CONNECTOR_IN_A_SCRIPT

PAGE = Path(__file__).resolve().parents[3] / "docs" / "injection.md"


def leaves(config: Mapping[str, Any], above: str) -> Iterator[str]:
    """vLLM takes `--option.key=value` for a member of a JSON option."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{above}.{name}")
        else:
            yield f"{above}.{name}={value}"


def test_words_for_scripts_are_the_argument() -> None:
    text = PAGE.read_text()
    words = re.findall(rf"{OPTION}\.\S+=\S+", text)
    assert words == list(leaves(transfer_config(), OPTION)) == CONNECTOR_IN_A_SCRIPT.split()
    assert all(
        word.isascii() and not set(word) & set(" '\"$\\`{}[]*?;&|()<>#~!") for word in words
    ), "plain in any quotes"


def test_page_quotes_the_refusal_of_an_older_vllm() -> None:
    assert f"`{too_old('0.11.0')}`" in PAGE.read_text()
