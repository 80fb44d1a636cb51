"""Names on one connection: lanes, declared once, and the packed hashes that refer to them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from lmcache_core.errors import IdentityError, ProtocolError
from lmcache_core.keys import CHUNK_HASH_BYTES, CacheEngineKey, ChunkKey, Lane
from lmcache_core.wire.messages import MAX_LANES, DeclareLane, NameRun
from lmcache_core.wire.stream import FrameStream


class DeclaredLanes:
    """The client's side: declares a lane before the first name in it.

    Args:
        stream: The connection.
    """

    def __init__(self, stream: FrameStream) -> None:
        self._stream = stream
        self._numbers: dict[Lane, int] = {}
        self._declaring = asyncio.Lock()

    async def names(self, keys: Sequence[ChunkKey]) -> list[NameRun]:
        """Return the keys as a request names them, in order.

        Raises:
            IdentityError: A key cannot be spelled.
            UnavailableError: The connection is lost.
        """
        runs: list[tuple[Lane | None, bytearray]] = []
        for chunk_key in keys:
            key = chunk_key.key
            packed = key.hash_bytes()
            if packed is None:
                runs.append((None, bytearray(key.canonical())))
                continue
            own = key.lane()
            if runs and runs[-1][0] == own:
                runs[-1][1].extend(packed)
            else:
                runs.append((own, bytearray(packed)))
        if any(lane is not None and lane not in self._numbers for lane, _ in runs):
            await self._declare([lane for lane, _ in runs if lane is not None])
        names: list[NameRun] = []
        for lane, packed_run in runs:
            data = bytes(packed_run)
            number = None if lane is None else self._numbers.get(lane)
            if lane is None or number is not None:
                names.append((number, data))
            else:
                names += [(None, key.canonical()) for key in lane.keys(data)]
        return names

    async def _declare(self, lanes: Sequence[Lane]) -> None:
        # One at a time: numbers must arrive in order, and one counts only when its frame is sent.
        async with self._declaring:
            for lane in lanes:
                number = len(self._numbers)
                if lane not in self._numbers and number < MAX_LANES:
                    lane.check()
                    await self._stream.send_message(0, DeclareLane(number, lane))
                    self._numbers[lane] = number


class KnownLanes:
    """The server's side: what the numbers of one connection stand for."""

    def __init__(self) -> None:
        self._lanes: list[Lane] = []

    def add(self, message: DeclareLane) -> None:
        """Learn what a number stands for.

        Raises:
            ProtocolError: It is not the next number, or keys of such a lane cannot be spelled.
        """
        if message.number != len(self._lanes):
            raise ProtocolError(f"LANE {message.number} where {len(self._lanes)} was due")
        try:
            message.lane.check()
        except IdentityError as exc:
            raise ProtocolError(f"LANE {message.number}: {exc}") from exc
        self._lanes.append(message.lane)

    def keys(self, names: Sequence[NameRun], tenant: str, max_keys: int) -> list[ChunkKey]:
        """Return the keys that a request names.

        Args:
            names: As they came.
            tenant: Whose namespace they are in.
            max_keys: Most keys that are taken.

        Raises:
            IdentityError: They are too many, or one is not a name.
        """
        num_keys = sum(
            1 if number is None else len(data) // CHUNK_HASH_BYTES for number, data in names
        )
        if num_keys > max_keys:
            raise IdentityError(f"{num_keys} keys; the limit is {max_keys}")
        keys: list[CacheEngineKey] = []
        for number, data in names:
            if number is None:
                keys.append(CacheEngineKey.from_canonical(data))
            elif number >= len(self._lanes):
                raise IdentityError(f"lane {number} has not been declared")
            elif len(data) % CHUNK_HASH_BYTES:
                raise IdentityError(
                    f"{len(data)} bytes of hashes: must be a multiple of {CHUNK_HASH_BYTES}"
                )
            else:
                keys += self._lanes[number].keys(data)
        return [ChunkKey(tenant, key) for key in keys]
