"""The steps of the demo, each with its expectation."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics

from lmcache_core.names import DISK_TIER, MEMORY_TIER, PEER_TIER, STORAGE_TIER

from lmcache_demo.blending import Way, run_blended
from lmcache_demo.cluster import Cluster, Sidecar, TierCompression
from lmcache_demo.engines import Answer, Engine, Prompt
from lmcache_demo.processes import Processes

DOCUMENT = topics.topics["import"].strip()
"""A chapter of the language reference that the demo's model has not been trained on; nearly
3,000 of its tokens.
"""
QUESTIONS = (
    "\n\nQuestion: What is the import statement?\nAnswer: The import statement",
    "\n\nQuestion: What is a future statement?\nAnswer: A future statement",
)
MAX_NEW_TOKENS = 24
MIN_PROMPT_TOKENS = 2000
DISK_GB = 1.0
LOSSY_SERDE, LOSSLESS_SERDE = "cachegen", "lossless"
NOWHERE = ""
PLACES = {
    MEMORY_TIER: "own sidecar",
    PEER_TIER: "sidecar A",
    STORAGE_TIER: "cache_storage",
    DISK_TIER: "D's disk",
    NOWHERE: "computed",
}


@dataclass(frozen=True)
class Compression:
    """How the KV of a step was stored.

    Attributes:
        lossy: Whether other values come back, so that the answer may be another one.
        written: Figures of the writer's codec.
        read: Figures of the reader's codec.
    """

    lossy: bool
    written: TierCompression
    read: TierCompression

    @property
    def ratio(self) -> float:
        """How many times smaller it was stored."""
        return self.written.raw_bytes / max(1, self.written.encoded_bytes)

    @property
    def faults(self) -> list[str]:
        """List what differs from the expectation."""
        found, written = [], self.written
        if self.ratio <= 1:
            sizes = f"{written.raw_bytes} bytes of KV were stored in {written.encoded_bytes}"
            found.append(f"{sizes}, which is not smaller")
        if not self.read.num_decoded_chunks:
            found.append("nothing was decoded")
        if self.lossy != (written.rms_error > 0):
            found.append(f"the encoder measured an error of {written.rms_error:.2%}")
        return found


@dataclass(frozen=True)
class Step:
    """One finished step.

    Attributes:
        title: What happened.
        expected: Tier that the KV had to come from.
        answer: The engine's answer.
        reference: The answer of an engine without a cache.
        compression: How the KV that the engine got was compressed; None for not.
    """

    title: str
    expected: str
    answer: Answer
    reference: Answer
    compression: Compression | None = None

    @property
    def place(self) -> str:
        """Where the KV came from."""
        places = (PLACES.get(tier, tier) for tier in self.answer.reused_by_tier)
        return ", ".join(places) or PLACES[NOWHERE]

    @property
    def first_difference(self) -> int | None:
        """Return the number, from 1, of the first token that differs from the reference's."""
        got, want = self.answer.tokens, self.reference.tokens
        if got == want:
            return None
        pairs = enumerate(zip(got, want, strict=False), 1)
        return next((number for number, (a, b) in pairs if a != b), min(len(got), len(want)) + 1)

    @property
    def may_differ(self) -> bool:
        """Whether another answer is no fault."""
        return self.compression is not None and self.compression.lossy

    @property
    def faults(self) -> list[str]:
        """List what differs from the expectation."""
        found = [] if self.compression is None else self.compression.faults
        reused, tokens = self.answer.num_reused_tokens, self.answer.num_prompt_tokens
        if self.first_difference is not None and not self.may_differ:
            found.append(f"generated {self.answer.tokens}, without a cache {self.reference.tokens}")
        if set(self.answer.reused_by_tier) != ({self.expected} - {NOWHERE}):
            found.append(f"KV came from {self.place}, expected {PLACES[self.expected]}")
        if self.expected and reused < MIN_PROMPT_TOKENS * 9 // 10:
            found.append(f"only {reused} tokens were reused")
        if not self.expected and reused:
            found.append(f"{reused} tokens were reused, expected none")
        if tokens < MIN_PROMPT_TOKENS:
            found.append(f"the prompt has {tokens} tokens, fewer than {MIN_PROMPT_TOKENS}")
        return found


