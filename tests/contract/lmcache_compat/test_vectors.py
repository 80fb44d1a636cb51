"""The running storage answers what LMCache clients were seen to send as their own server did,
byte for byte.
"""

from __future__ import annotations

import pytest
from lmcache_storage.compat.dialect import DIALECTS, CompatCommand

from tests.contract.lmcache_compat.vectors import EXCHANGES, REPLY_BYTES, REQUEST_BYTES, VALUE
from tests.fixtures.compat import GET, PUT, listening, request_bytes
from tests.fixtures.wire import RawConnection, connected


async def expect(raw: RawConnection, request: str, reply: str) -> None:
    await raw.send(bytes.fromhex(request))
    assert (await raw.reader.readexactly(len(reply) // 2)).hex() == reply


@pytest.mark.parametrize("dialect", EXCHANGES)
async def test_every_exchange_is_as_it_was_seen(dialect: str) -> None:
    async with listening(dialect) as listener, connected(listener.port) as raw:
        for request, reply in EXCHANGES[dialect]:
            await expect(raw, request, reply)


@pytest.mark.parametrize("dialect", EXCHANGES)
async def test_however_the_bytes_are_cut(dialect: str) -> None:
    requests = b"".join(bytes.fromhex(request) for request, _ in EXCHANGES[dialect])
    replies = "".join(reply for _, reply in EXCHANGES[dialect])
    async with listening(dialect) as listener:
        for size in (1, 37, len(requests)):
            async with connected(listener.port) as raw:
                for at in range(0, len(requests), size):
                    await raw.send(requests[at : at + size])
                assert (await raw.reader.readexactly(len(replies) // 2)).hex() == replies
            listener.store.clear()


@pytest.mark.parametrize("dialect", EXCHANGES)
def test_the_headers_have_their_lengths(dialect: str) -> None:
    assert DIALECTS[dialect].request.size == REQUEST_BYTES[dialect]
    assert DIALECTS[dialect].reply.size == REPLY_BYTES[dialect]


KEYS = {
    "v0.2": f"vllm@acme/tiny@1@0@{'ab' * 32}",
    "v0.3+": "acme/tiny@1@0@1234567890abcdef@bfloat16",
}


@pytest.mark.parametrize("dialect", EXCHANGES)
def test_a_put_reads_as_what_its_client_put(dialect: str) -> None:
    put = bytes.fromhex(EXCHANGES[dialect][2][0])[: REQUEST_BYTES[dialect]]
    request = DIALECTS[dialect].parse(put, len(VALUE))
    assert (request.command, request.key, request.num_bytes, request.about) == (
        CompatCommand.PUT,
        KEYS[dialect],
        64,
        (1, 3, 2, 2, 4, 2),
    )


@pytest.mark.parametrize("dialect", EXCHANGES)
def test_the_other_tests_speak_as_real_clients(dialect: str) -> None:
    put, get = (bytes.fromhex(EXCHANGES[dialect][at][0]) for at in (2, 4))
    assert request_bytes(dialect, PUT, KEYS[dialect], len(VALUE), (1, 3, 2, 2, 4, 2)) + VALUE == put
    assert request_bytes(dialect, GET, KEYS[dialect]) == get


@pytest.mark.parametrize(("spoken", "dialect"), [("v0.2", "v0.3+"), ("v0.3+", "v0.2")])
@pytest.mark.parametrize("first", range(5))
async def test_a_client_of_another_dialect_is_cut_off_before_it_can_be_misunderstood(
    spoken: str, dialect: str, first: int
) -> None:
    async with listening(dialect, transfer_timeout_s=0.1) as listener:
        for request, _ in EXCHANGES[spoken][first:] + EXCHANGES[spoken][:first]:
            async with connected(listener.port) as raw:
                await raw.send(bytes.fromhex(request))
                assert await raw.reader.read() == b"", "no answer that it could take for one"
        assert not listener.store.chunks
