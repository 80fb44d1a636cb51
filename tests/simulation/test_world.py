"""The simulated machine room: time, threads, sockets, disks and signals behave as real ones do.

Installing it is permanent, so each test runs its checks in a separate process: this module, with
the name of a check.
"""

# Calls of `os` are what is checked.
# ruff: noqa: PTH101, PTH102, PTH103, PTH104, PTH105, PTH106, PTH107, PTH108, PTH115, PTH116
# ruff: noqa: PTH123, PTH208, PTH211

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SIGNAL_KILL, SIGNAL_STOP, SIGNAL_TERM = 9, 19, 15


def run_check(name: str, place: Path, seed: int = 1) -> str:
    """Run a check in its own process; return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation.test_world", name, str(place), str(seed)],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Room:
    """A machine room for checks.

    Args:
        place: Directory of its machines' files.
        seed: Decides everything.
    """

    def __init__(self, place: Path, seed: int) -> None:
        from tests.simulation import disk, network, threads
        from tests.simulation.kernel import Kernel

        self.kernel = Kernel(seed)
        self.kernel.log_lines = []
        threads.install(self.kernel)
        self.network = network.Network(self.kernel)
        network.install(self.network)
        self.files = disk.Files(self.kernel, place / "room")
        disk.install(self.files)
        self.one, self.other = self.machine("one"), self.machine("other")
        self.disk = self.files.disks["one"]
        self.folder = self.files.root / "one" / "disk"

    def machine(self, name: str) -> Any:
        """Add a machine."""
        machine = self.network.add_machine(name)
        self.files.add_machine(machine)
        return machine

    def start(self, machine: Any, main: Callable[[], object]) -> Any:
        """Start a process."""

        def run() -> int:
            main()
            return 0

        return self.kernel.start_process(getattr(main, "__name__", "process"), machine, run)

    def run(self, *mains: Callable[[], object], seconds: float = 3600.0) -> None:
        """Run processes until all have ended: the first on machine one, the others on the other.

        Raises:
            AssertionError: One has failed.
        """
        processes = [
            self.start(self.other if number else self.one, main)
            for number, main in enumerate(mains)
        ]

        def wait() -> None:
            for process in processes:
                self.kernel.wait_process(process, seconds)
            self.kernel.stop()

        self.start(self.other, wait)
        self.kernel.run(self.kernel.now + seconds)
        codes = {process.exit_code for process in processes}
        assert codes == {0}, (codes, *(self.kernel.log_lines or ())[-9:])


@contextmanager
def raises(number: int) -> Iterator[None]:
    """Expect an `OSError` of that number."""
    found: int | None = None
    try:
        yield
    except OSError as exc:
        found = exc.errno
    assert found == number, f"{found}, not {number}"


@contextmanager
def fails(kind: type[BaseException], otherwise: str) -> Iterator[None]:
    """Expect an error of that kind; `otherwise` says what it means that none comes."""
    try:
        yield
    except kind:
        return
    raise AssertionError(otherwise)


# --- Kernel --------------------------------------------------------------------------------------


def check_time(room: Room) -> None:
    import threading
    import time

    def sleepers() -> None:
        woken: list[int] = []

        def sleep(number: int) -> None:
            time.sleep(number)
            woken.append(number)

        threads = [threading.Thread(target=sleep, args=(number,)) for number in (5, 1, 4, 2, 3)]
        begin, began = time.monotonic(), time.time()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert woken == [1, 2, 3, 4, 5], woken
        assert 5 <= time.monotonic() - begin < 5.1
        assert 5 <= time.time() - began < 5.1

    def fair_lock() -> None:
        lock, got = threading.Lock(), []

        def take(number: int) -> None:
            time.sleep(0.1 * number)  # they come one after the other
            with lock:
                got.append(number)

        with lock:
            threads = [threading.Thread(target=take, args=(n,)) for n in range(5)]
            for thread in threads:
                thread.start()
            time.sleep(1)
        for thread in threads:
            thread.join()
        assert got == [0, 1, 2, 3, 4], got

    def deadlines() -> None:
        lock, event, condition = threading.Lock(), threading.Event(), threading.Condition()
        lock.acquire()
        begin = time.monotonic()
        assert not lock.acquire(timeout=2.0)
        assert 2 <= time.monotonic() - begin < 2.01
        assert not lock.acquire(blocking=False)
        assert not event.wait(3.0)
        with condition:
            assert not condition.wait(4.0)
        assert 9 <= time.monotonic() - begin < 9.01
        sleeper = threading.Thread(target=time.sleep, args=(10,))
        sleeper.start()
        sleeper.join(1.0)
        assert sleeper.is_alive()
        room.kernel.call_later(1.0, event.set)
        assert event.wait(5.0)
        assert 11 <= time.monotonic() - begin < 11.01

    def wall_clock() -> None:
        begin, mono = time.time(), time.monotonic()
        room.one.wall_offset_s -= 3600
        assert -3600 <= time.time() - begin < -3599
        assert time.monotonic() - mono < 0.1

    for main in (sleepers, fair_lock, deadlines, wall_clock):
        room.run(main)


def check_digest(room: Room) -> None:
    import random
    import threading
    import time

    def race() -> None:
        def step(number: int) -> None:
            for _ in range(5):
                time.sleep(random.random())
                drawn = random.Random().random(), random.SystemRandom().random()
                room.kernel.record(f"step {number} {os.urandom(2).hex()} {drawn}")

        threads = [threading.Thread(target=step, args=(n,)) for n in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    room.run(race)
    print(room.kernel.digest)


def check_kills(room: Room) -> None:
    import random
    import threading
    import time

    done: list[object] = []

    def victim() -> None:
        def work() -> None:
            lock = threading.Lock()
            try:
                while True:
                    with lock:
                        time.sleep(0.001)
                    (room.folder / "file").write_bytes(b"data")
                    done.append(room.kernel.process)
            finally:
                done.append("finally")

        for _ in range(3):
            threading.Thread(target=work).start()
        work()

    def killer() -> None:
        dice = random.Random(room.kernel.seed)
        for number in range(20):
            process = room.start(room.one, victim)
            time.sleep(dice.uniform(0, 0.02))
            if number % 2:
                process.is_paused = True
                time.sleep(0.01)
                before = len(done)
                time.sleep(1)
                assert len(done) == before, "a stopped process went on"
            room.kernel.end_process(process, -SIGNAL_KILL)
            before = len(done)
            process.resume()
            time.sleep(0.1)
            assert len(done) == before, "a dead process went on"
            assert room.kernel.wait_process(process) == -SIGNAL_KILL
            assert not process.descriptors
        assert done
        assert "finally" not in done

    room.run(lambda: None, killer)

    def by_itself() -> None:
        def end() -> None:
            os._exit(7)

        threading.Thread(target=end).start()
        try:
            time.sleep(100)
        finally:
            done.append("finally")

    process = room.start(room.one, by_itself)
    room.kernel.run(room.kernel.now + 200)
    assert process.exit_code == 7
    assert "finally" not in done


# --- Sockets -------------------------------------------------------------------------------------

PORT = 9000


def listening(port: int = PORT, backlog: int = 16) -> Any:
    import socket

    listener = socket.socket()
    listener.bind(("0.0.0.0", port))
    listener.listen(backlog)
    return listener


def connected(room: Room, port: int = PORT, timeout_s: float | None = None) -> Any:
    import socket
    import time

    time.sleep(0.01)  # it listens by then
    client = socket.socket()
    client.settimeout(timeout_s)
    client.connect((room.one.address, port))
    return client


def received(sock: Any) -> bytes:
    """Return everything until the end of the stream."""
    data = b""
    while piece := sock.recv(100_000):
        data += piece
    return data


def check_sockets(room: Room) -> None:
    import select
    import socket
    import time

    from tests.simulation.network import BUFFER_BYTES, Selector

    content = bytes(range(256)) * 4000

    def serve_content() -> None:
        peer, address = listening().accept()
        assert address[0] == room.other.address
        peer.sendall(content)
        peer.close()

    def read_content() -> None:
        client = connected(room)
        assert received(client) == content
        assert client.recv(1) == b""

    def read_pieces() -> None:
        room.network.piece_chance = 0.5
        sizes = set()
        client, data = connected(room), b""
        while piece := client.recv(4096):
            sizes.add(len(piece))
            data += piece
        assert data == content
        assert len(sizes) > 10
        room.network.piece_chance = 0.0

    def serve_slowly() -> None:
        peer, _ = listening().accept()
        time.sleep(10)
        assert len(received(peer)) == 4 * BUFFER_BYTES

    def send_fast() -> None:
        client, begin = connected(room), time.monotonic()
        client.setblocking(False)
        assert client.send(bytes(4 * BUFFER_BYTES)) == BUFFER_BYTES
        with raises(errno.EAGAIN):
            client.send(b"more")
        client.settimeout(2)
        with fails(TimeoutError, "the buffer has room"):
            client.send(b"more")
        assert 2 <= time.monotonic() - begin < 2.1
        client.settimeout(None)
        client.sendall(bytes(3 * BUFFER_BYTES))
        assert time.monotonic() - begin > 9
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""

    def serve_reset() -> None:
        peer, _ = listening().accept()
        peer.sendall(b"bye")
        time.sleep(1)  # something has arrived that is not read
        peer.close()

    def be_reset() -> None:
        client = connected(room)
        client.sendall(b"unread")
        time.sleep(2)
        assert client.recv(100) == b"bye"
        with raises(errno.ECONNRESET):
            client.recv(100)
        assert client.recv(100) == b""
        with raises(errno.EPIPE):
            client.send(b"x")

    def serve_two() -> None:
        listener = listening()
        selector = Selector()
        selector.register(listener, 1)
        peers: list[Any] = []
        while len(peers) < 2:
            assert selector.select(60), "nothing has come"
            peers.append(listener.accept()[0])
        for peer in peers:
            selector.register(peer, 1, "peer")
        begin = time.monotonic()
        assert selector.select(5) == []
        assert 5 <= time.monotonic() - begin < 5.1
        got: list[bytes] = []
        while len(got) < 2:
            for key, _ in selector.select(60):
                if key.data:
                    got.append(key.fileobj.recv(10))  # type: ignore[union-attr]
        assert got == [b"late", b"later"], got
        assert {mask for key, mask in selector.select(60) if key.data} == {1}  # the ends
        peers[0].close()

    def poll_two() -> None:
        clients = [connected(room), connected(room)]
        poll = select.poll()
        poll.register(clients[0], select.POLLIN | select.POLLRDHUP)
        assert poll.poll(0) == []
        time.sleep(7)
        clients[1].send(b"late")
        time.sleep(1)
        clients[0].send(b"later")
        clients[0].shutdown(socket.SHUT_WR)
        [(fileno, events)] = poll.poll(10_000)
        assert fileno == clients[0].fileno()
        assert events == select.POLLIN | select.POLLRDHUP
        poll.unregister(clients[0])
        assert poll.poll(1000) == []

    for pair in (
        (serve_content, read_content),
        (serve_content, read_pieces),
        (serve_slowly, send_fast),
        (serve_reset, be_reset),
        (serve_two, poll_two),
    ):
        room.run(*pair)

    def refusals() -> None:
        with raises(errno.ECONNREFUSED):
            socket.create_connection((room.other.address, 1))
        with raises(errno.EHOSTUNREACH):
            socket.create_connection(("10.9.9.9", 1))
        with fails(socket.gaierror, "an unknown name was found"):
            socket.create_connection(("no-such-host", 1))
        process = room.kernel.process
        assert process is not None
        process.max_descriptors = 1
        listener = listening(PORT + 1, 1)
        with raises(errno.EMFILE):
            socket.socket()
        process.max_descriptors = 2
        client = socket.create_connection(("127.0.0.1", PORT + 1))
        with raises(errno.EMFILE):
            listener.accept()
        process.max_descriptors = 4
        waiting = socket.socket()  # does not fit into the backlog
        waiting.settimeout(5)
        with fails(TimeoutError, "the backlog is full"):
            waiting.connect(("127.0.0.1", PORT + 1))
        waiting.close()
        listener.accept()[0].close()
        assert client.recv(1) == b""
        path = str(room.files.root / "one" / "run" / "socket")
        near = socket.socket(socket.AF_UNIX)
        with raises(errno.ENOENT):
            near.connect(path)
        client.close()
        here = socket.socket(socket.AF_UNIX)
        here.bind(path)
        with raises(errno.ECONNREFUSED):
            near.connect(path)
        here.listen(1)
        near.connect(path)
        near.setblocking(False)
        room.network.local_buffer_bytes = 500
        assert near.send(bytes(BUFFER_BYTES)) == 500
        with raises(errno.EAGAIN):
            near.send(b"more")
        room.network.local_buffer_bytes = BUFFER_BYTES
        near.setblocking(True)
        process.max_descriptors = 9
        more = socket.socket(socket.AF_UNIX)
        more.settimeout(1)
        with raises(errno.EAGAIN):
            more.connect(path)
        here.close()  # with a connection that was not accepted
        with raises(errno.ECONNRESET):
            near.recv(1)

    room.run(refusals)


def check_cuts(room: Room) -> None:
    import socket
    import time

    from tests.simulation.network import BUFFER_BYTES

    now = time.monotonic

    def echo() -> None:
        peer, _ = listening().accept()
        while data := peer.recv(100_000):
            peer.sendall(data)

    def cut_and_mend() -> None:
        client = connected(room)
        room.network.cut(room.one, room.other)
        client.sendall(b"through")
        client.settimeout(5)
        with fails(TimeoutError, "it passed the cut"):
            client.recv(10)
        mended = now()
        room.network.mend(room.one, room.other)
        client.settimeout(None)
        assert client.recv(10) == b"through"
        assert 0.5 < now() - mended < 6, "it is sent again after pauses that double"
        client.settimeout(100)
        begin = now()
        client.sendall(b"at once")
        assert client.recv(10) == b"at once"
        assert now() - begin < 0.1
        client.close()

    def one_way() -> None:
        client = connected(room)
        room.network.cut_one_way(room.one, room.other)  # answers and acknowledgements are lost
        client.settimeout(1)
        client.sendall(b"heard")
        with fails(TimeoutError, "it passed the cut"):
            client.recv(10)
        with fails(TimeoutError, "nothing is acknowledged"):
            client.sendall(bytes(2 * BUFFER_BYTES))
        room.network.mend(room.one, room.other)
        client.settimeout(10)
        assert client.recv(5) == b"heard"
        client.close()

    def connect_over_cut() -> None:
        room.network.cut(room.one, room.other)
        begin = now()
        with raises(errno.ETIMEDOUT):
            connected(room)
        assert 127 <= now() - begin < 128
        room.kernel.call_later(4.0, lambda: room.network.mend(room.one, room.other))
        begin = now()
        connected(room).close()
        assert 6 < now() - begin < 8, "the fourth try, after 7 seconds"

    def lossy() -> None:
        link = room.network.link(room.one, room.other)
        link.loss = 0.2
        client, waits = connected(room), []
        for number in range(50):
            begin = now()
            client.sendall(b"%04d" % number)
            data = b""
            while len(data) < 4:
                data += client.recv(4 - len(data))
            assert data == b"%04d" % number
            waits.append(now() - begin)
        link.loss = 0.0
        waits.sort()
        assert waits[10] < 0.01
        assert waits[-1] > 0.19, "lost packets are sent again after 200 ms"
        client.close()

    def user_timeout() -> None:
        client = connected(room)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000)
        room.network.cut(room.one, room.other)
        begin = now()
        client.sendall(b"lost")
        with raises(errno.ETIMEDOUT):
            client.recv(1)
        assert 20 <= now() - begin < 60
        room.network.mend(room.one, room.other)

    for client in (cut_and_mend, one_way, connect_over_cut, lossy, user_timeout):
        server = room.start(room.one, echo)
        room.run(lambda: None, client)
        room.kernel.end_process(server, -SIGNAL_KILL)


def check_power(room: Room) -> None:
    import socket
    import time

    from tests.simulation.network import BUFFER_BYTES

    now = time.monotonic

    def serve() -> None:
        listener = listening()
        peers = []
        while True:
            peers.append(listener.accept()[0])
            peers[-1].sendall(b"hello")

    def lose_power(processes: list[Any]) -> None:
        for process in processes:
            room.kernel.end_process(process, -SIGNAL_KILL)
        room.network.lose_power(room.one)
        room.files.lose_power(room.one)

    def watch() -> None:
        server = room.start(room.one, serve)
        silent, talking, alive = (connected(room) for _ in range(3))
        for client in (silent, talking, alive):
            assert client.recv(5) == b"hello"
        alive.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        alive.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        alive.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15)
        alive.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        time.sleep(500)
        begin = now()
        lose_power([server])
        with raises(errno.ETIMEDOUT):
            alive.recv(1)
        assert 60 <= now() - begin <= 181
        silent.settimeout(100)
        with fails(TimeoutError, "a machine without power has ended a connection"):
            silent.recv(1)
        talking.setblocking(False)
        assert talking.send(bytes(2 * BUFFER_BYTES)) == BUFFER_BYTES
        with raises(errno.EAGAIN):
            talking.send(b"x")
        begin = now()
        with raises(errno.ETIMEDOUT):
            connected(room)
        assert now() - begin > 126
        room.network.restore(room.one)
        begin = now()
        with raises(errno.ECONNREFUSED):
            connected(room)
        assert now() - begin < 1
        server = room.start(room.one, serve)
        talking.settimeout(200)
        with raises(errno.ECONNRESET):
            talking.recv(1)
        with fails(TimeoutError, "nothing was sent that could be refused"):
            silent.recv(1)
        silent.send(b"?")
        with raises(errno.ECONNRESET):
            silent.recv(1)
        # The peers of a killed process are notified at once.
        client = connected(room)
        assert client.recv(5) == b"hello"
        room.kernel.end_process(server, -SIGNAL_KILL)
        begin = now()
        assert client.recv(1) == b""
        assert now() - begin < 0.1
        server = room.start(room.one, serve)
        client = connected(room)
        assert client.recv(5) == b"hello"
        room.network.lose_power(room.one)  # first the power, then the processes
        room.kernel.end_process(server, -SIGNAL_KILL)
        client.settimeout(100)
        with fails(TimeoutError, "a machine without power has ended a connection"):
            client.recv(1)

    room.run(lambda: None, watch)


def check_streams(room: Room) -> None:
    import asyncio

    from tests.simulation import loop

    loop.install()

    async def serve() -> None:
        ended = asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while line := await reader.readline():
                if line == b"end\n":
                    ended.set()
                if line == b"sleep\n":
                    await asyncio.sleep(100)
                writer.write(line.upper() * 1000)
                await writer.drain()
            writer.close()

        async with await asyncio.start_server(answer, "0.0.0.0", PORT):
            await ended.wait()
            await asyncio.sleep(60)  # until the connections have ended

    async def ask(word: bytes) -> None:
        reader, writer = await asyncio.open_connection("one", PORT)
        for _ in range(3):
            writer.write(word + b"\n")
            await writer.drain()
            assert await reader.readexactly(1000 * (len(word) + 1)) == (word.upper() + b"\n") * 1000
        writer.close()
        await writer.wait_closed()

    async def ask_all() -> None:
        await asyncio.sleep(0.1)
        await asyncio.gather(*(ask(b"word-%d" % number) for number in range(20)))
        reader, writer = await asyncio.open_connection("one", PORT)
        writer.write(b"sleep\n")
        clock = asyncio.get_running_loop().time
        begin = clock()
        with fails(TimeoutError, "it answered in its sleep"):
            async with asyncio.timeout(7):
                await reader.readline()
        assert 7 <= clock() - begin < 7.1
        await asyncio.sleep(100)
        writer.close()
        assert await asyncio.to_thread(lambda: 42) == 42
        reader, writer = await asyncio.open_connection("one", PORT)
        room.network.cut(room.one, room.other)
        writer.write(b"end\n")
        with fails(TimeoutError, "it passed the cut"):
            async with asyncio.timeout(3):
                await reader.readline()
        room.network.mend(room.one, room.other)
        assert await reader.readline() == b"END\n"
        writer.close()
        with fails(ConnectionRefusedError, "nothing listens there"):
            await asyncio.open_connection("one", PORT + 1)

    room.run(lambda: asyncio.run(serve()), lambda: asyncio.run(ask_all()), seconds=300)


# --- Disks ---------------------------------------------------------------------------------------


def sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.close(fd)


def write(path: Path, data: bytes, is_synced: bool) -> None:
    with path.open("wb") as file:
        file.write(data)
        if is_synced:
            file.flush()
            os.fsync(file.fileno())


def check_power_of_disk(room: Room) -> None:
    import shutil
    import time

    folder = room.folder
    old, new = b"o" * 5000, b"n" * 6000
    outcomes: dict[str, set[bytes | None]] = {}

    def prepare() -> None:
        for name in ("replaced", "removed", "grown", "changed"):
            write(folder / name, old, True)
        (folder / "below").mkdir()
        sync_folder(folder)
        write(folder / "synced", new, True)
        sync_folder(folder)
        write(folder / "unsynced", new, False)
        write(folder / "part", new, True)
        (folder / "part").replace(folder / "replaced")
        (folder / "removed").unlink()
        with (folder / "grown").open("ab") as file:
            file.write(new)
        with (folder / "changed").open("r+b") as file:
            file.write(new)
        write(folder / "below" / "file", new, True)

    def look(name: str) -> bytes | None:
        path = folder / name
        found = path.read_bytes() if path.exists() else None
        outcomes.setdefault(name, set()).add(found)
        return found

    for _ in range(40):
        room.run(prepare)
        room.files.lose_power(room.one)
        assert look("synced") == new, "what was synced is there"
        for name in ("unsynced", "below/file"):
            found = look(name)
            assert found is None or set(found) <= set(new + b"\0")
        assert look("replaced") in (old, new), "a rename is done or not done"
        assert look("removed") in (old, None)
        grown = look("grown")
        assert grown is not None
        assert grown.startswith(old), "what was synced before is not torn"
        assert set(grown[len(old) :]) <= set(b"n\0")
        changed = look("changed")
        assert changed is not None
        for at in range(0, len(changed), 512):
            assert len(set(changed[at : at + 512]) - {0}) <= 1, "sectors are written whole"
        for name in os.listdir(folder):
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        room.disk.sync_all()
    assert {old, new} <= outcomes["replaced"]
    assert {old, None} == outcomes["removed"]
    assert {new, None} <= outcomes["below/file"]
    for name in ("unsynced", "grown", "changed"):
        assert len(outcomes[name]) > 5, (name, len(outcomes[name]))

    def leave() -> None:
        write(folder / "old", old, False)
        time.sleep(31)
        room.disk.error_chance = 1.0
        with raises(errno.EIO):
            os.stat(folder)
        room.disk.heal()

    room.run(leave)
    room.files.lose_power(room.one)
    assert (folder / "old").read_bytes() == old, "it is written back after a while"

    def fail_to_sync() -> None:
        fd = os.open(folder / "failed", os.O_WRONLY | os.O_CREAT)
        os.write(fd, old)
        room.disk.error_chance = 1.0
        with raises(errno.EIO):
            os.fsync(fd)
        room.disk.heal()
        os.fsync(fd)  # says that all is well
        sync_folder(folder)

    lost = 0
    for _ in range(20):
        room.run(fail_to_sync)
        room.files.lose_power(room.one)
        lost += (folder / "failed").read_bytes() != old
        (folder / "failed").unlink()
    assert lost, "a sync after a failed one does not write what that lost"

    # The power is cut after each operation in turn.
    seen = set()
    for number in range(1, 40):

        def work() -> None:
            write(folder / "data.part", new, True)
            (folder / "data.part").replace(folder / "data")
            sync_folder(folder)
            room.disk.crash_in(1 << 30, lambda: None)

        process = room.start(room.one, work)

        def cut(process: Any = process) -> None:
            room.network.lose_power(room.one)
            room.kernel.end_process(process, -SIGNAL_KILL)
            room.files.lose_power(room.one)

        room.disk.crash_in(number, cut)
        room.kernel.run(room.kernel.now + 10)
        room.network.restore(room.one)
        found = (folder / "data").read_bytes() if (folder / "data").exists() else None
        assert found in (None, new)
        seen.add((process.exit_code, found is None))
        for path in folder.iterdir():
            path.unlink()
        if process.exit_code == 0:
            break
    assert seen >= {(-SIGNAL_KILL, True), (0, False)}, seen


def check_disk_faults(room: Room) -> None:
    import shutil
    import stat
    import time

    folder, disk = room.folder, room.disk
    now = time.monotonic

    def every_call() -> None:
        """Every call that reaches the disk takes time and may fail."""
        path, other = folder / "file", folder / "other"
        path.write_bytes(bytes(3000))
        (folder / "dir").mkdir()
        rw = os.open(path, os.O_RDWR)
        target = os.open(other, os.O_RDWR | os.O_CREAT)
        dir_fd = os.open(folder, os.O_RDONLY)
        calls: list[Callable[[], object]] = [
            lambda: os.open(path, os.O_RDONLY),
            lambda: os.open("file", os.O_RDONLY, dir_fd=dir_fd),
            lambda: path.open("rb"),
            lambda: open(path),  # noqa: SIM115
            lambda: path.read_bytes(),
            lambda: path.write_text("x"),
            lambda: os.read(rw, 1),
            lambda: os.readv(rw, [bytearray(1)]),
            lambda: os.pread(rw, 1, 0),
            lambda: os.preadv(rw, [bytearray(1)], 0),
            lambda: os.write(rw, b"x"),
            lambda: os.writev(rw, [b"x", b"y"]),
            lambda: os.pwrite(rw, b"x", 0),
            lambda: os.pwritev(rw, [b"x"], 0),
            lambda: os.sendfile(target, rw, 0, 10),
            lambda: os.copy_file_range(rw, target, 10, 0, 0),
            lambda: os.fsync(rw),
            lambda: os.fdatasync(rw),
            lambda: os.sync(),
            lambda: os.truncate(path, 5000),
            lambda: os.ftruncate(rw, 5000),
            lambda: os.posix_fallocate(rw, 0, 100),
            lambda: os.fstat(rw),
            lambda: os.fchmod(rw, 0o600),
            lambda: os.chmod(path, 0o600),
            lambda: os.utime(path),
            lambda: os.access(path, os.R_OK),
            lambda: os.stat(path),
            lambda: os.stat("file", dir_fd=dir_fd),
            lambda: os.lstat(path),
            lambda: os.statvfs(folder),
            lambda: os.listdir(folder),
            lambda: os.listdir(dir_fd),
            lambda: os.scandir(folder),
            lambda: next(iter(folder.glob("f*"))),
            lambda: path.touch(),
            lambda: os.link(path, folder / "link"),
            lambda: os.symlink(path, folder / "symlink"),
            lambda: os.readlink(folder / "symlink"),
            lambda: os.rename(folder / "link", folder / "renamed"),
            lambda: os.replace(folder / "renamed", folder / "link"),
            lambda: os.unlink(folder / "link"),
            lambda: os.remove(folder / "symlink"),
            lambda: os.mkdir(folder / "dir" / "a"),
            lambda: os.makedirs(folder / "dir" / "b" / "c"),
            lambda: os.rmdir(folder / "dir" / "a"),
            lambda: shutil.copyfile(path, other),
            lambda: shutil.rmtree(folder / "dir"),
        ]
        for number, call in enumerate(calls):
            disk.error_chance = 1.0
            with raises(errno.EIO):
                call()
            disk.heal()
            begin = now()
            call()
            assert now() - begin > 2e-5, f"call {number} takes no time"
        for name in ("file", "other"):
            (folder / name).unlink()

    def room_left() -> None:
        disk.is_full = True
        with raises(errno.ENOSPC):
            (folder / "new").write_bytes(b"x")
        assert not (folder / "new").exists()
        assert os.statvfs(folder).f_bavail == 0
        disk.heal()
        disk.room_bytes = 1000
        with raises(errno.ENOSPC):
            (folder / "new").write_bytes(bytes(2000))
        assert (folder / "new").stat().st_size == 1000
        (folder / "new").unlink()
        (folder / "new").write_bytes(bytes(900))
        disk.heal()
        (folder / "new").unlink()

    def short_writes() -> None:
        fd = os.open(folder / "short", os.O_WRONLY | os.O_CREAT)
        counts = {os.writev(fd, [bytes(1000), bytes(1000)]) for _ in range(50)}
        assert 2000 in counts
        assert len(counts) > 1
        os.close(fd)
        (folder / "short").unlink()

    def descriptors() -> None:
        process = room.kernel.process
        assert process is not None
        process.max_descriptors = 3
        path = folder / "file"
        opened = [os.open(path, os.O_RDWR | os.O_CREAT) for _ in range(3)]
        for call in (
            lambda: os.open(path, os.O_RDONLY),
            lambda: path.open("rb"),
            lambda: os.listdir(folder),
            lambda: os.dup(opened[0]),
        ):
            with raises(errno.EMFILE):
                call()
        os.close(opened.pop())
        with path.open("wb") as file:
            with raises(errno.EMFILE):
                path.open("rb")
            file.write(b"x")
        with os.fdopen(opened.pop(), "rb") as same:
            assert same.read() == b"x"
        assert len(process.descriptors) == 1

    def slow_and_hung() -> None:
        path = folder / "file"
        disk.slowness = 10_000
        begin = now()
        path.exists()
        assert now() - begin > 0.1
        disk.heal()
        disk.stall_chance = 1.0
        path.exists()
        assert now() - begin > 5
        disk.heal()
        disk.is_hanging = True
        room.kernel.call_later(50, disk.heal)
        begin = now()
        path.exists()
        assert 50 <= now() - begin < 51

    def bad_sectors() -> None:
        path = folder / "sectors"
        (folder / "file").unlink()
        path.write_bytes(b"x" * 100_000)
        assert disk.corrupt(3) == 3
        assert path.stat().st_size == 100_000
        assert path.read_bytes().count(b"x") < 100_000
        path.write_bytes(bytes(100_000))
        assert not disk.is_broken(str(path))
        disk.break_sectors(1)
        assert disk.is_broken(str(path))
        with raises(errno.EIO):
            path.read_bytes()
        fd = os.open(path, os.O_RDWR)
        failed = 0
        for at in range(0, 100_000, 1000):
            try:
                os.preadv(fd, [bytearray(1000)], at)
            except OSError:
                failed += 1
        assert 1 <= failed <= 2
        os.pwrite(fd, b"x", 0)
        assert len(path.read_bytes()) == 100_000

    def times_and_names() -> None:
        path = folder / "dated"
        path.write_bytes(b"x")
        assert abs(path.stat().st_mtime - time.time()) < 1
        time.sleep(100)
        with path.open("ab") as file:
            file.write(b"y")
        assert abs(path.stat().st_mtime - time.time()) < 1
        with raises(errno.EXDEV):
            path.replace(room.files.root / "one" / "shm" / "dated")
        with raises(errno.ENOENT):
            os.stat(folder / "missing")
        assert stat.S_ISREG(os.lstat(path).st_mode)

    for main in (
        every_call,
        room_left,
        short_writes,
        descriptors,
        slow_and_hung,
        bad_sectors,
        times_and_names,
    ):
        room.run(main)

    def hold() -> None:
        fd = os.open(folder / "held", os.O_RDWR | os.O_CREAT)
        room.kernel.record(f"holds {fd}")
        os.ftruncate(fd, 10)
        time.sleep(1000)

    def close_again() -> None:
        holder = room.start(room.one, hold)
        time.sleep(1)
        [fd] = holder.descriptors
        with raises(errno.EBADF):
            os.close(fd)  # another process's
        with raises(errno.EBADF):
            os.write(fd, b"x")
        room.kernel.end_process(holder, -SIGNAL_KILL)
        with raises(errno.EBADF):
            os.close(fd)

    room.run(close_again)


# --- Signals -------------------------------------------------------------------------------------


def check_signals(place: Path, seed: int) -> None:
    from tests.simulation import world as worlds

    worlds.PLACE = place
    world = worlds.World(seed)
    import asyncio
    import signal
    import time

    machine = world.machine("one")
    steps: list[str] = []

    def handled() -> int:
        signal.signal(signal.SIGTERM, lambda *_: steps.append("SIGTERM"))
        while "SIGTERM" not in steps:
            time.sleep(1)
        return 3

    def exits() -> int:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(6))
        time.sleep(1000)
        return 0

    def in_loop() -> int:
        async def main() -> None:
            told = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
            await told.wait()

        asyncio.run(main())
        return 4

    def unhandled() -> int:
        try:
            time.sleep(1000)
        finally:
            steps.append("finally")
        return 0

    def counting() -> int:
        for _ in range(10):
            time.sleep(1)
            steps.append("count")
        return 5

    def main() -> int:
        wait = world.kernel.wait_process
        codes = []
        for function in (handled, exits, in_loop, unhandled):
            process = world.kernel.start_process(function.__name__, machine, function)
            time.sleep(5)
            world.signal(process, signal.SIGTERM)
            codes.append(wait(process, 5))
        assert codes == [3, 6, 4, -signal.SIGTERM], codes
        process = world.kernel.start_process("unhandled", machine, unhandled)
        time.sleep(1)
        world.signal(process, signal.SIGKILL)
        assert process.exit_code == -signal.SIGKILL
        assert "finally" not in steps
        process = world.kernel.start_process("counting", machine, counting)
        time.sleep(3.5)
        world.signal(process, signal.SIGSTOP)
        time.sleep(100)
        assert steps.count("count") == 3
        world.signal(process, signal.SIGCONT)
        begin = time.monotonic()
        assert wait(process, 50) == 5
        assert 6 <= time.monotonic() - begin < 7
        return 0

    process = world.kernel.start_process("main", machine, main)
    world.kernel.log_lines = []
    world.kernel.run(1000)
    assert process.exit_code == 0, world.kernel.log_lines
    world.files.close()


# --- Tests ---------------------------------------------------------------------------------------


CHECKS = (
    "time", "kills", "sockets", "cuts", "power", "streams", "power_of_disk", "disk_faults",
    "signals",
)  # fmt: skip


def pytest_generate_tests(metafunc: Any) -> None:
    # The processes of checks must not import pytest: it would bring real locks and clocks.
    if "check" in metafunc.fixturenames:
        metafunc.parametrize("check", CHECKS)


def test_the_machine_room_behaves_as_a_real_one(check: str, tmp_path: Path) -> None:
    run_check(check, tmp_path)


def test_a_seed_decides_everything(tmp_path: Path) -> None:
    one, again, other = (run_check("digest", tmp_path, seed) for seed in (1, 1, 2))
    assert one == again
    assert one != other


def main() -> None:
    """Run the check that the command line names."""
    end = os._exit
    name, place, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    code = 1
    try:
        if name == "signals":
            check_signals(place, seed)
        else:
            room = Room(place, seed)
            globals()[f"check_{name}"](room)
            room.files.close()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    end(code)


if __name__ == "__main__":
    main()
