"""An engine process of the demo: the messages to it, and its client. No torch."""

from __future__ import annotations

import select
import subprocess
from pathlib import Path

import msgspec

from lmcache_demo.processes import DemoError, Processes

READY_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 120.0


class Attach(msgspec.Struct, tag=True):
    """Attach an engine process to a cache.

    Attributes:
        socket: The sidecar's socket; None for no cache.
    """

    socket: str | None


class Prompt(msgspec.Struct, tag=True):
    """Generate from a text."""

    text: str
    max_new_tokens: int


class Answer(msgspec.Struct):
    """Report one generation.

    Attributes:
        tokens: Generated token ids.
        text: The same as text.
        num_prompt_tokens: Length of the prompt.
        num_reused_tokens: How many of them were not computed.
        reused_by_tier: The tokens that the cache delivered, by tier.
        retrieved_bytes: KV that the cache delivered.
        stored_bytes: KV that was stored.
        stored_chunks: The same in chunks.
        time_to_first_token_s: Seconds.
        kv_bits: Of each element of the KV.
    """

    tokens: list[int]
    text: str
    num_prompt_tokens: int
    num_reused_tokens: int
    reused_by_tier: dict[str, int]
    retrieved_bytes: int
    stored_bytes: int
    stored_chunks: int
    time_to_first_token_s: float
    kv_bits: int


class KeepDocuments(msgspec.Struct, tag=True):
    """Store the documents of the blended prompts, each on its own.

    Attributes:
        socket: Of the sidecar to store them through.
    """

    socket: str


class AskBlended(msgspec.Struct, tag=True):
    """Certify a way to blend, then answer the questions of the blended prompts with it.

    Attributes:
        socket: Of the sidecar to read the documents through.
        folder: Of the certificates.
        policy: Which tokens are recomputed.
        recompute_ratio: Share of them.
    """

    socket: str
    folder: str
    policy: str
    recompute_ratio: float


class BlendedAnswers(msgspec.Struct):
    """Report one way to blend.

    Attributes:
        kl_nats: The divergence from full recompute per token, by its certificate.
        top1_agreement: And the share of equal first choices.
        reason_against: Why prompts were computed in full instead; None if they were blended.
        num_answers: Questions that were asked.
        num_blended: Those whose prompts were blended.
        num_equal: Answers that are those of an engine without a cache.
        num_right: Answers that are right.
        num_prompt_tokens: Of all prompts together.
        num_reused_tokens: How many of them were retrieved.
    """

    kl_nats: float
    top1_agreement: float
    reason_against: str | None
    num_answers: int
    num_blended: int
    num_equal: int
    num_right: int
    num_prompt_tokens: int
    num_reused_tokens: int


class Engine:
    """An engine in a process of its own, which begins to load its model at once.

    Args:
        processes: Owner of the process.
        name: For messages and the log.

    Attributes:
        process: Its process.
    """

    def __init__(self, processes: Processes, name: str) -> None:
        self.process = processes.start(
            name, "lmcache_demo.engine_worker", stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def attach(self, socket: Path | None) -> None:
        """Attach it to a sidecar and wait until it is ready. It may be attached to another later.

        Args:
            socket: The sidecar's; None for no cache.

        Raises:
            DemoError: It ended, or was not ready in time.
        """
        self._asked(Attach(None if socket is None else str(socket)), READY_TIMEOUT_S)

    def ask(self, prompt: Prompt) -> Answer:
        """Generate; raises as `attach`, like the methods below."""
        return msgspec.json.decode(self._asked(prompt), type=Answer)

    def keep_documents(self, message: KeepDocuments) -> int:
        """Store the documents of the blended prompts; return their tokens."""
        return msgspec.json.decode(self._asked(message), type=int)

    def ask_blended(self, message: AskBlended) -> BlendedAnswers:
        """Certify a way to blend, and answer."""
        return msgspec.json.decode(self._asked(message), type=BlendedAnswers)

    def _asked(self, message: msgspec.Struct, timeout_s: float = ANSWER_TIMEOUT_S) -> bytes:
        """Send one message; return the line that answers it."""
        process, name = self.process.process, self.process.name
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(message) + b"\n")
            process.stdin.flush()
        except BrokenPipeError as exc:
            raise DemoError(f"{name} has ended:\n{self.process.tail()}") from exc
        ready, _, _ = select.select([process.stdout], [], [], timeout_s)
        line: bytes = process.stdout.readline() if ready else b""
        if not line:
            tail = self.process.tail()
            raise DemoError(f"{name} gave no answer within {timeout_s:.0f} s:\n{tail}")
        return line
