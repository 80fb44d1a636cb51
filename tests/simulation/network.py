"""Sockets between simulated processes, with a network that can be slow, cut or broken between them.

Bytes of a connection arrive in order. Bytes of different connections may overtake each other, bytes
sent together may be received in pieces, and a socket accepts only what fits.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import selectors
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

from tests.simulation.kernel import Kernel, Machine, Process, Thread

FIRST_DESCRIPTOR = 1 << 20
BUFFER_BYTES = 1 << 18
"""Bytes that a connection holds in one direction: sent and not received yet."""
FIRST_RETRY_S, LAST_RETRY_S = 0.2, 120.0
"""First and longest pause before a lost packet is retransmitted; it doubles in between."""
GIVE_UP_S = 924.6
"""A connection ends after packets were lost for this long (`tcp_retries2`)."""
CONNECT_RETRIES = 6
"""Retries of an unanswered connect: after 1, 2, 4 … seconds, 127 in all."""
KEEPALIVE = {socket.TCP_KEEPIDLE: 7200, socket.TCP_KEEPINTVL: 75, socket.TCP_KEEPCNT: 9}
_KEEPALIVE_OPTIONS = (socket.SO_KEEPALIVE, *KEEPALIVE)
LOCAL_LATENCY_S = 20e-6
LARGE_BYTES = 2048
EPHEMERAL_PORTS = 32768

Address = Any


class Link:
    """How packets travel between two machines, in both directions.

    Attributes:
        latency_s: Shortest and longest time of a packet.
        bytes_per_s: Bandwidth.
        loss: How often a packet is lost.
        cut_from: Names of the machines whose packets are all lost.
    """

    def __init__(
        self, latency_s: tuple[float, float], bytes_per_s: float, names: Iterable[str] = ()
    ) -> None:
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self.loss = 0.0
        self.cut_from: set[str] = set()
        self._names = frozenset(names)

    @property
    def is_cut(self) -> bool:
        """Whether nothing passes, in either direction."""
        return bool(self._names) and self._names == self.cut_from

    @is_cut.setter
    def is_cut(self, is_cut: bool) -> None:
        self.cut_from = set(self._names) if is_cut else set()


class Network:
    """All machines, listeners and connections."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.machines: dict[str, Machine] = {}
        self.names: dict[str, list[str] | Callable[[], list[str]]] = {}
        """The name service: addresses by name, or a function that returns the present ones."""
        self.listeners: dict[tuple[str, Any], SimulatedSocket] = {}
        self.connections: dict[Pipe, None] = {}
        """One direction each, those whose reader is open."""
        self.piece_chance = 0.0
        """How often a read returns only a part of the arrived bytes."""
        self.interrupt_chance = 0.0
        """How often a packet of `LARGE_BYTES` or more stops in the middle."""
        self.interrupt_s = 0.0
        """How long the rest of such a packet takes."""
        self.breaks_interrupted = False
        """Whether its connection breaks before."""
        self.local_buffer_bytes = BUFFER_BYTES
        """Size of the buffers of connections within a machine."""
        self._links: dict[tuple[str, str], Link] = {}
        self._without_power: set[str] = set()
        self._num_descriptors = 0
        self._num_ports = 0

    def add_machine(self, name: str) -> Machine:
        """Add a machine; its name resolves to it."""
        machine = Machine(name, f"10.0.0.{len(self.machines) + 1}")
        self.machines[name] = machine
        self.names[name] = [machine.address]
        return machine

    def link(self, one: Machine, other: Machine) -> Link:
        """Return the link of two machines."""
        names = (min(one.name, other.name), max(one.name, other.name))
        if names not in self._links:
            local = one is other
            self._links[names] = Link(
                (LOCAL_LATENCY_S / 2, LOCAL_LATENCY_S) if local else (50e-6, 400e-6),
                4e9 if local else 1e9,
                names,
            )
        return self._links[names]

    def cut(self, one: Machine, other: Machine) -> None:
        """Drop all packets between two machines."""
        self.link(one, other).is_cut = True

    def cut_one_way(self, source: Machine, target: Machine) -> None:
        """Drop all packets from one machine to another, but none in the other direction."""
        self.link(source, target).cut_from.add(source.name)

    def mend(self, one: Machine, other: Machine) -> None:
        """Let packets pass again: lost ones arrive when they are retransmitted."""
        self.link(one, other).is_cut = False

    def lose_power(self, machine: Machine) -> None:
        """Make a machine vanish: peers of its processes receive nothing, neither now nor when the
        processes are killed.

        Called at the instant in which the processes are killed, before or after.
        """
        self._without_power.add(machine.name)
        for process in self.kernel.processes:
            if process.machine is machine:
                for one in list(process.descriptors.values()):
                    if isinstance(one, SimulatedSocket):
                        one.vanish()
        for pipe in list(self.connections):
            if pipe.source is machine:
                pipe.forget()

    def restore(self, machine: Machine) -> None:
        """Restore a machine's power. It has forgotten its connections: it resets those whose peers
        still send.
        """
        self._without_power.discard(machine.name)

    def has_power(self, machine: Machine) -> bool:
        """Return whether a machine has power."""
        return machine.name not in self._without_power

    def passes(self, source: Machine, target: Machine) -> bool:
        """Return whether a packet sent now arrives; on a lossy link this is random."""
        dark = self._without_power
        if dark and (source.name in dark or target.name in dark):
            return False
        link = self.link(source, target)
        if source.name in link.cut_from:
            return False
        return not link.loss or self.kernel.random.random() >= link.loss

    def latency_s(self, source: Machine, target: Machine) -> float:
        """Draw how long a packet takes."""
        least, largest = self.link(source, target).latency_s
        return least + (largest - least) * self.kernel.random.random()

    def next_descriptor(self) -> int:
        self._num_descriptors += 1
        return FIRST_DESCRIPTOR + self._num_descriptors

    def next_port(self) -> int:
        self._num_ports += 1
        return EPHEMERAL_PORTS + self._num_ports % 28000

    def listener(self, machine: Machine, address: Address) -> tuple[Machine, Any]:
        """Return the machine that an address names, and the key of a listener there."""
        if isinstance(address, str):
            return machine, address
        host, port = address[0], address[1]
        if host in ("127.0.0.1", "localhost", "::1", "0.0.0.0"):
            return machine, port
        for other in self.machines.values():
            if host in (other.address, other.name):
                return other, port
        raise OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))


