"""What another server hands over to a storage is in that one's audit log, also when it was
refused.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.wire.client import ClientOptions, LmClient

from tests.fixtures.guarded_services import TOKENS, Guarded
from tests.fixtures.waiting import until
from tests.suites.chunks import make_chunk


def lines(guarded: Guarded) -> list[dict[str, Any]]:
    found = (
        json.loads(line)
        for line in guarded.services["storage"].output.splitlines()
        if line.startswith('{"time"')
    )
    return [line for line in found if line["what"] == "lm:// HANDOVER"]


async def test_handovers_are_audited(guarded: Guarded) -> None:
    port = guarded.services["storage"].ports["lm_port"]
    num_before = len(lines(guarded))
    server = LmClient("127.0.0.1", port, TOKENS["operator"], ClientOptions(tls=guarded.tls))
    chunks = [
        make_chunk(f"handed-{name}", tenant=tenant)
        for name, tenant in (("a", "acme"), ("b", "third"))
    ]
    assert await server.hand_over(chunks, may_evict=True) == [True, True]
    await server.close()
    client = LmClient("127.0.0.1", port, TOKENS["acme"], ClientOptions(tls=guarded.tls))
    with pytest.raises(UnavailableError):
        await client.hand_over(chunks, may_evict=True)
    await client.close()
    await until(lambda: len(lines(guarded)) >= num_before + 3)
    found = lines(guarded)[num_before:]
    assert [(line["who"], line["result"]) for line in found] == [
        ("operator", "done"),
        ("operator", "done"),
        ("acme", "refused"),
    ]
    assert [line["details"]["num_chunks"] for line in found] == [1, 1, 0]
    assert [line["details"]["tenants"][0] for line in found] == ["acme", "third", "acme"]
    text = json.dumps(found)
    assert not any(chunk.key.key.chunk_hash in text for chunk in chunks), (
        "chunks are counted and not named"
    )
