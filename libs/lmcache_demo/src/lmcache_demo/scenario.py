"""The steps of the demo, each with what must be true of it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lmcache_demo.blending import Way, run_blended
from lmcache_demo.cluster import DISK_TIER, REMOTE_TIER, Cluster, CodecFigures, Sidecar
from lmcache_demo.document import prompts
from lmcache_demo.engine_messages import Answer, Prompt
from lmcache_demo.engines import Engine
from lmcache_demo.processes import Processes

MAX_NEW_TOKENS = 24
MIN_PROMPT_TOKENS = 2000
DISK_GB = 1.0
LOSSY_SERDE, LOSSLESS_SERDE = "cachegen", "lossless"
HOT, PEER, REMOTE, DISK, NOWHERE = "Hot", "P2PBackend", REMOTE_TIER, DISK_TIER, ""
PLACES = {
    HOT: "own sidecar",
    PEER: "sidecar A",
    REMOTE: "cache_storage",
    DISK: "D's disk",
    NOWHERE: "computed",
}


@dataclass(frozen=True)
class Compression:
    """How the KV of a step was stored.

    Attributes:
        lossy: Whether other values come back, so that the answer may be another one.
        written: What the writer's codec did.
        read: What the reader's codec did.
    """

    lossy: bool
    written: CodecFigures
    read: CodecFigures

    @property
    def ratio(self) -> float:
        """How many times smaller it was stored."""
        return self.written.raw_bytes / max(1, self.written.encoded_bytes)

    @property
    def faults(self) -> list[str]:
        """What is not as said; empty when all is well."""
        found = []
        if self.ratio <= 1:
            found.append(
                f"{self.written.raw_bytes} bytes of KV were stored in {self.written.encoded_bytes},"
                " which is not smaller"
            )
        if not self.read.num_decoded_chunks:
            found.append("nothing was decoded")
        if self.lossy != (self.written.rms_error > 0):
            found.append(f"the encoder measured an error of {self.written.rms_error:.2%}")
        return found


@dataclass(frozen=True)
class Step:
    """One finished step.

    Attributes:
        title: What happened.
        expected: Tier that the KV had to come from.
        answer: What the engine said.
        reference: What an engine without a cache said.
        compression: How the KV was stored that the engine got; None for as it is.
    """

    title: str
    expected: str
    answer: Answer
    reference: Answer
    compression: Compression | None = None

    @property
    def place(self) -> str:
        """Where the KV came from."""
        return (
            ", ".join(PLACES.get(tier, tier) for tier in self.answer.reused_by_tier)
            or PLACES[NOWHERE]
        )

    @property
    def first_difference(self) -> int | None:
        """Which generated token, counted from 1, is the first that is not the one without a
        cache; None when all are.
        """
        got, want = self.answer.tokens, self.reference.tokens
        if got == want:
            return None
        different = (
            number
            for number, pair in enumerate(zip(got, want, strict=False), 1)
            if pair[0] != pair[1]
        )
        return next(different, min(len(got), len(want)) + 1)

    @property
    def may_differ(self) -> bool:
        """Whether another answer is no fault."""
        return self.compression is not None and self.compression.lossy

    @property
    def faults(self) -> list[str]:
        """What is not as said; empty when all is well."""
        found = [] if self.compression is None else self.compression.faults
        if self.first_difference is not None and not self.may_differ:
            found.append(f"generated {self.answer.tokens}, without a cache {self.reference.tokens}")
        if set(self.answer.reused_by_tier) != ({self.expected} - {NOWHERE}):
            found.append(f"KV came from {self.place}, expected {PLACES[self.expected]}")
        if self.expected and self.answer.num_reused_tokens < MIN_PROMPT_TOKENS * 9 // 10:
            found.append(f"only {self.answer.num_reused_tokens} tokens were reused")
        if not self.expected and self.answer.num_reused_tokens:
            found.append(f"{self.answer.num_reused_tokens} tokens were reused, expected none")
        if self.answer.num_prompt_tokens < MIN_PROMPT_TOKENS:
            found.append(
                f"the prompt has {self.answer.num_prompt_tokens} tokens, fewer than"
                f" {MIN_PROMPT_TOKENS}"
            )
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
        self._first, self._second = (Prompt(text, MAX_NEW_TOKENS) for text in prompts())
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
        """Takes over the engine, which has no cache yet."""
        cluster = self._cluster
        self._say("the same engine, A, now at sidecar A, reads the document with question 1")
        sidecar_a = cluster.start_sidecar("sidecar-a")
        engine.attach(sidecar_a.socket)
        answer = engine.ask(self._first)
        cluster.wait_until_settled(sidecar_a)
        yield Step("A, question 1", NOWHERE, answer, plain_first)
        self._say("engine A reads it again with question 2")
        yield Step("A, question 2", HOT, engine.ask(self._second), plain_second)
        engine.end()

        self._say("engine B, at sidecar B, reads it with question 2")
        engine, sidecar_b = self._engine("b", lambda: cluster.start_sidecar("sidecar-b"))
        yield Step("B, 2nd sidecar", PEER, engine.ask(self._second), plain_second)
        engine.end()

        self._say("sidecars A and B are killed; engine C starts at a fresh sidecar")
        sidecar_a.process.kill()
        sidecar_b.process.kill()
        engine, sidecar_c = self._engine("c", lambda: cluster.start_sidecar("sidecar-c"))
        yield Step("C, A+B killed", REMOTE, engine.ask(self._first), plain_first)
        engine.end()
        sidecar_c.process.kill()

    def _compressed(self, plain_first: Answer, plain_second: Answer) -> Iterator[Step]:
        """Under a salt of its own, that is under other keys: what was stored as it is has no
        part in it. Kills everything in the end.
        """
        cluster = self._cluster
        remote = {"salt_file": self._salt(), "remote_serde": LOSSY_SERDE}
        disk = {
            "disk_path": self._directory / "disk-d",
            "disk_gb": DISK_GB,
            "disk_serde": LOSSLESS_SERDE,
        }

        self._say(
            f"engine D, of another salt, stores: {LOSSY_SERDE} in cache_storage, {LOSSLESS_SERDE}"
            " on a disk"
        )
        engine, writer = self._engine(
            "d", lambda: cluster.start_sidecar("sidecar-d", **(remote | disk))
        )
        answer = engine.ask(self._first)
        engine.end()
        cluster.wait_until_settled(writer)
        yield Step("D, other salt", NOWHERE, answer, plain_first)
        written = {tier: cluster.codec_figures(writer, tier) for tier in (REMOTE, DISK)}
        writer.process.kill()

        self._say(
            f"sidecar D is killed; engine E, at a fresh sidecar, reads the {LOSSY_SERDE} chunks in"
            " cache_storage"
        )
        engine, reader = self._engine("e", lambda: cluster.start_sidecar("sidecar-e", **remote))
        answer = engine.ask(self._first)
        engine.end()
        compression = Compression(True, written[REMOTE], cluster.codec_figures(reader, REMOTE))
        yield Step(f"E, {LOSSY_SERDE}", REMOTE, answer, plain_first, compression)
        reader.process.kill()

        self._say(
            f"sidecar E is killed; engine F, at a fresh sidecar, reads the {LOSSLESS_SERDE} chunks"
            " on D's disk"
        )
        engine, reader = self._engine(
            "f",
            lambda: self._sidecar_of_disk("sidecar-f", disk | {"salt_file": remote["salt_file"]}),
        )
        answer = engine.ask(self._first)
        compression = Compression(False, written[DISK], cluster.codec_figures(reader, DISK))
        yield Step(f"F, {LOSSLESS_SERDE}", DISK, answer, plain_first, compression)

        self.blended = run_blended(self._processes, cluster, self._directory, self._say)

        self._say("every service and sidecar is killed; engine F goes on without")
        reader.process.kill()
        cluster.kill_services()
        yield Step("F, all killed", NOWHERE, engine.ask(self._second), plain_second)
        engine.end()

    def _salt(self) -> Path:
        path = self._directory / "salt"
        path.write_text(secrets.token_hex(16), encoding="utf-8")
        path.chmod(0o600)
        return path

    def _sidecar_of_disk(self, name: str, options: Mapping[str, object]) -> Sidecar:
        sidecar = self._cluster.start_sidecar(name, **options)
        self._cluster.wait_until_loaded(sidecar)
        return sidecar

    def _engine(self, name: str, start_sidecar: Callable[[], Sidecar]) -> tuple[Engine, Sidecar]:
        """A fresh engine at a sidecar; both start at the same time."""
        engine = Engine(self._processes, f"engine-{name}")
        sidecar = start_sidecar()
        engine.attach(sidecar.socket)
        return engine, sidecar