class Mark(Enum):
    """A packet without bytes."""

    END = "no more bytes follow"
    RESET = "the connection is unknown here"


Packet = bytes | Mark


class Pipe:
    """One direction of a connection.

    Bytes occupy space from when they are sent until they are acknowledged and received.
    """

    def __init__(self, network: Network, source: Machine, target: Machine) -> None:
        self.network = network
        self.source = source
        self.target = target
        self.arrived = bytearray()
        self.has_ended = False
        self.reader: SimulatedSocket | None = None
        self.writer: SimulatedSocket | None = None
        self.packet_sizes: deque[int] | None = None
        """Of what was sent and not received, where packets stay whole (SEQPACKET)."""
        self._num_underway = 0
        self._num_unacknowledged = 0
        self._underway: deque[tuple[float, Packet]] = deque()
        self._last_at = 0.0
        # While a packet is lost, those after it wait.
        self._retry_s = 0.0
        self._lost_since_s = 0.0
        network.connections[self] = None

    @property
    def room(self) -> int:
        """Return how many bytes can be sent now."""
        is_local = self.source is self.target and self.packet_sizes is None
        size = self.network.local_buffer_bytes if is_local else BUFFER_BYTES
        return size - self._num_underway - self._num_unacknowledged - len(self.arrived)

    @property
    def is_waiting(self) -> bool:
        """Whether something was sent and not acknowledged yet."""
        return bool(self._underway or self._num_unacknowledged)

    def send(self, packet: Packet) -> None:
        """Send bytes, an end of stream, or a reset."""
        kernel, network = self.network.kernel, self.network
        at = kernel.now + network.latency_s(self.source, self.target)
        if packet is Mark.RESET and self._retry_s:
            self.forget()  # a reset does not wait for retransmissions
        if isinstance(packet, bytes):
            at += len(packet) / network.link(self.source, self.target).bytes_per_s
            if self.packet_sizes is not None:
                self.packet_sizes.append(len(packet))
            self._num_underway += len(packet)
        self._last_at = max(self._last_at, at)
        self._underway.append((self._last_at, packet))
        kernel.call_later(self._last_at - kernel.now, self._arrive)

    def _arrive(self) -> None:
        if not self._retry_s:
            self._try()

    def _try_again(self) -> None:
        if self._retry_s:
            self._try()

    def _try(self) -> None:
        """Deliver the packets that are due; wait if one is lost, or its acknowledgement."""
        kernel, network = self.network.kernel, self.network
        is_due = bool(self._underway) and self._underway[0][0] <= kernel.now + 1e-9
        if not is_due and not self._num_unacknowledged:
            self._retry_s = 0.0
            return
        if not network.passes(self.source, self.target):
            if self._underway and self._underway[-1][1] is Mark.RESET:
                self.forget()  # it is not retransmitted
            else:
                self._wait()
            return
        if self.reader is None or self.reader.is_closed:
            self._refuse()
            return
        while self._underway and self._underway[0][0] <= kernel.now + 1e-9:
            _, packet = self._underway.popleft()
            if packet is Mark.RESET:
                self.reader.fail(errno.ECONNRESET)
                return
            if packet is Mark.END:
                self.has_ended = True
                continue
            packet = self._before_interruption(packet)
            self._num_underway -= len(packet)
            self._num_unacknowledged += len(packet)
            self.arrived += packet
        self.reader.heard()
        self.reader.changed()
        if self._num_unacknowledged and not network.passes(self.target, self.source):
            self._wait()
            return
        self._num_unacknowledged = 0
        self._retry_s = 0.0
        if self.writer is not None:
            self.writer.heard()
            self.writer.changed()

    def _before_interruption(self, packet: bytes) -> bytes:
        """Return what arrives of a packet now."""
        network, kernel = self.network, self.network.kernel
        is_small = len(packet) < LARGE_BYTES or self.packet_sizes is not None
        if not network.interrupt_chance or is_small:
            return packet
        if kernel.random.random() >= network.interrupt_chance:
            return packet
        at, rest_s = kernel.random.randrange(1, len(packet)), network.interrupt_s
        self._underway.appendleft((kernel.now + rest_s, packet[at:]))
        kernel.call_later(rest_s, self._arrive)
        if network.breaks_interrupted:
            kernel.call_later(rest_s * kernel.random.random(), self.break_off)
        return packet[:at]

    def _wait(self) -> None:
        """Retransmit later, unless the time limit is over."""
        kernel = self.network.kernel
        if not self._retry_s:
            self._retry_s, self._lost_since_s = FIRST_RETRY_S, kernel.now
        else:
            self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)
        limit_s = GIVE_UP_S
        if self.writer is not None:
            limit_s = self.writer.option(socket.TCP_USER_TIMEOUT, 0) / 1000 or GIVE_UP_S
        if kernel.now - self._lost_since_s >= limit_s:
            self.forget()
            if self.writer is not None:
                self.writer.fail(errno.ETIMEDOUT)
            return
        kernel.call_later(self._retry_s, self._try_again)

    def _refuse(self) -> None:
        """Answer with a reset: this end no longer reads."""
        network = self.network
        if any(packet is not Mark.END for _, packet in self._underway) or self._num_unacknowledged:
            if not network.passes(self.target, self.source):
                self._wait()
                return
            if (writer := self.writer) is not None:
                network.kernel.call_later(
                    network.latency_s(self.target, self.source),
                    lambda: writer.fail(errno.ECONNRESET),
                )
        self.forget()

    def take(self, num_bytes: int) -> bytes:
        """Receive the bytes that have arrived, or one packet."""
        if self.packet_sizes is not None:
            num_bytes = self.packet_sizes.popleft()
        elif self.network.piece_chance and num_bytes > 1:
            random = self.network.kernel.random
            if random.random() < self.network.piece_chance:
                num_bytes = random.randint(1, num_bytes)
        was_full = self.room <= 0
        data = bytes(memoryview(self.arrived)[:num_bytes])
        del self.arrived[: len(data)]
        if was_full and self.writer is not None:
            self.writer.changed()
        return data

    def forget(self) -> None:
        """Lose the packets in flight."""
        self._underway.clear()
        self._num_underway = self._num_unacknowledged = 0
        self._retry_s = 0.0

    def break_off(self) -> None:
        """Reset the connection: both ends are notified at once, and packets in flight are lost."""
        for end in (self.reader, self.writer):
            if end is not None:
                end.fail(errno.ECONNRESET)


