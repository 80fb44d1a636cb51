"""The rounds: a pair of cold requests, one of them stored, and then the same prompt from each
place. Every answer is checked.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.bench.vllm_engines import (
    CHUNK_SIZE,
    NUM_TOKENS,
    TimedEngine,
    Took,
    cpu_seconds,
    random_prompt,
)
from tests.bench.vllm_places import Places, empty_memory
from tests.vllm.processes import Service
from tests.vllm.sidecars import num_chunks

ROUNDS = 15
WARM_UP_TOKENS = 1025
SHORT_TOKENS = (100, 1000, 1025)
"""Prompts that are too short to hide what the connector costs."""
SHORT_ROUNDS = 40
BLOCK_TOKENS = 128
"""vLLM's prefix cache has no shorter prompts."""
WRITE_S = 0.4
"""Most writes to slower tiers are over by then. As long a wait stands behind a request that stores
nothing: so the sidecar's processor time can be compared.
"""
SOURCE = "vllm:prompt_tokens_cached_by_source{{source={}}}"

COLD, STORED = "cold", "cold, stored"
SHORT_COLD, SHORT_AGAIN = "short cold", "short again"
PLAIN, CONNECTED = "plain vLLM", "with the connector"
PREFIX, PREFIX_BESIDE_US = "prefix cache", "prefix cache beside us"
MEMORY, EMBEDDED = "memory", "embedded"
ON_DISK, PEER, STORAGE = "disk", "peer", "storage"


def short_round(
    engines: Mapping[str, TimedEngine], dice: random.Random, number: int, sizes: Sequence[int]
) -> Iterator[tuple[tuple[str, str, int], Took]]:
    """Ask vLLM and vLLM with the connector, which stores, for new prompts, and for the same ones
    again: vLLM's own prefix cache has them then.

    Args:
        engines: By name.
        dice: Makes the prompts.
        number: Of the round; every other one has another order.
        sizes: Tokens of each prompt.
    """
    order = list(engines.items())[:: 1 if number % 2 else -1]
    for num_tokens in sizes:
        prompt = random_prompt(dice, num_tokens)
        kinds = (SHORT_COLD, SHORT_AGAIN) if num_tokens > BLOCK_TOKENS else (SHORT_COLD,)
        for kind in kinds:
            for name, engine in order:
                took = engine.first_token(prompt)
                if (took.num_cached > 0) != (kind == SHORT_AGAIN):
                    raise AssertionError(f"{kind}, {name}: {took.num_cached} cached tokens")
                yield (kind, name, num_tokens), took


