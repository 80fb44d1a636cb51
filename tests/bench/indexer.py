"""How many chunks that come one process of Dynamo's indexer takes: `python -m tests.bench.indexer`,
in an environment with `ai-dynamo-runtime` and `pyzmq`. Both ends share the machine's cores.

The indexer listens on all addresses, so run it where nothing reaches it: `unshare -n bash -c 'ip
link set lo up; python -m tests.bench.indexer'`.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import zmq

from tests.bench.events import BLOCK_TOKENS, removed_event, stored_event

PORT, EVENTS_PORT = 18_931, 18_932
MODEL = "model"
EVENTS_IN_BATCH = 256
"""As many as our connector publishes at once."""
CHUNKS_IN_PROMPT = 32
START_S, MOST_S = 30.0, 120.0


def call(path: str, body: dict[str, Any] | None = None) -> Any:
    """Ask the indexer."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.loads(answer.read() or b"null")


def batches(num_chunks: int) -> tuple[list[bytes], list[int]]:
    """Return encoded batches of events of prompts' chunks, each taken back before it is announced,
    and the last prompt's tokens.
    """
    chance = random.Random(1)
    encoded, events = [], []
    tokens: list[int] = []
    parent = None
    for number in range(num_chunks):
        if number % CHUNKS_IN_PROMPT == 0:
            parent, tokens = None, []
        event = stored_event(chance, parent)
        parent = event.block_hashes[-1]
        tokens += event.token_ids
        events += [removed_event(event), event]
        if len(events) >= EVENTS_IN_BATCH or number == num_chunks - 1:
            encoded.append(msgspec.msgpack.encode([time.time(), events, 0]))
            events = []
    return encoded, tokens


def wait_for(what: str, limit_s: float, is_done: Any) -> None:
    """Ask until it is so.

    Raises:
        TimeoutError: It is not.
    """
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        try:
            if is_done():
                return
        except (urllib.error.URLError, ConnectionError):
            pass
        time.sleep(0.05)
    raise TimeoutError(f"{what}: not within {limit_s:g} s")


def processor_s(pid: int) -> float:
    """Return the processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def main() -> None:
    """Publish, wait until the last prompt is known, and print the rate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=8192, help="default: %(default)s")
    num_chunks = parser.parse_args().chunks
    encoded, tokens = batches(num_chunks)
    context = zmq.Context()
    publisher = context.socket(zmq.PUB)
    publisher.set_hwm(0)
    publisher.bind(f"tcp://127.0.0.1:{EVENTS_PORT}")
    command = (sys.executable, "-m", "dynamo.indexer", "--threads", "1")
    arguments = ("--block-size", str(BLOCK_TOKENS), "--port", str(PORT))
    with subprocess.Popen([*command, *arguments]) as indexer:
        try:
            wait_for("start", START_S, lambda: call("/workers") is not None)
            about = {"instance_id": 1, "dp_rank": 0, "model_name": MODEL}
            where = {"endpoint": f"tcp://127.0.0.1:{EVENTS_PORT}", "block_size": BLOCK_TOKENS}
            call("/register", about | where)
            time.sleep(1)  # it subscribes
            query = {"token_ids": tokens, "model_name": MODEL}
            nothing = call("/query", query)
            used, began = processor_s(indexer.pid), time.monotonic()
            for number, payload in enumerate(encoded):
                publisher.send_multipart((b"", number.to_bytes(8, "big"), payload))
            wait_for("last prompt", MOST_S, lambda: call("/query", query) != nothing)
            took_s, used = time.monotonic() - began, processor_s(indexer.pid) - used
            memory = Path(f"/proc/{indexer.pid}/status").read_text().partition("VmRSS:")[2]
        finally:
            indexer.terminate()
    print(f"chunks that come, a second: {num_chunks / took_s:,.0f}")
    print(f"of a second of its processor time: {num_chunks / used:,.0f}")
    print(f"bytes of their events: {sum(map(len, encoded)) / num_chunks:,.0f}")
    print(f"its memory with {num_chunks:,} chunks: {int(memory.split()[0]) / 1000:.0f} MB")


if __name__ == "__main__":
    main()
