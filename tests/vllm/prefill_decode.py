"""Prefill in one pod, decode in another, as processes: `python -m tests.vllm.prefill_decode` prints
how soon the first token comes, also while something is away, and what is left of 500 requests.

Two servers of vLLM with a sidecar each, storage, lookup, broker, and the proxy of docs/examples,
which tells the engines nothing, or what llm-d's or vLLM's proxies say.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.fixtures.ports import free_port
from tests.vllm.engines import Ask, engine_options, set_environment, transfer_config
from tests.vllm.models import LLAMA, made_models
from tests.vllm.processes import ROOT, Owner, Service
from tests.vllm.references import prompt
from tests.vllm.servers import Server, start
from tests.vllm.sidecars import await_calm, eventually, neighbourhood, sidecar, socket_of, storage

LENGTH = 4000
"""Tokens of a prompt."""
NUM_NEW = 16
PROXIES = ("nothing", "llm-d", "vllm")
ARENA_GB = 1.0
START_S = 400.0
FAULT_S = 0.5
NUM_ABORTED = 500


class Prompts:
    """Asks of which none begins as another one does."""

    def __init__(self) -> None:
        self._number = 1000

    def __call__(self, length: int = LENGTH, num_new: int = NUM_NEW) -> Ask:
        self._number += 1
        return Ask(prompt(self._number, length), num_new)


@dataclass
class Pods:
    """All processes.

    Attributes:
        asks: Makes what to ask.
    """

    owner: Owner
    services: dict[str, Service]
    servers: dict[str, Server]
    proxies: dict[str, Server]
    asks: Prompts = field(default_factory=Prompts)

    def group(self, name: str) -> int:
        """The process group of a server."""
        return self.owner.commands[list(self.servers).index(name)].pid

    def forget(self) -> None:
        """Let vLLM forget what it has in blocks."""
        for server in self.servers.values():
            server.post("/reset_prefix_cache")

    def num_held(self) -> int:
        """What both sidecars hold for requests."""
        kinds = ("num_pins", "num_reservations", "num_tickets")
        clients = [
            client
            for name in ("prefill", "decode")
            for client in self.services[name].get("/v1/clients")["clients"]
        ]
        return sum(int(client[kind]) for client in clients for kind in kinds)


@contextlib.contextmanager
def pods(directory: Path, roles: Sequence[str] = ("kv_producer", "kv_consumer")) -> Iterator[Pods]:
    """Everything, running; at the end nothing is."""
    model = made_models(ROOT / ".vllm") / LLAMA
    with Owner(directory) as owner:
        near = neighbourhood(owner)
        store = storage(owner)
        near["remote_url"] = f"lm://127.0.0.1:{store.ports['lm_port']}"
        names = ("prefill", "decode")[: len(roles)]
        both = [sidecar(owner, name, **near, arena_gb=ARENA_GB) for name in names]
        for one in both:
            eventually(lambda one=one: one.get("/v1/status")["registered"], "not registered")
        servers = {}
        for name, role in zip(names, roles, strict=True):
            extra = {"sidecar_socket": str(socket_of(owner, name)), "chunk_size": 256}
            config = transfer_config({f"lmcache.{key}": value for key, value in extra.items()})
            options = engine_options(model, kv_transfer_config=config | {"kv_role": role})
            servers[name] = start(owner, options, name)
        proxies = {}
        for says in PROXIES if len(servers) == 2 else ():
            port, example = free_port(), ROOT / "docs" / "examples" / "prefill_decode_proxy.py"
            engines = [f"--{name}={server.url}" for name, server in servers.items()]
            arguments = [str(example), f"--port={port}", f"--says={says}", *engines]
            proxies[says] = Server(port, owner.command(arguments, f"proxy-{says}"))
        for server in servers.values():
            eventually(server.is_healthy, "a server does not become healthy", START_S)
        yield Pods(owner, {one.name: one for one in owner.services}, servers, proxies)


def median(measure: Callable[[], float], rounds: int) -> float:
    """The median of some measurements."""
    return statistics.median(measure() for _ in range(rounds))


def row(what: str, goal: str, now: str) -> None:
    """Print a line of the table."""
    print(f"| {what} | {goal} | {now} |", flush=True)


def first_tokens(two: Pods, rounds: int) -> None:
    """How soon the first token comes at the decode engine."""
    asks, prefill, decode = two.asks, two.servers["prefill"], two.servers["decode"]

    def computed() -> float:
        unread = {"lmcache.skip_lookup": True}
        return decode.first_token_s(replace(asks(), transfer=unread))

    computing_s = median(computed, rounds)
    row("first token, computed", "", f"{computing_s:.3f} s")
    local, remote = [], []
    for _ in range(rounds):
        ask = asks()
        prefill.complete(replace(ask, num_new=1))
        await_calm(two.services["prefill"])
        remote.append(decode.first_token_s(ask))
        await_calm(two.services["decode"])
        decode.post("/reset_prefix_cache")
        local.append(decode.first_token_s(ask))
    ratio = statistics.median(remote) / statistics.median(local)
    row("first token at D / that of a hit in its own sidecar", "≤ 1.3", f"{ratio:.2f}")
    for says, proxy in two.proxies.items():
        told = median(lambda proxy=proxy: through(proxy, prefill, asks()), rounds)  # type: ignore[misc]
        row(f"first token at D right behind P's, told {says}", "≤ computing", f"{told:.3f} s")

    def unfinished() -> float:
        ask = asks()
        prefill.complete(replace(ask, num_new=1))
        os.killpg(two.group("prefill"), signal.SIGSTOP)
        try:
            return decode.first_token_s(ask)
        finally:
            os.killpg(two.group("prefill"), signal.SIGCONT)

    late_s = median(unfinished, rounds)
    goal = f"≤ {computing_s + 0.1:.3f} s"
    row("first token at D while P, stopped, has not stored all", goal, f"{late_s:.3f} s")


def through(proxy: Server, prefill: Server, ask: Ask) -> float:
    """Seconds from the end of the prefill to the first token, through a proxy."""
    whole_s = proxy.first_token_s(ask)
    log = proxy.log.read_text(errors="replace")
    prefilled_s = [float(line.split()[-2]) for line in log.splitlines() if "prefilled in" in line]
    return whole_s - prefilled_s[-1]


def faults(two: Pods, rounds: int) -> None:
    """The first token while something is away; each fault stays until the next one."""
    asks, prefill, decode = two.asks, two.servers["prefill"], two.servers["decode"]
    services = two.services
    actions: dict[str, Callable[[], object]] = {
        "lookup killed": services["lookup"].kill,
        "broker killed": services["broker"].kill,
        "prefill sidecar stopped": services["prefill"].freeze,
        "prefill sidecar killed": services["prefill"].kill,
        "prefill engine killed": lambda: os.killpg(two.group("prefill"), signal.SIGKILL),
    }
    unread = {"lmcache.skip_lookup": True}
    price_s = median(lambda: decode.first_token_s(replace(asks(), transfer=unread)), rounds)
    for what, act in actions.items():
        prepared = [asks() for _ in range(rounds)]
        for ask in prepared:
            with contextlib.suppress(OSError):
                prefill.complete(replace(ask, num_new=1))
        act()
        took = max(decode.first_token_s(ask) for ask in prepared)
        row(f"slowest first token at D, {what}", f"≤ {price_s + FAULT_S:.3f} s", f"{took:.3f} s")


def aborts(two: Pods, number: int) -> None:
    """Clients that give up at any moment, at either engine."""
    dice, asks = random.Random(3), two.asks
    num_aborted = 0
    lock = threading.Lock()
    shared = [asks(dice.randrange(200, 2000)) for _ in range(20)]

    def client(share: int) -> None:
        nonlocal num_aborted
        for _ in range(share):
            with lock:
                ask = dice.choice(shared)
                engine = dice.choice(list(two.servers.values()))
                num_lines = dice.choice([0, 1, 2, 1000])
            with contextlib.suppress(OSError), engine.streamed(ask) as lines:
                for count, _ in enumerate(lines):
                    if count >= num_lines:
                        num_aborted += 1
                        break

    clients = [threading.Thread(target=client, args=(number // 4,)) for _ in range(4)]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    eventually(lambda: not two.num_held(), "something is held", 30.0)
    for service in (two.services["prefill"], two.services["decode"]):
        figures = service.get("/v1/tiers")["tiers"]["memory"]
        eventually(lambda: figures["arena_used_bytes"] == figures["used_bytes"], "memory is held")  # noqa: B023
    for server in two.servers.values():
        lines = server.metrics().splitlines()
        running = [line for line in lines if line.startswith("vllm:num_requests_running{")]
        assert all(float(line.split()[-1]) == 0 for line in running), running
    row(f"of {number} requests, {num_aborted} given up: held", "0", "0")


def decode_rate(rounds: int) -> None:
    """Compare how fast an answer is decoded while prompts are computed, in one engine or in two."""
    rates = {}
    for name, roles in (("one mixed", ["kv_both"]), ("two", ["kv_producer", "kv_consumer"])):
        with tempfile.TemporaryDirectory() as directory, pods(Path(directory), roles) as some:
            asks, engines = some.asks, list(some.servers.values())
            is_over = threading.Event()

            def compute(engine: Server = engines[0], asks: Prompts = asks) -> None:
                while not is_over.is_set():  # noqa: B023
                    engine.complete(asks(LENGTH, 1))

            def rate(engine: Server = engines[-1], asks: Prompts = asks) -> float:
                ask, times = asks(64, 100), []
                with engine.streamed(ask) as lines:
                    times = [time.monotonic() for line in lines if line.startswith(b"data: {")]
                return (len(times) - 1) / (times[-1] - times[0])

            load = threading.Thread(target=compute)
            load.start()
            rates[name] = median(rate, rounds)
            is_over.set()
            load.join()
    row(
        "tokens a second at D while P prefills / in one mixed engine (two cores)",
        "reported",
        f"{rates['two']:.1f} / {rates['one mixed']:.1f}",
    )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.vllm.prefill_decode", description=__doc__
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--aborts", type=int, default=NUM_ABORTED)
    options = parser.parse_args()
    set_environment()
    row("prefill and decode apart", "goal", f"load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as directory, pods(Path(directory)) as two:
        first_tokens(two, options.rounds)
        aborts(two, options.aborts)
        faults(two, options.rounds)
    decode_rate(options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
