"""Reads KV events by the rules of llm-d's router, which is written in Go: what it takes in, what it
skips, how it counts references and how it catches up. It does what lines of JSON on its input say.

Source: https://github.com/llm-d/llm-d-router/tree/main/pkg/kvevents of August 2026.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from tests.vllm.engine_child import serve

BLOCK_TOKENS = 16
COOLDOWN_S = 30.0
"""After a failed replay nothing is believed for so long."""
IDLE_MS = 2_000
"""A replay that says nothing for so long has failed."""
WHOLE_KINDS = ("full_attention", "mla_attention", "sink_full_attention")
"""Of groups that say what they are, the others are skipped."""
FASTER = {"cpu": ("gpu", "cpu")}
"""What counts for a question about a medium; any medium for any other."""

Block = int | bytes
Place = tuple[str, int | None]
"""Medium and group."""


class Index:
    """What one pod has."""

    def __init__(self) -> None:
        self._key_of: dict[Block, bytes] = {}
        self._places: dict[bytes, set[Place]] = {}
        self._references: Counter[tuple[Block, Place]] = Counter()
        self._kinds: dict[int, str] = {}

    def clear(self) -> None:
        """Forget the pod."""
        self.leave()
        self._references.clear()

    def leave(self) -> None:
        """Forget the pod, as when it is not ready: its references stay."""
        self._places.clear()

    def apply(self, event: dict[str, Any]) -> None:
        """Take in what the rules take in."""
        kind = event["type"]
        if kind == "AllBlocksCleared":
            self.clear()
            return
        medium, group = (event.get("medium") or "gpu").lower(), event.get("group_idx")
        if kind == "BlockStored":
            self._store(event, (medium, group))
        elif group is None or self._kinds.get(group) in WHOLE_KINDS:
            self._remove(event["block_hashes"], (medium, group))

    def num_tokens(self, prompt: Sequence[int], media: Sequence[str] | None) -> int:
        """How many tokens of the prompt are in these media, from its beginning on."""
        keys = keys_of(b"", prompt)
        for number, key in enumerate(keys):
            places = self._places.get(key, ())
            if not any(media is None or medium in media for medium, _ in places):
                return number * BLOCK_TOKENS
        return len(keys) * BLOCK_TOKENS

    def _store(self, event: dict[str, Any], place: Place) -> None:
        blocks, tokens, group = event["block_hashes"], event["token_ids"], place[1]
        if group is not None:
            kind = self._kinds.setdefault(group, event.get("kv_cache_spec_kind"))
            if kind not in WHOLE_KINDS:
                return
            if len(tokens) != len(blocks) * event["block_size"]:
                return
        parent = event["parent_block_hash"]
        if parent is not None and parent not in self._key_of:
            return
        keys = keys_of(b"" if parent is None else self._key_of[parent], tokens)
        for block, key in zip(blocks, keys, strict=True):
            self._key_of[block] = key
            self._places.setdefault(key, set()).add(place)
            self._references[block, place] += 1

    def _remove(self, blocks: Sequence[Block], place: Place) -> None:
        for block in blocks:
            left = self._references[block, place] - 1
            if left > 0:
                self._references[block, place] = left
                continue
            self._references.pop((block, place), None)
            key = self._key_of.get(block)
            if key is None:
                continue
            places = self._places.get(key, set())
            places.discard(place)
            if not places:
                self._places.pop(key, None)
                del self._key_of[block]


def keys_of(parent: bytes, tokens: Sequence[int]) -> list[bytes]:
    """Its own names of blocks, from their tokens."""
    keys = []
    for at in range(0, len(tokens), BLOCK_TOKENS):
        block = repr(list(tokens[at : at + BLOCK_TOKENS])).encode()
        parent = hashlib.sha256(parent + block).digest()
        keys.append(parent)
    return keys


class Reader:
    """A router with one pod."""

    def __init__(self) -> None:
        self._index = Index()
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._subscriber: Subscriber | None = None

    def register(self, endpoint: str, replay: str | None) -> None:
        """Read a pod that is ready now; one that was ready before has left."""
        if self._subscriber is not None:
            self._subscriber.close()
        with self._lock:
            self._index.leave()
        self._subscriber = Subscriber(self._context, endpoint, replay, self._index, self._lock)

    def match(self, prompts: list[list[int]]) -> list[dict[str, int]]:
        """How many tokens of each prompt the pod has, by medium; each includes the faster ones."""
        assert self._subscriber is not None
        assert self._subscriber.is_reading, "its log says why not"
        with self._lock:
            return [
                {
                    medium: self._index.num_tokens(prompt, FASTER.get(medium))
                    for medium in ("cpu", "disk")
                }
                for prompt in prompts
            ]

    def close(self) -> None:
        """End it."""
        if self._subscriber is not None:
            self._subscriber.close()
        self._context.destroy(linger=0)


class Subscriber:
    """Reads the batches of one start of a pod, and asks for those that it missed."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        replay: str | None,
        index: Index,
        lock: threading.Lock,
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._replay = replay
        self._index = index
        self._lock = lock
        self._last: int | None = None
        self._last_live = -1
        self._failed_at = -COOLDOWN_S
        self._ends = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def is_reading(self) -> bool:
        """Whether it has met nothing that it cannot read."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop reading."""
        self._ends = True
        self._thread.join()

    def _run(self) -> None:
        with self._context.socket(zmq.SUB) as socket:
            socket.subscribe(b"")
            socket.connect(self._endpoint)
            if self._replay is not None:
                self._catch_up(0)
            while not self._ends:
                if socket.poll(50):
                    _topic, number, payload = socket.recv_multipart()
                    self._read(int.from_bytes(number, "big"), payload)

    def _read(self, number: int, payload: bytes) -> None:
        if self._replay is None:
            self._apply(payload)
            return
        is_asked = number < self._last_live
        if is_asked:
            self._forget()
            self._failed_at = -COOLDOWN_S
            self._catch_up(0)
        if number == self._last_live:
            return
        self._last_live = number
        may_ask = time.monotonic() - self._failed_at >= COOLDOWN_S
        if self._last is None:
            if number > 0 and (is_asked or not may_ask or not self._catch_up(0)):
                return
        elif number > self._last + 1 and (not may_ask or not self._catch_up(self._last + 1)):
            return
        if self._last is None or number == self._last + 1:
            self._apply(payload)
            self._last = number

    def _catch_up(self, begin: int) -> bool:
        """Ask for batches from this one on. Without them all, forget the pod."""
        with self._context.socket(zmq.DEALER) as socket:
            assert self._replay is not None
            socket.connect(self._replay)
            socket.send_multipart([b"", begin.to_bytes(8, "big")])
            expected = begin
            while socket.poll(IDLE_MS):
                _, _topic, number, payload = socket.recv_multipart()
                if not payload:
                    if expected > begin or begin == 0:
                        return True
                    break
                if int.from_bytes(number, "big") != expected:
                    break
                self._apply(payload)
                self._last = expected
                expected += 1
        self._forget()
        self._failed_at = time.monotonic()
        return False

    def _forget(self) -> None:
        with self._lock:
            self._index.clear()
        self._last = None

    def _apply(self, payload: bytes) -> None:
        with self._lock:
            for event in msgspec.msgpack.decode(payload)[1]:
                self._index.apply(event)


if __name__ == "__main__":
    serve(Reader())  # type: ignore[arg-type]
