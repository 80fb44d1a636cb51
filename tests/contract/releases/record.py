"""Record what this release's clients and servers say: `python -m tests.contract.releases.record
0.2.0`, once, when it is tagged.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import tempfile
from pathlib import Path

from lmcache_core.lookup import LookupClient
from lmcache_core.p2p import BrokerClient

from tests.contract.releases.conversations import (
    ARENA_BYTES,
    CLIENT,
    SERVER,
    talk_broker,
    talk_lm,
    talk_lookup,
    talk_socket,
)
from tests.contract.releases.tape import (
    FOLDER,
    Exchange,
    Recorder,
    ask_lm,
    is_answered,
    read_frame,
    read_message,
    unix_server,
)
from tests.fixtures.service_process import running_service
from tests.fixtures.sidecar import running_socket
from tests.fixtures.wire import MemoryStore, client_of, serving


async def record_lm() -> list[Exchange]:
    """A relay between the client and a server."""
    store = MemoryStore()
    exchanges: list[Exchange] = []
    async with serving(store, name=SERVER) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)

        async def relay(
            client_reader: asyncio.StreamReader, client_writer: asyncio.StreamWriter
        ) -> None:
            try:
                while True:
                    _, frame = await read_frame(client_reader)
                    answers = await ask_lm(reader, writer, frame)
                    exchanges.append(
                        {"said": frame.hex(), "answered": [answer.hex() for answer in answers]}
                    )
                    client_writer.writelines(answers)
            except asyncio.IncompleteReadError:
                client_writer.close()

        relaying = await asyncio.start_server(relay, "127.0.0.1", 0)
        async with relaying, client_of(relaying.sockets[0].getsockname()[1], name=CLIENT) as client:
            await talk_lm(client, store.arena)
        writer.close()
    return exchanges


def record_socket(directory: Path) -> list[Exchange]:
    """The same for the sidecar's socket."""
    exchanges: list[Exchange] = []
    with (
        running_socket(directory, ARENA_BYTES, path=directory / "real.sock") as running,
        socket.socket(socket.AF_UNIX) as real,
    ):
        real.connect(str(running.path))

        def answer(request: bytes) -> bytes:
            real.sendall(request)
            answered = [read_message(real)] if is_answered(request) else []
            exchanges.append({"said": request.hex(), "answered": [data.hex() for data in answered]})
            return b"".join(answered)

        with unix_server(directory / "relay.sock", answer):
            talk_socket(directory / "relay.sock", lambda connection: connection.arena.store_view)
    return exchanges


async def record_rest(directory: Path) -> dict[str, list[Exchange]]:
    """Heartbeats and questions, to real services."""
    made = {}
    for name in ("lookup", "broker"):
        recorder = Recorder()
        with running_service(
            f"lmcache_{name}", directory, {f"LMCACHE_{name.upper()}_PORT": "0"}
        ) as service:
            if name == "lookup":
                lookup = LookupClient(service.url, timeout_s=10.0, transport=recorder)
                await lookup.open()
                await talk_lookup(lookup)
                await lookup.close()
            else:
                broker = BrokerClient(service.url, None, 10.0, transport=recorder)
                await broker.open()
                await talk_broker(broker)
                await broker.close()
        made[name] = recorder.exchanges
    return made


def record(folder: Path) -> None:
    """Record all protocols into a new folder. A recorded release never changes."""
    folder.mkdir()
    with tempfile.TemporaryDirectory() as directory:
        tapes = {
            "lm": asyncio.run(record_lm()),
            "socket": record_socket(Path(directory)),
        } | asyncio.run(record_rest(Path(directory)))
    for name, exchanges in tapes.items():
        (folder / f"{name}.json").write_text(json.dumps(exchanges, indent=1) + "\n")


if __name__ == "__main__":
    record(FOLDER / sys.argv[1])
