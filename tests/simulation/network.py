"""Sockets between simulated processes, with a network that can be slow, cut or broken between them.

Bytes of a connection arrive in their order. What is sent on different connections overtakes each
other, what is sent at once may be received in pieces, and a socket takes only what fits.
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
from collections.abc import Iterable, Sequence
from typing import Any

from tests.simulation.kernel import Kernel, Machine, Process, Thread

FIRST_DESCRIPTOR = 1 << 20
BUFFER_BYTES = 1 << 18
"""What a connection holds in one direction: sent, and not received yet."""
CONNECT_TIMEOUT_S = 127.0
LOCAL_LATENCY_S = 20e-6
EPHEMERAL_PORTS = 32768

Address = Any


class Link:
    """How packets travel between two machines, in both directions.

    Attributes:
        latency_s: Least and largest time of a packet.
        bytes_per_s: How fast bytes follow each other.
        is_cut: Nothing arrives; what is underway waits until the cut is mended.
    """

    def __init__(self, latency_s: tuple[float, float], bytes_per_s: float) -> None:
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self.is_cut = False


class Network:
    """All machines, listeners and connections."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.machines: dict[str, Machine] = {}
        self.names: dict[str, list[str]] = {}
        """What the name service answers: addresses of a name."""
        self.listeners: dict[tuple[str, Any], SimulatedSocket] = {}
        self.connections: dict[Pipe, None] = {}
        self.piece_chance = 0.0
        """How often a read returns only a part of what has arrived."""
        self._links: dict[tuple[str, str], Link] = {}
        self._num_descriptors = 0
        self._num_ports = 0

    def add_machine(self, name: str) -> Machine:
        """Add a machine, which its name resolves to."""
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
            )
        return self._links[names]

    def cut(self, one: Machine, other: Machine) -> None:
        """Let nothing pass between two machines."""
        self.link(one, other).is_cut = True

    def mend(self, one: Machine, other: Machine) -> None:
        """Let packets pass again, those underway first."""
        self.link(one, other).is_cut = False
        for pipe in list(self.connections):
            if {pipe.source, pipe.target} == {one, other}:
                pipe.deliver_later()

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