class Rounds:
    """Runs them, and keeps what was measured.

    Args:
        places: What runs.

    Attributes:
        took: Of each row what each round took.
        short: The same of short prompts, by `SHORT_COLD` or `SHORT_AGAIN`, engine and tokens.
        sidecar_cpu: The sidecar's processor time for each cold request and the writes behind it, by
            row, seconds.
    """

    def __init__(self, places: Places) -> None:
        self.took: dict[str, list[Took]] = defaultdict(list)
        self.sidecar_cpu: dict[str, list[float]] = defaultdict(list)
        self.short: dict[tuple[str, str, int], list[Took]] = defaultdict(list)
        self._places = places
        self._dice = random.Random()  # no prompt may have been seen by an earlier run either
        self._kept: tuple[int, ...] = ()

    def warm_up(self) -> None:
        """Every way once, with short prompts; then one of full length into the caches that
        belong to one engine.
        """
        self._keep(WARM_UP_TOKENS)
        self._round(0, WARM_UP_TOKENS)
        self._keep(NUM_TOKENS)
        self.took.clear()
        self.sidecar_cpu.clear()

    def round(self, number: int) -> None:
        """One round."""
        self._round(number, NUM_TOKENS)

    def short_round(self, number: int) -> None:
        """One round of short prompts."""
        engines = {PLAIN: self._places.plain, CONNECTED: self._places.connected}
        for what, took in short_round(engines, self._dice, number, SHORT_TOKENS):
            self.short[what].append(took)

    def _keep(self, num_tokens: int) -> None:
        """A prompt for vLLM's own prefix cache and for the cache inside vLLM: they are asked for
        the same one in each round.
        """
        self._kept = random_prompt(self._dice, num_tokens)
        engines = (self._places.plain, self._places.embedded)
        with ThreadPoolExecutor(len(engines)) as pool:
            for took in pool.map(lambda engine: engine.first_token(self._kept), engines):
                _check(took, 0, "a prompt that nobody knows")

    def _round(self, number: int, num_tokens: int) -> None:
        places, kept = self._places, self._kept
        cold = {row: random_prompt(self._dice, num_tokens) for row in (COLD, STORED)}
        for row in (COLD, STORED) if number % 2 else (STORED, COLD):
            self._cold(row, cold[row])
        stored = cold[STORED]
        self._hit(PREFIX, places.plain, kept, "device")
        self._hit(PREFIX_BESIDE_US, places.connected, stored, "device")
        self._hit(MEMORY, places.connected, stored, "host", places.pod)
        self._hit(EMBEDDED, places.embedded, kept, "host")
        for sidecar in (places.pod, places.peer, places.far):
            empty_memory(sidecar)
        self._hit(ON_DISK, places.connected, stored, "disk", places.pod, is_lifted=True)
        self._hit(PEER, places.at_peer, stored, "p2p", places.peer, is_lifted=True)
        self._hit(
            STORAGE, places.at_far, stored, "external_unspecified", places.far, is_lifted=True
        )

    def _cold(self, row: str, prompt: tuple[int, ...]) -> None:
        """A prompt that nobody knows; with the processor time that the sidecar spends on it,
        until all is written.
        """
        places, pid = self._places, self._places.pod.pid
        places.connected.switch_stores(row == STORED)
        before, before_cpu = num_chunks(places.pod), cpu_seconds(pid)
        took = places.connected.first_token(prompt)
        time.sleep(WRITE_S)
        self.sidecar_cpu[row].append(cpu_seconds(pid) - before_cpu)
        _check(took, 0, row)
        places.settle()
        places.connected.switch_stores(True)
        if row == STORED and num_chunks(places.pod) - before != len(prompt) // CHUNK_SIZE:
            raise AssertionError(
                f"{num_chunks(places.pod) - before} chunks of {len(prompt)} tokens were stored"
            )
        self.took[row].append(took)

    def _hit(
        self,
        row: str,
        engine: TimedEngine,
        prompt: tuple[int, ...],
        source: str,
        sidecar: Service | None = None,
        is_lifted: bool = False,
    ) -> None:
        """A prompt whose KV is at one place.

        Args:
            row: Its name.
            engine: Who is asked.
            prompt: What.
            source: Where vLLM is to say that the KV came from, as the sidecar has told it.
            sidecar: Whose memory is looked at.
            is_lifted: Whether the chunks are not in that memory before, and are afterwards.
        """
        if source != "device":
            engine.forget()
        metric = SOURCE.format(source)
        said, held = (
            engine.metrics().get(metric, 0.0),
            (0 if sidecar is None else num_chunks(sidecar)),
        )
        took = engine.first_token(prompt)
        _check(took, len(prompt) - 1, row)
        said = engine.metrics().get(metric, 0.0) - said
        if said != len(prompt) - 1:
            raise AssertionError(f"{row}: of {len(prompt)} tokens {said:.0f} came from {source!r}")
        if sidecar is not None and (num_chunks(sidecar) - held > 0) != is_lifted:
            raise AssertionError(
                f"{row}: {sidecar.name} held {held} chunks before and holds"
                f" {num_chunks(sidecar)} now"
            )
        self.took[row].append(took)


def _check(took: Took, num_cached: int, row: str) -> None:
    if took.num_cached != num_cached:
        raise AssertionError(
            f"{row}: vLLM counts {took.num_cached} cached tokens, not {num_cached}"
        )