class SimulatedSocket:
    """`socket.socket`, between simulated processes."""

    def __init__(
        self,
        family: int = socket.AF_INET,
        type: int = socket.SOCK_STREAM,
        proto: int = 0,
        fileno: int | None = None,
    ) -> None:
        process = kernel.process
        assert fileno is None, "a descriptor of the machine below"
        assert process is not None, "a socket is made outside of the simulation"
        if len(process.descriptors) >= process.max_descriptors:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        self.begin(
            process,
            socket.AddressFamily(family if family >= 0 else socket.AF_INET),
            socket.SocketKind(type & ~(socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)),
            proto,
        )
        self.descriptor = network.next_descriptor()
        process.descriptors[self.descriptor] = self

    def begin(
        self, process: Process, family: socket.AddressFamily, type: socket.SocketKind, proto: int
    ) -> None:
        """Set what a new socket has; it has no descriptor yet."""
        self.family = family
        self.type = type
        self.proto = proto
        self.process = process
        self.machine = process.machine
        self.is_closed = False
        self.name: Address = "" if family == socket.AF_UNIX else ("0.0.0.0", 0)
        self.peer: Address = None
        self.error = 0
        self.has_failed = False
        """Whether the connection was reset or given up; `error` says why, once."""
        self.backlog: deque[SimulatedSocket] | None = None
        self.watchers: dict[Any, None] = {}
        self.incoming: Pipe | None = None
        self.outgoing: Pipe | None = None
        self._timeout_s: float | None = None
        self._is_connecting = False
        self._has_sent_end = False
        self.backlog_size = 0
        self._key: Any = None
        self.descriptor = -1
        self.other_process: Process | None = None
        self.options: dict[tuple[int, int], Any] = {}
        self._heard_s = 0.0
        self._num_watches = 0

    # --- What others learn -----------------------------------------------------------------------

    def changed(self) -> None:
        """Wake all waiters of this socket."""
        for watcher in list(self.watchers):
            watcher.socket_changed(self)

    def events(self) -> int:
        """Return the events that it is ready for."""
        if self.backlog is not None:
            return selectors.EVENT_READ if self.backlog else 0
        if self._is_connecting:
            return 0
        incoming, outgoing = self.incoming, self.outgoing
        if incoming is None or outgoing is None or self.error or self.has_failed:
            return selectors.EVENT_READ | selectors.EVENT_WRITE
        mask = 0
        if incoming.arrived or incoming.has_ended:
            mask |= selectors.EVENT_READ
        if outgoing.room > 0:
            mask |= selectors.EVENT_WRITE
        return mask

    @property
    def has_hung_up(self) -> bool:
        """Whether the other end has closed (POLLRDHUP)."""
        return self.incoming is not None and (self.incoming.has_ended or self.has_failed)

    def fail(self, number: int) -> None:
        """End the connection at this end, with an error."""
        if self.is_closed or self.has_failed:
            return
        self.has_failed, self.error = True, number
        if self.incoming is not None and self.outgoing is not None:
            self.outgoing.forget()
            network.connections.pop(self.incoming, None)
        self.changed()

    def vanish(self) -> None:
        """Close without notifying the other end: the machine has lost its power."""
        self.close_with(None)

    # --- Whether the other end is there ----------------------------------------------------------

    def heard(self) -> None:
        """Note that the other end has answered."""
        self._heard_s = kernel.now

    def keep_alive(self) -> None:
        """Probe a silent other end, if the socket's options require it."""
        if self.outgoing is None:
            return
        self._num_watches += 1
        if self.options.get((socket.SOL_SOCKET, socket.SO_KEEPALIVE)):
            self._probe(self._num_watches, 0)

    def _probe(self, watch: int, num_lost: int) -> None:
        outgoing = self.outgoing
        if self.is_closed or self.has_failed or outgoing is None or watch != self._num_watches:
            return
        idle_s, interval_s = self.option(socket.TCP_KEEPIDLE), self.option(socket.TCP_KEEPINTVL)
        silent_s = kernel.now - self._heard_s
        if outgoing.is_waiting:
            kernel.call_later(idle_s, lambda: self._probe(watch, 0))
        elif silent_s < idle_s - 1e-6:
            kernel.call_later(idle_s - silent_s, lambda: self._probe(watch, 0))
        elif num_lost >= self.option(socket.TCP_KEEPCNT):
            self.fail(errno.ETIMEDOUT)
        elif not network.passes(outgoing.source, outgoing.target) or not network.passes(
            outgoing.target, outgoing.source
        ):
            kernel.call_later(interval_s, lambda: self._probe(watch, num_lost + 1))
        elif outgoing.reader is None or outgoing.reader.is_closed:
            self.fail(errno.ECONNRESET)
        else:
            self.heard()
            kernel.call_later(idle_s, lambda: self._probe(watch, 0))

    def process_ended(self) -> None:
        """Close, since the process is dead: connections with unread bytes are reset."""
        self.close()

    def _await(self, mask: int) -> None:
        if self.events() & mask:
            return
        if self._timeout_s == 0.0:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        deadline = None if self._timeout_s is None else kernel.now + self._timeout_s
        waiter = Waiter(kernel.current)
        self.watchers[waiter] = None
        try:
            while not self.events() & mask and not self.is_closed:
                if not kernel.block(None if deadline is None else deadline - kernel.now):
                    raise TimeoutError("timed out")
        finally:
            self.watchers.pop(waiter, None)

    # --- Connecting ------------------------------------------------------------------------------

    def bind(self, address: Address) -> None:
        if self.family == socket.AF_UNIX:
            self._key = os.fspath(address)
            if os.path.lexists(self._key):
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            with contextlib.closing(RealSocket(socket.AF_UNIX, socket.SOCK_STREAM)) as node:
                node.bind(self._key)  # keeps the directory entry
            self.name = self._key
            return
        _, port = network.listener(self.machine, address)
        port = port or network.next_port()
        if (self.machine.name, port) in network.listeners:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        self._key = port
        self.name = (address[0], port)
        network.listeners[self.machine.name, port] = self

    def listen(self, backlog: int = 128) -> None:
        self.backlog = deque()
        self.backlog_size = max(backlog, 1)
        network.listeners[self.machine.name, self._key] = self

    def accept(self) -> tuple[SimulatedSocket, Address]:
        self._await(selectors.EVENT_READ)
        assert self.backlog is not None
        if len(self.process.descriptors) >= self.process.max_descriptors:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        accepted = self.backlog.popleft()
        accepted.descriptor = network.next_descriptor()
        accepted.process.descriptors[accepted.descriptor] = accepted
        return accepted, accepted.peer

    def connect(self, address: Address) -> None:
        if self.outgoing is not None:
            raise OSError(errno.EISCONN, os.strerror(errno.EISCONN))
        if self.family == socket.AF_UNIX:
            address = os.fspath(address)
            if not os.path.lexists(address):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            self._connect_here(address)
            return
        machine, key = network.listener(self.machine, address)
        self.peer = address
        self.name = (self.machine.address, network.next_port())
        self._is_connecting = True
        way_s = network.latency_s(self.machine, machine) + network.latency_s(machine, self.machine)
        kernel.call_later(way_s, lambda: self._reach(machine, key, 0))
        if self._timeout_s == 0.0:
            raise BlockingIOError(errno.EINPROGRESS, os.strerror(errno.EINPROGRESS))
        self._await(selectors.EVENT_READ | selectors.EVENT_WRITE)
        self._raise_error()

    def connect_ex(self, address: Address) -> int:
        try:
            self.connect(address)
        except OSError as exc:
            return exc.errno or errno.EIO
        return 0

    def _connect_here(self, path: str) -> None:
        """Connect to a process of the same machine: at once, or not at all."""
        kernel.sleep(LOCAL_LATENCY_S)
        while True:
            listener = network.listeners.get((self.machine.name, path))
            if listener is None or listener.backlog is None:
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            if len(listener.backlog) < listener.backlog_size:
                break
            if self._timeout_s is not None:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            kernel.sleep(0.01)
        self.peer = path
        connect(self, listener)
        listener.changed()

    def _reach(self, machine: Machine, key: Any, num_tries: int) -> None:
        """Connect to the listener there; retransmit while nothing answers."""
        if self.is_closed:
            return
        listener = network.listeners.get((machine.name, key))
        answers = network.passes(self.machine, machine) and network.passes(machine, self.machine)
        is_listening = listener is not None and listener.backlog is not None
        if answers and listener is not None and listener.backlog is not None:
            answers = len(listener.backlog) < listener.backlog_size
        if not answers:
            pause_s = float(1 << num_tries)
            if num_tries < CONNECT_RETRIES:
                kernel.call_later(pause_s, lambda: self._reach(machine, key, num_tries + 1))
            else:
                kernel.call_later(pause_s, lambda: self._refused(errno.ETIMEDOUT))
        elif not is_listening:
            self._refused(errno.ECONNREFUSED)
        else:
            assert listener is not None
            self._is_connecting = False
            connect(self, listener)
            listener.changed()
            self.changed()

    def _refused(self, number: int) -> None:
        self._is_connecting = False
        self.error = number
        self.changed()

    # --- Bytes -----------------------------------------------------------------------------------

    def _receive(self, num_bytes: int) -> bytes:
        while True:
            incoming = self.incoming
            if incoming is not None and incoming.arrived:
                return incoming.take(num_bytes)
            self._raise_error()
            if incoming is None:
                raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
            if incoming.has_ended or self.has_failed:
                return b""
            self._await(selectors.EVENT_READ)
            if self.is_closed:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    def _raise_error(self) -> None:
        if self.error:
            number, self.error = self.error, 0
            raise OSError(number, os.strerror(number))

    def recv(self, num_bytes: int, flags: int = 0) -> bytes:
        assert not flags
        return self._receive(num_bytes)

    def recv_into(self, buffer: Any, num_bytes: int = 0, flags: int = 0) -> int:
        view = memoryview(buffer).cast("B")
        data = self._receive(num_bytes or len(view))
        view[: len(data)] = data
        return len(data)

    def send(self, data: Any, flags: int = 0) -> int:
        # An error keeps this frame alive, but the caller may still change its buffer.
        with memoryview(data) as whole, whole.cast("B") as view:
            return self._send(view)

    def _send(self, view: memoryview) -> int:
        while True:
            outgoing = self.outgoing
            self._raise_error()
            if outgoing is None:
                raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
            if self.has_failed or self._has_sent_end:
                raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
            if not view:
                return 0
            if (room := outgoing.room) >= (1 if outgoing.packet_sizes is None else len(view)):
                count = min(room, len(view))
                outgoing.send(bytes(view[:count]))
                return count
            self._await(selectors.EVENT_WRITE)
            if self.is_closed:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    def sendall(self, data: Any, flags: int = 0) -> None:
        view = memoryview(data).cast("B")
        while view:
            view = view[self.send(view) :]

    def sendmsg(self, buffers: Iterable[Any], *_: Any) -> int:
        return self.send(b"".join(buffers))

    def shutdown(self, how: int) -> None:
        if self.outgoing is None or self.has_failed:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        if how in (socket.SHUT_WR, socket.SHUT_RDWR) and not self._has_sent_end:
            self._has_sent_end = True
            self.outgoing.send(Mark.END)
        if how in (socket.SHUT_RD, socket.SHUT_RDWR):
            assert self.incoming is not None
            self.incoming.has_ended = True
            self.changed()

    def close(self) -> None:
        is_unread = self.incoming is not None and bool(self.incoming.arrived)
        self.close_with(Mark.RESET if is_unread else Mark.END)

    def close_with(self, last: Mark | None) -> None:
        """Close, and send `last` to the other end; None sends nothing."""
        if self.is_closed:
            return
        self.is_closed = True
        self.process.descriptors.pop(self.descriptor, None)
        if self._key is not None:
            mine = network.listeners.get((self.machine.name, self._key))
            if mine is self:
                del network.listeners[self.machine.name, self._key]
            for waiting in self.backlog or ():
                waiting.close_with(last and Mark.RESET)
        if self.outgoing is not None and self.incoming is not None:
            network.connections.pop(self.incoming, None)
            if last is None:
                self.outgoing.forget()
            elif not self.has_failed and (last is Mark.RESET or not self._has_sent_end):
                self.outgoing.send(last)
        self.changed()

    def detach(self) -> int:
        raise NotImplementedError("detach")

    # --- Options ---------------------------------------------------------------------------------

    def fileno(self) -> int:
        return -1 if self.is_closed else self.descriptor

    def setblocking(self, flag: bool) -> None:
        self._timeout_s = None if flag else 0.0

    def getblocking(self) -> bool:
        return self._timeout_s != 0.0

    def settimeout(self, seconds: float | None) -> None:
        self._timeout_s = seconds

    def gettimeout(self) -> float | None:
        return self._timeout_s

    def setsockopt(self, level: int, option: int, value: Any, length: int = 0) -> None:
        self.options[level, option] = value
        if option in _KEEPALIVE_OPTIONS:
            self.keep_alive()

    def option(self, number: int, default: float = 0.0) -> float:
        """Return an option of TCP."""
        value: float = self.options.get(
            (socket.IPPROTO_TCP, number), KEEPALIVE.get(number, default)
        )
        return value

    def getsockopt(self, level: int, option: int, size: int = 0) -> Any:
        if (level, option) == (socket.SOL_SOCKET, socket.SO_ERROR):
            number, self.error = self.error, 0
            return number
        if (level, option) == (socket.SOL_SOCKET, socket.SO_PEERCRED):
            pid = 0 if self.other_process is None else self.other_process.pid
            return struct.pack("3i", pid, os.getuid(), os.getgid())
        return self.options.get((level, option), 0)

    def getsockname(self) -> Address:
        return self.name

    def getpeername(self) -> Address:
        if self.outgoing is None:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return self.peer

    def set_inheritable(self, inheritable: bool) -> None:
        pass

    def __enter__(self) -> SimulatedSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(client: SimulatedSocket, listener: SimulatedSocket) -> None:
    """Connect a socket with a new one of the listener's process."""
    server = SimulatedSocket.__new__(SimulatedSocket)
    server.begin(listener.process, listener.family, listener.type, listener.proto)
    if listener.family == socket.AF_UNIX:
        server.name, server.peer = listener.name, ""
    else:
        server.name, server.peer = client.peer, client.name
    server.other_process = client.process
    server.options = dict(listener.options)
    server.heard()
    client.other_process = listener.process
    there = Pipe(network, client.machine, listener.machine)
    back = Pipe(network, listener.machine, client.machine)
    client.outgoing, client.incoming = there, back
    server.outgoing, server.incoming = back, there
    if listener.type == socket.SOCK_SEQPACKET:
        there.packet_sizes, back.packet_sizes = deque(), deque()
    there.writer, there.reader = client, server
    back.writer, back.reader = server, client
    client.heard()
    client.keep_alive()
    server.keep_alive()
    assert listener.backlog is not None
    listener.backlog.append(server)


