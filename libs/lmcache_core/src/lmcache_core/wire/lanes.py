"""Names on one connection: lanes, declared once, and packed hashes that refer to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lmcache_core.errors import IdentityError, ProtocolError
from lmcache_core.keys import CHUNK_HASH_BYTES, CacheEngineKey, ChunkKey, Lane
from lmcache_core.wire.messages import MAX_LANES, DeclareLane, NameRun


class LaneNumbers:
    """The numbers that a client has assigned to lanes."""

    def __init__(self) -> None:
        self._numbers: dict[Lane, int] = {}

    def declaration(self, lane: Lane) -> DeclareLane | None:
        """Return the frame that declares a lane; None if it already has a number, or none is left.

        Raises:
            IdentityError: Keys of this lane cannot be encoded.
        """
        if lane in self._numbers or len(self._numbers) >= MAX_LANES:
            return None
        lane.check()
        return DeclareLane(len(self._numbers), lane)

    def add(self, declared: DeclareLane) -> None:
        """Use a number from now on: its frame is on its way."""
        self._numbers[declared.lane] = declared.number

    def number(self, lane: Lane) -> int | None:
        """Return a lane's number; None if it has none."""
        return self._numbers.get(lane)

    def names(self, runs: Iterable[tuple[Lane | None, bytes]]) -> list[NameRun]:
        """Return the runs of `runs_of` in the form for a request."""
        names: list[NameRun] = []
        for lane, data in runs:
            number = None if lane is None else self._numbers.get(lane)
            if lane is None or number is not None:
                names.append((number, data))
            else:
                names += [(None, key.canonical()) for key in lane.keys(data)]
        return names


def runs_of(keys: Iterable[CacheEngineKey]) -> list[tuple[Lane | None, bytes]]:
    """Return the keys in order, consecutive keys of one lane together: the lane and the packed
    hashes. Without a lane, one canonical key whose hash is not 32 bytes.

    Raises:
        IdentityError: A key cannot be encoded.
    """
    runs: list[tuple[Lane | None, bytearray]] = []
    for key in keys:
        packed = key.hash_bytes()
        if packed is None:
            runs.append((None, bytearray(key.canonical())))
            continue
        lane = key.lane()
        if runs and (runs[-1][0] is lane or runs[-1][0] == lane):
            runs[-1][1].extend(packed)
        else:
            runs.append((lane, bytearray(packed)))
    return [(lane, bytes(data)) for lane, data in runs]


class KnownLanes:
    """The server's side: the lanes behind the numbers of one connection."""

    def __init__(self) -> None:
        self._lanes: list[Lane] = []

    def add(self, message: DeclareLane) -> None:
        """Record what a number stands for.

        Raises:
            ProtocolError: It is not the next number, or keys of such a lane cannot be encoded.
        """
        if message.number != len(self._lanes):
            raise ProtocolError(f"LANE {message.number}, expected {len(self._lanes)}")
        try:
            message.lane.check()
        except IdentityError as exc:
            raise ProtocolError(f"LANE {message.number}: {exc}") from exc
        self._lanes.append(message.lane)

    def run(self, number: int, data: bytes) -> tuple[Lane, bytes]:
        """Return a lane, and the packed hashes of a run in it.

        Raises:
            IdentityError: There is no such lane, or the hashes are incomplete.
        """
        if number >= len(self._lanes):
            raise IdentityError(f"lane {number} has not been declared")
        if len(data) % CHUNK_HASH_BYTES:
            raise IdentityError(
                f"{len(data)} bytes of hashes: must be a multiple of {CHUNK_HASH_BYTES}"
            )
        return self._lanes[number], data

    def keys(self, names: Sequence[NameRun], tenant: str, max_keys: int) -> list[ChunkKey]:
        """Return the keys that a request names.

        Raises:
            IdentityError: There are too many, or one is malformed.
        """
        num_keys = sum(
            1 if number is None else len(data) // CHUNK_HASH_BYTES for number, data in names
        )
        if num_keys > max_keys:
            raise IdentityError(f"{num_keys} keys; the limit is {max_keys}")
        keys: list[ChunkKey] = []
        for number, data in names:
            if number is None:
                keys.append(ChunkKey.of(tenant, CacheEngineKey.from_canonical(data)))
            else:
                lane, hashes = self.run(number, data)
                keys += lane.chunk_keys(tenant, hashes)
        return keys