class Scenario:
    """Runs the demo.

    Args:
        processes: Owner of the processes.
        cluster: The services, running.
        directory: For a disk and a salt.
        say: Told what happens now.
    """

    def __init__(
        self, processes: Processes, cluster: Cluster, directory: Path, say: Callable[[str], None]
    ) -> None:
        self._processes = processes
        self._cluster = cluster
        self._directory = directory
        self._say = say
        self._first, self._second = (Prompt(DOCUMENT + one, MAX_NEW_TOKENS) for one in QUESTIONS)
        self.blended: list[Way] = []
        """Filled by `steps`."""

    def steps(self) -> Iterator[Step]:
        """Run it; yields each step when it is done."""
        self._say("an engine that has no cache yet answers both questions, for comparison")
        engine = Engine(self._processes, "engine-a")
        engine.attach(None)
        references = engine.ask(self._first), engine.ask(self._second)
        yield from self._as_it_is(engine, *references)
        yield from self._compressed(*references)

    def _as_it_is(
        self, engine: Engine, plain_first: Answer, plain_second: Answer
    ) -> Iterator[Step]:
        """Run the steps with raw KV; takes over the engine, which has no cache yet."""
        cluster = self._cluster
        self._say("the same engine, A, now at sidecar A, reads the document with question 1")
        sidecar_a = cluster.start_sidecar("sidecar-a")
        engine.attach(sidecar_a.socket)
        answer = engine.ask(self._first)
        cluster.wait_until_settled(sidecar_a)
        yield Step("A, question 1", NOWHERE, answer, plain_first)
        self._say("engine A reads it again with question 2")
        yield Step("A, question 2", MEMORY_TIER, engine.ask(self._second), plain_second)
        engine.process.end()

        self._say("engine B, at sidecar B, reads it with question 2")
        engine, sidecar_b = self._engine("b")
        yield Step("B, 2nd sidecar", PEER_TIER, engine.ask(self._second), plain_second)
        engine.process.end()

        self._say("sidecars A and B are killed; engine C starts at a fresh sidecar")
        sidecar_a.process.kill()
        sidecar_b.process.kill()
        engine, sidecar_c = self._engine("c")
        yield Step("C, A+B killed", STORAGE_TIER, engine.ask(self._first), plain_first)
        engine.process.end()
        sidecar_c.process.kill()

    def _compressed(self, plain_first: Answer, plain_second: Answer) -> Iterator[Step]:
        """Run the steps with encoded KV under a salt of their own, so that raw KV has no part in
        them; kills everything at the end.
        """
        cluster = self._cluster
        salt = self._directory / "salt"
        salt.write_text(secrets.token_hex(16), encoding="utf-8")
        salt.chmod(0o600)
        remote = {"salt_file": salt, "remote_serde": LOSSY_SERDE}
        disk = {
            "disk_path": self._directory / "disk-d",
            "disk_gb": DISK_GB,
            "disk_serde": LOSSLESS_SERDE,
        }

        self._say(
            f"engine D, of another salt, stores: {LOSSY_SERDE} in cache_storage, {LOSSLESS_SERDE}"
            " on a disk"
        )
        engine, writer = self._engine("d", **(remote | disk))
        answer = engine.ask(self._first)
        engine.process.end()
        cluster.wait_until_settled(writer)
        yield Step("D, other salt", NOWHERE, answer, plain_first)
        written = {tier: cluster.codec_figures(writer, tier) for tier in (STORAGE_TIER, DISK_TIER)}
        writer.process.kill()

        self._say(
            f"sidecar D is killed; engine E, at a fresh sidecar, reads the {LOSSY_SERDE} chunks in"
            " cache_storage"
        )
        engine, reader = self._engine("e", **remote)
        answer = engine.ask(self._first)
        engine.process.end()
        compression = Compression(
            True, written[STORAGE_TIER], cluster.codec_figures(reader, STORAGE_TIER)
        )
        yield Step(f"E, {LOSSY_SERDE}", STORAGE_TIER, answer, plain_first, compression)
        reader.process.kill()

        self._say(
            f"sidecar E is killed; engine F, at a fresh sidecar, reads the {LOSSLESS_SERDE} chunks"
            " on D's disk"
        )
        engine, reader = self._engine("f", **(disk | {"salt_file": salt}))
        cluster.wait_until_loaded(reader)
        answer = engine.ask(self._first)
        compression = Compression(
            False, written[DISK_TIER], cluster.codec_figures(reader, DISK_TIER)
        )
        yield Step(f"F, {LOSSLESS_SERDE}", DISK_TIER, answer, plain_first, compression)

        self.blended = run_blended(self._processes, cluster, self._directory, self._say)

        self._say("every service and sidecar is killed; engine F continues without")
        reader.process.kill()
        cluster.kill_services()
        yield Step("F, all killed", NOWHERE, engine.ask(self._second), plain_second)
        engine.process.end()

    def _engine(self, name: str, **options: object) -> tuple[Engine, Sidecar]:
        """Start a fresh engine at a fresh sidecar, both at the same time."""
        engine = Engine(self._processes, f"engine-{name}")
        sidecar = self._cluster.start_sidecar(f"sidecar-{name}", **options)
        engine.attach(sidecar.socket)
        return engine, sidecar