class Pipe:
    """One direction of a connection."""

    def __init__(self, network: Network, source: Machine, target: Machine) -> None:
        self.network = network
        self.source = source
        self.target = target
        self.arrived = bytearray()
        self.descriptors: deque[list[int]] = deque()
        self.num_underway = 0
        self.has_ended = False
        self.is_reset = False
        self.reader: SimulatedSocket | None = None
        self.writer: SimulatedSocket | None = None
        self._underway: deque[tuple[float, bytes | None]] = deque()
        self._last_at = 0.0
        network.connections[self] = None

    @property
    def room(self) -> int:
        """Return how many bytes can be sent now."""
        return BUFFER_BYTES - self.num_underway - len(self.arrived)

    def send(self, data: bytes | None) -> None:
        """Send bytes, or None for the end of the stream."""
        kernel = self.network.kernel
        link = self.network.link(self.source, self.target)
        least, largest = link.latency_s
        at = kernel.now + least + (largest - least) * kernel.random.random()
        if data is not None:
            at += len(data) / link.bytes_per_s
            self.num_underway += len(data)
        self._last_at = max(self._last_at, at)
        self._underway.append((self._last_at, data))
        kernel.call_later(self._last_at - kernel.now, self._deliver)

    def deliver_later(self) -> None:
        """Look again at what is underway: a cut has been mended."""
        self.network.kernel.call_later(LOCAL_LATENCY_S, self._deliver)

    def _deliver(self) -> None:
        kernel = self.network.kernel
        if self.network.link(self.source, self.target).is_cut:
            return
        while self._underway and self._underway[0][0] <= kernel.now + 1e-9:
            _, data = self._underway.popleft()
            if data is None:
                self.has_ended = True
            else:
                self.num_underway -= len(data)
                if self.reader is None or self.reader.is_closed:
                    self.break_off()
                    return
                self.arrived += data
        if self.reader is not None:
            self.reader.changed()

    def take(self, num_bytes: int) -> bytes:
        """Receive what has arrived."""
        if self.network.piece_chance and num_bytes > 1:
            random = self.network.kernel.random
            if random.random() < self.network.piece_chance:
                num_bytes = random.randint(1, num_bytes)
        data = bytes(memoryview(self.arrived)[:num_bytes])
        del self.arrived[: len(data)]
        if self.writer is not None:
            self.writer.changed()
        return data

    def break_off(self) -> None:
        """Reset: both ends learn it at once, what is underway is lost."""
        self.is_reset = True
        self._underway.clear()
        self.num_underway = 0
        self.network.connections.pop(self, None)
        for end in (self.reader, self.writer):
            if end is not None:
                end.changed()


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
        self.family = socket.AddressFamily(family if family >= 0 else socket.AF_INET)
        self.type = socket.SocketKind(type & ~(socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK))
        self.proto = proto
        self.process: Process = process
        self.machine = process.machine
        self.is_closed = False
        self.name: Address = "" if self.family == socket.AF_UNIX else ("0.0.0.0", 0)
        self.peer: Address = None
        self.error = 0
        self.backlog: deque[SimulatedSocket] | None = None
        self.watchers: dict[Any, None] = {}
        self.incoming: Pipe | None = None
        self.outgoing: Pipe | None = None
        self._timeout_s: float | None = None
        self._is_connecting = False
        self._has_sent_end = False
        self._backlog_size = 0
        self._key: Any = None
        self._fileno = network.next_descriptor()
        self._process_other: Process | None = None
        process.descriptors[self._fileno] = self

    # --- What others learn -----------------------------------------------------------------------

    def changed(self) -> None:
        """Tell everyone who waits for this socket to look again."""
        for watcher in list(self.watchers):
            watcher.socket_changed(self)

    def events(self) -> int:
        """Return what it is ready for."""
        if self.backlog is not None:
            return selectors.EVENT_READ if self.backlog else 0
        if self._is_connecting:
            return 0
        incoming, outgoing = self.incoming, self.outgoing
        if incoming is None or outgoing is None or self.error:
            return selectors.EVENT_READ | selectors.EVENT_WRITE
        mask = 0
        if incoming.arrived or incoming.has_ended or incoming.is_reset or outgoing.is_reset:
            mask |= selectors.EVENT_READ
        if outgoing.room > 0 or outgoing.is_reset:
            mask |= selectors.EVENT_WRITE
        return mask

    @property
    def has_hung_up(self) -> bool:
        """Whether the other end has closed (POLLRDHUP)."""
        return self.incoming is not None and (
            self.incoming.has_ended or self.incoming.is_reset or bool(self.error)
        )

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
                node.bind(self._key)  # leaves the entry of the directory
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
        self._backlog_size = max(backlog, 1)
        network.listeners[self.machine.name, self._key] = self

    def accept(self) -> tuple[SimulatedSocket, Address]:
        self._await(selectors.EVENT_READ)
        assert self.backlog is not None
        if len(self.process.descriptors) >= self.process.max_descriptors:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        accepted = self.backlog.popleft()
        accepted._fileno = network.next_descriptor()
        accepted.process.descriptors[accepted._fileno] = accepted
        return accepted, accepted.peer

    def connect(self, address: Address) -> None:
        if self.outgoing is not None:
            raise OSError(errno.EISCONN, os.strerror(errno.EISCONN))
        if self.family == socket.AF_UNIX:
            address = os.fspath(address)
            if not os.path.lexists(address):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        machine, key = network.listener(self.machine, address)
        self.peer = address
        if self.family != socket.AF_UNIX:
            self.name = (self.machine.address, network.next_port())
        self._is_connecting = True
        link = network.link(self.machine, machine)
        largest = link.latency_s[1]
        kernel.call_later(largest, lambda: self._reach(machine, key, link, 0.0))
        if self._timeout_s == 0.0:
            raise BlockingIOError(errno.EINPROGRESS, os.strerror(errno.EINPROGRESS))
        self._await(selectors.EVENT_READ | selectors.EVENT_WRITE)
        if self.error:
            number, self.error = self.error, 0
            raise OSError(number, os.strerror(number))

    def connect_ex(self, address: Address) -> int:
        try:
            self.connect(address)
        except OSError as exc:
            return exc.errno or errno.EIO
        return 0

    def _reach(self, machine: Machine, key: Any, link: Link, waited_s: float) -> None:
        """Connect to what listens there; packets are sent again while nothing answers."""
        if self.is_closed:
            return
        listener = network.listeners.get((machine.name, key))
        if link.is_cut and waited_s < CONNECT_TIMEOUT_S:
            again_s = max(1.0, waited_s)
            kernel.call_later(again_s, lambda: self._reach(machine, key, link, waited_s + again_s))
            return
        self._is_connecting = False
        if link.is_cut:
            self.error = errno.ETIMEDOUT
        elif listener is None or listener.backlog is None:
            self.error = errno.ECONNREFUSED
        elif len(listener.backlog) >= listener._backlog_size:
            self._is_connecting = True
            kernel.call_later(1.0, lambda: self._reach(machine, key, link, waited_s + 1.0))
            return
        else:
            connect(self, listener)
            listener.changed()
        self.changed()

    # --- Bytes -----------------------------------------------------------------------------------

    def _receive(self, num_bytes: int) -> bytes:
        while True:
            incoming = self.incoming
            if self.error:
                number, self.error = self.error, 0
                raise OSError(number, os.strerror(number))
            if incoming is None:
                raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
            if incoming.arrived:
                return incoming.take(num_bytes)
            if incoming.has_ended:
                return b""
            if incoming.is_reset:
                raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
            self._await(selectors.EVENT_READ)
            if self.is_closed:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    def recv(self, num_bytes: int, flags: int = 0) -> bytes:
        assert not flags
        return self._receive(num_bytes)

    def recv_into(self, buffer: Any, num_bytes: int = 0, flags: int = 0) -> int:
        view = memoryview(buffer).cast("B")
        data = self._receive(num_bytes or len(view))
        view[: len(data)] = data
        return len(data)

    def send(self, data: Any, flags: int = 0) -> int:
        view = memoryview(data).cast("B")
        while True:
            outgoing = self.outgoing
            if outgoing is None:
                raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
            if outgoing.is_reset or self._has_sent_end:
                raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
            if not view:
                return 0
            if (room := outgoing.room) > 0:
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
        if self.outgoing is None:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        if how in (socket.SHUT_WR, socket.SHUT_RDWR) and not self._has_sent_end:
            self._has_sent_end = True
            if not self.outgoing.is_reset:
                self.outgoing.send(None)
        if how in (socket.SHUT_RD, socket.SHUT_RDWR):
            assert self.incoming is not None
            self.incoming.has_ended = True
            self.changed()

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self.process.descriptors.pop(self._fileno, None)
        if self._key is not None:
            mine = network.listeners.get((self.machine.name, self._key))
            if mine is self:
                del network.listeners[self.machine.name, self._key]
            for waiting in self.backlog or ():
                waiting.close()
        if self.outgoing is not None and self.incoming is not None:
            if self.incoming.arrived:
                self.outgoing.break_off()
            elif not self._has_sent_end and not self.outgoing.is_reset:
                self.outgoing.send(None)
            network.connections.pop(self.incoming, None)
        self.changed()

    def detach(self) -> int:
        raise NotImplementedError("detach")

    # --- Options ---------------------------------------------------------------------------------

    def fileno(self) -> int:
        return -1 if self.is_closed else self._fileno

    def setblocking(self, flag: bool) -> None:
        self._timeout_s = None if flag else 0.0

    def getblocking(self) -> bool:
        return self._timeout_s != 0.0

    def settimeout(self, seconds: float | None) -> None:
        self._timeout_s = seconds

    def gettimeout(self) -> float | None:
        return self._timeout_s

    def setsockopt(self, *_: Any) -> None:
        pass

    def getsockopt(self, level: int, option: int, size: int = 0) -> Any:
        if (level, option) == (socket.SOL_SOCKET, socket.SO_ERROR):
            number, self.error = self.error, 0
            return number
        if (level, option) == (socket.SOL_SOCKET, socket.SO_PEERCRED):
            pid = 0 if self._process_other is None else self._process_other.pid
            return struct.pack("3i", pid, os.getuid(), os.getgid())
        return 0

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
    server.__dict__.update(
        family=listener.family,
        type=listener.type,
        proto=listener.proto,
        process=listener.process,
        machine=listener.machine,
        is_closed=False,
        name=listener.name if listener.family == socket.AF_UNIX else client.peer,
        peer="" if listener.family == socket.AF_UNIX else client.name,
        error=0,
        backlog=None,
        watchers={},
        _timeout_s=None,
        _is_connecting=False,
        _has_sent_end=False,
        _backlog_size=0,
        _key=None,
        _fileno=-1,
        _process_other=client.process,
    )
    client._process_other = listener.process
    there = Pipe(network, client.machine, listener.machine)
    back = Pipe(network, listener.machine, client.machine)
    client.outgoing, client.incoming = there, back
    server.outgoing, server.incoming = back, there
    there.writer, there.reader = client, server
    back.writer, back.reader = server, client
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
    """What an event loop waits with."""

    def __init__(self) -> None:
        self._keys: dict[int, selectors.SelectorKey] = {}
        self._changed: dict[int, None] = {}
        self._thread: Thread | None = None
        self._is_interrupted = False

    def socket_changed(self, sock: SimulatedSocket) -> None:
        self._changed[sock._fileno] = None
        if self._thread is not None:
            kernel.wake(self._thread)

    def interrupt(self) -> None:
        """End the wait that is underway, or the next one."""
        self._is_interrupted = True
        if self._thread is not None:
            kernel.wake(self._thread)

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        sock = fileobj if isinstance(fileobj, SimulatedSocket) else _socket_of(fileobj)
        if sock._fileno in self._keys:
            raise KeyError(f"{fileobj!r} is already registered")
        key = selectors.SelectorKey(sock, sock._fileno, events, data)
        self._keys[sock._fileno] = key
        self._changed[sock._fileno] = None
        sock.watchers[self] = None
        return key

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        self.unregister(fileobj)
        return self.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        fileno = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        if fileno == -1:
            fileno = fileobj._fileno
        key = self._keys.pop(fileno)
        self._changed.pop(fileno, None)
        key.fileobj.watchers.pop(self, None)  # type: ignore[union-attr]
        return key

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        fileno = fileobj if isinstance(fileobj, int) else fileobj.fileno()
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
                # Only a change makes it ready: until then it need not be looked at.
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

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        deadline = None if timeout is None else kernel.now + timeout / 1000
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
            if found & mask:
                ready.append((sock._fileno, found & mask))
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
        addresses = network.names[name]
    else:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return [
        (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, number))
        for address in addresses
    ]


kernel: Kernel
network: Network
RealSocket = socket.socket


def install(one: Network) -> None:
    """Replace the sockets of this process, for good."""
    global kernel, network
    kernel, network = one.kernel, one
    socket_: Any = socket
    socket_.socket = socket_.SocketType = SimulatedSocket
    socket_.getaddrinfo = _resolve
    socket_.gethostname = lambda: (
        "outside" if kernel.process is None else kernel.process.machine.name
    )
    select.poll = Poll  # type: ignore[assignment]
