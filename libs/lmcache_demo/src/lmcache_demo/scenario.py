"""The five steps of the demo, each with what must be true of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lmcache_demo.cluster import Cluster
from lmcache_demo.document import prompts
from lmcache_demo.engine_messages import Answer, Prompt
from lmcache_demo.engines import Engine
from lmcache_demo.processes import Processes

MAX_NEW_TOKENS = 24
MIN_PROMPT_TOKENS = 2000
HOT, PEER, REMOTE, NOWHERE = "Hot", "P2PBackend", "RemoteBackend", ""
PLACES = {HOT: "own sidecar", PEER: "sidecar A", REMOTE: "cache_storage", NOWHERE: "computed"}


@dataclass(frozen=True)
class Step:
    """One finished step.

    Attributes:
        title: What happened.
        expected: Tier that the KV had to come from.
        answer: What the engine said.
        reference: What an engine without a cache said.
    """

    title: str
    expected: str
    answer: Answer
    reference: Answer

    @property
    def place(self) -> str:
        """Where the KV came from."""
        return ", ".join(PLACES.get(tier, tier) for tier in self.answer.reused_by_tier) or PLACES[NOWHERE]

    @property
    def tokens_equal(self) -> bool:
        """Whether the cache changed nothing."""
        return self.answer.tokens == self.reference.tokens

    @property
    def faults(self) -> list[str]:
        """What is not as said; empty when all is well."""
        found = []
        if not self.tokens_equal:
            found.append(f"generated {self.answer.tokens}, without a cache {self.reference.tokens}")
        if set(self.answer.reused_by_tier) != ({self.expected} - {NOWHERE}):
            found.append(f"KV came from {self.place}, expected {PLACES[self.expected]}")
        if self.expected and self.answer.num_reused_tokens < MIN_PROMPT_TOKENS * 9 // 10:
            found.append(f"only {self.answer.num_reused_tokens} tokens were reused")
        if not self.expected and self.answer.num_reused_tokens:
            found.append(f"{self.answer.num_reused_tokens} tokens were reused, expected none")
        if self.answer.num_prompt_tokens < MIN_PROMPT_TOKENS:
            found.append(f"the prompt has {self.answer.num_prompt_tokens} tokens, fewer than {MIN_PROMPT_TOKENS}")
        return found


def run_steps(processes: Processes, cluster: Cluster, say: Callable[[str], None]) -> Iterator[Step]:
    """Run the demo; yields each step when it is done. The services are running.

    Args:
        processes: Owner of the processes.
        cluster: The services.
        say: Told what happens now.
    """
    first, second = (Prompt(text, MAX_NEW_TOKENS) for text in prompts())
    say("an engine without any cache answers both questions, for comparison")
    plain = Engine(processes, "engine-plain", None)
    plain_first, plain_second = plain.ask(first), plain.ask(second)
    plain.end()

    say("sidecars A and B start")
    sidecar_a, sidecar_b = cluster.start_sidecar("sidecar-a"), cluster.start_sidecar("sidecar-b")
    say("engine A reads the document with question 1")
    engine_a = Engine(processes, "engine-a", sidecar_a.socket)
    answer = engine_a.ask(first)
    cluster.wait_until_settled(sidecar_a)
    yield Step("A, question 1", NOWHERE, answer, plain_first)
    say("engine A reads it again with question 2")
    yield Step("A, question 2", HOT, engine_a.ask(second), plain_second)
    engine_a.end()

    say("engine B, at sidecar B, reads it with question 2")
    engine_b = Engine(processes, "engine-b", sidecar_b.socket)
    yield Step("B, 2nd sidecar", PEER, engine_b.ask(second), plain_second)
    engine_b.end()

    say("sidecars A and B are killed; engine C starts at a fresh sidecar")
    sidecar_a.process.kill()
    sidecar_b.process.kill()
    sidecar_c = cluster.start_sidecar("sidecar-c")
    engine_c = Engine(processes, "engine-c", sidecar_c.socket)
    yield Step("C, A+B killed", REMOTE, engine_c.ask(first), plain_first)
    engine_c.end()

    say("every service and sidecar is killed; engine D is configured for a sidecar that is not there")
    sidecar_c.process.kill()
    cluster.kill_services()
    engine_d = Engine(processes, "engine-d", sidecar_c.socket)
    yield Step("D, all killed", NOWHERE, engine_d.ask(second), plain_second)
    engine_d.end()
