"""The documented serdes as codecs of chunks, beyond the contract of all codecs."""

from __future__ import annotations

import subprocess
import sys

import pytest
from lmcache_core.errors import ConfigError
from lmcache_core.record import RecordHeader
from lmcache_core.serde.documented_codec import DOCUMENTED_SERDES, DocumentedCodec


def test_only_its_own_records_are_decoded() -> None:
    header = RecordHeader(b"", "torch", "", False, (), b"")
    found = {serde: DocumentedCodec(serde).decodes(header) for serde in DOCUMENTED_SERDES}
    assert found == {"torch": True, "safetensor": False, "fast": False}


def test_another_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="'pickle'"):
        DocumentedCodec("pickle")


@pytest.mark.parametrize(("serde", "package"), [("fast", "torch"), ("safetensor", "safetensors")])
def test_without_its_package_it_says_what_to_install(serde: str, package: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from lmcache_core.serde.documented_codec import DocumentedCodec\n"
        f"codec = DocumentedCodec({serde!r})\n"
        "try: codec.open()\n"
        "except Exception as exc: print(type(exc).__name__, exc)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.startswith("ConfigError")
    assert package in done.stdout
    assert "./libs/lmcache_core[torch]" in done.stdout