class Waiter:
    """Wakes one thread when a socket changes."""

    def __init__(self, thread: Thread | None) -> None:
        assert thread is not None, "only a simulated thread can wait"
        self._thread = thread

    def socket_changed(self, sock: SimulatedSocket) -> None:
        kernel.wake(self._thread)


class Selector(selectors.BaseSelector):
    """The selector of an event loop."""

    def __init__(self) -> None:
        self._keys: dict[int, selectors.SelectorKey] = {}
        self._changed: dict[int, None] = {}
        self._thread: Thread | None = None
        self._is_interrupted = False

    def socket_changed(self, sock: SimulatedSocket) -> None:
        self._changed[sock.descriptor] = None
        if self._thread is not None:
            kernel.wake(self._thread)

    def interrupt(self) -> None:
        """End the current wait, or the next one."""
        self._is_interrupted = True
        if self._thread is not None:
            kernel.wake(self._thread)

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        sock = fileobj if isinstance(fileobj, SimulatedSocket) else _socket_of(fileobj)
        if sock.descriptor in self._keys:
            raise KeyError(f"{fileobj!r} is already registered")
        key = selectors.SelectorKey(sock, sock.descriptor, events, data)
        self._keys[sock.descriptor] = key
        self._changed[sock.descriptor] = None
        sock.watchers[self] = None
        return key

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        self.unregister(fileobj)
        return self.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        fileno = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        if fileno == -1:
            fileno = fileobj.descriptor
        key = self._keys.pop(fileno)
        self._changed.pop(fileno, None)
        key.fileobj.watchers.pop(self, None)  # type: ignore[union-attr]
        return key

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        fileno = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        if fileno < 0:
            raise ValueError(f"Invalid file descriptor: {fileno}")
        return self._keys[fileno]

    def get_map(self) -> Any:
        return self._keys

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._ready()
        if ready or self._is_interrupted or (timeout is not None and timeout <= 0):
            kernel.sleep(0.0)  # other threads have their turn
        else:
            self._thread = kernel.current
            try:
                kernel.block(timeout)
            finally:
                self._thread = None
            ready = self._ready()
        self._is_interrupted = False
        return ready

    def _ready(self) -> list[tuple[selectors.SelectorKey, int]]:
        ready = []
        for fileno in list(self._changed):
            key = self._keys[fileno]
            events = key.fileobj.events()  # type: ignore[union-attr]
            if not events & key.events:
                # Only a change makes it ready: until then it need not be checked.
                del self._changed[fileno]
            else:
                ready.append((key, events & key.events))
        return ready

    def close(self) -> None:
        for key in self._keys.values():
            key.fileobj.watchers.pop(self, None)  # type: ignore[union-attr]
        self._keys.clear()
        self._changed.clear()


