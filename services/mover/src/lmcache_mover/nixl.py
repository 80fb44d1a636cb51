"""NIXL's agents: one that peers read from, and one for each peer that is read from."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

POLL_S: Final = 0.0002
IDLE_POLL_S: Final = 0.1
"""Between two looks for connections while no peer is expected. By RDMA peers read without any."""


class NixlError(Exception):
    """NIXL could not do it."""


class Memory(NamedTuple):
    """A part of this process's memory."""

    address: int
    num_bytes: int


class ServingAgent:
    """The agent that peers read from.

    Attributes:
        blob: What peers need to reach it.

    Raises:
        NixlError: It cannot be made.
    """

    def __init__(self, memory: Memory) -> None:
        with _told():
            self._agent = _agent(memory)
            self.blob: bytes = self._agent.get_agent_metadata()
        self._expects_peers = threading.Event()
        threading.Thread(target=self._attend, name="serving", daemon=True).start()

    def serve(self, is_on: bool) -> None:
        """Expect peers or not."""
        if is_on:
            self._expects_peers.set()
        else:
            self._expects_peers.clear()

    def _attend(self) -> None:
        # Without RDMA a read makes progress only while its target looks for messages.
        while True:
            self._agent.get_new_notifs()
            if self._expects_peers.wait(IDLE_POLL_S):
                time.sleep(POLL_S)


class ReadingAgent:
    """An agent that reads from one peer. Leaving it destroys it, and what it reads is quiet then,
    once `is_destroyed` says so: an error that is being handled may still hold it.

    Args:
        blob: What the peer's mover has told.

    Raises:
        NixlError: It cannot be made, or the blob makes no sense.
    """

    def __init__(self, memory: Memory, blob: bytes) -> None:
        self._memory = memory
        self._underway: dict[int, Any] = {}
        with _told():
            self._agent = _agent(memory)
            self._core = weakref.ref(self._agent.agent)
            self._peer: str = self._agent.add_remote_agent(blob)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._underway.clear()  # each handle keeps the agent
        del self._agent

    @property
    def is_destroyed(self) -> bool:
        """Return whether the agent is gone."""
        return self._core() is None

    def begin(self, number: int, pieces: Sequence[tuple[int, int, int]]) -> None:
        """Begin a read.

        Args:
            pieces: Address in the peer's mover, offset in our memory, and length.

        Raises:
            NixlError: It has failed.
        """
        agent = self._agent
        with _told():
            here = agent.get_xfer_descs(
                [(self._memory.address + offset, length, 0) for _, offset, length in pieces], "DRAM"
            )
            there = agent.get_xfer_descs([(at, length, 0) for at, _, length in pieces], "DRAM")
            handle = agent.initialize_xfer("READ", here, there, self._peer)
            self._underway[number] = handle
            if agent.transfer(handle) == "ERR":
                raise NixlError("the read was refused")

    def ended(self) -> list[int]:
        """Return the reads that have ended since.

        Raises:
            NixlError: One has failed.
        """
        found = []
        with _told():
            for number, handle in self._underway.items():
                state = self._agent.check_xfer_state(handle)
                if state == "ERR":
                    raise NixlError("the read failed")
                if state == "DONE":
                    found.append(number)
            for number in found:
                self._underway.pop(number).release()
        return found


def _agent(memory: Memory) -> Any:
    try:
        from nixl_cu12 import nixl_agent, nixl_agent_config
    except ImportError as exc:
        raise NixlError(f"NIXL is missing ({exc}): pip install --no-deps nixl-cu12") from None
    # Its own thread would spin.
    config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
    agent = nixl_agent(f"lmcache-{secrets.token_hex(8)}", config)
    agent.register_memory([(memory.address, memory.num_bytes, 0, "")], "DRAM")
    return agent


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Turn what NIXL raises, which has no type in common, into `NixlError`."""
    try:
        yield
    except NixlError:
        raise
    except Exception as exc:
        raise NixlError(f"{type(exc).__name__}: {exc}"[:500]) from None