def _socket_of(fileno: Any) -> SimulatedSocket:
    process = kernel.process
    assert process is not None
    if not isinstance(fileno, int):
        fileno = fileno.fileno()
    found = process.descriptors[fileno]
    assert isinstance(found, SimulatedSocket)
    return found


class Poll:
    """`select.poll`."""

    def __init__(self) -> None:
        self._sockets: dict[SimulatedSocket, int] = {}

    def register(self, fd: Any, eventmask: int = select.POLLIN | select.POLLOUT) -> None:
        self._sockets[fd if isinstance(fd, SimulatedSocket) else _socket_of(fd)] = eventmask

    def unregister(self, fd: Any) -> None:
        del self._sockets[fd if isinstance(fd, SimulatedSocket) else _socket_of(fd)]

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        deadline = None if timeout is None or timeout < 0 else kernel.now + timeout / 1000
        waiter = Waiter(kernel.current)
        while not (ready := self._ready()) and (deadline is None or kernel.now < deadline):
            for sock in self._sockets:
                sock.watchers[waiter] = None
            try:
                kernel.block(None if deadline is None else deadline - kernel.now)
            finally:
                for sock in self._sockets:
                    sock.watchers.pop(waiter, None)
        return ready

    def _ready(self) -> list[tuple[int, int]]:
        ready = []
        for sock, mask in self._sockets.items():
            events = sock.events()
            found = (select.POLLIN if events & selectors.EVENT_READ else 0) | (
                select.POLLOUT if events & selectors.EVENT_WRITE else 0
            )
            if sock.has_hung_up:
                found |= select.POLLRDHUP
            found &= mask
            if sock.error or sock.has_failed:
                found |= select.POLLERR | select.POLLHUP  # not a flag that callers request
            if found:
                ready.append((sock.descriptor, found))
        return ready


def _resolve(
    host: Any,
    port: Any,
    family: int = 0,
    type: int = 0,
    proto: int = 0,
    flags: int = 0,
) -> Sequence[Any]:
    """`socket.getaddrinfo`."""
    name = host.decode() if isinstance(host, bytes) else host
    number = int(port or 0)
    if name in (None, "", "0.0.0.0", "127.0.0.1", "localhost") or name[0].isdigit():
        addresses = ["127.0.0.1" if name in (None, "", "localhost") else name]
    elif name in network.names:
        known = network.names[name]
        addresses = known if isinstance(known, list) else known()
    else:
        addresses = []
    if not addresses:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return [
        (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, number))
        for address in addresses
    ]


kernel: Kernel
network: Network
RealSocket = socket.socket


def install(one: Network) -> None:
    """Replace the sockets of this process permanently."""
    global kernel, network
    kernel, network = one.kernel, one
    socket_: Any = socket
    socket_.socket = socket_.SocketType = SimulatedSocket
    socket_.getaddrinfo = _resolve
    socket_.gethostname = lambda: (
        "outside" if kernel.process is None else kernel.process.machine.name
    )
    select_: Any = select
    select_.poll = Poll
