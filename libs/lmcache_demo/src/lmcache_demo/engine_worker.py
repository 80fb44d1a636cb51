"""One engine of the demo, in a process of its own: is told its sidecar and prompts, and answers,
all as JSON lines.
"""

from __future__ import annotations

import sys

import msgspec
import torch
from lmcache_core.config import LMCacheEngineConfig
from lmcache_core.engine import LMCacheEngine, LMCacheEngineBuilder
from lmcache_core.integrations.transformers import CachedCausalLM, connector_of, metadata_of
from lmcache_core.telemetry import (
    RETRIEVED_BYTES_TOTAL,
    RETRIEVED_TOKENS_TOTAL,
    STORED_BYTES_TOTAL,
    STORED_CHUNKS_TOTAL,
)

from lmcache_demo.blending_worker import BlendingWorker
from lmcache_demo.engines import (
    Answer,
    AskBlended,
    Attach,
    BlendedAnswers,
    KeepDocuments,
    Prompt,
)
from lmcache_demo.model import load_model

INSTANCE = "demo"
MODEL_NAME = "lmcache-demo-llama"


class Worker:
    """The model, without a cache engine until `attach`."""

    def __init__(self) -> None:
        self._model, self._tokenizer = load_model()
        self._engine: LMCacheEngine | None = None
        self._cached = CachedCausalLM(self._model, None)
        self._cached.generate(torch.arange(1, 65), 2)  # the first forward pass of a process is slow
        self._blending: BlendingWorker | None = None

    def blend(self, message: KeepDocuments | AskBlended) -> int | BlendedAnswers:
        """Keep the documents of blended prompts, or answer them."""
        if self._blending is None:
            self._blending = BlendingWorker()
        return (
            self._blending.keep(message)
            if isinstance(message, KeepDocuments)
            else self._blending.ask(message)
        )

    def attach(self, socket: str | None) -> None:
        """Give the model a cache engine at that sidecar; None: no cache engine."""
        if self._engine is not None:
            LMCacheEngineBuilder.destroy(INSTANCE)
        model, self._engine = self._model, None
        self._cached = CachedCausalLM(model, None)
        if socket is None:
            return
        config = LMCacheEngineConfig.from_defaults(
            remote_url=None, sidecar_socket=socket, tier_timeout_s=5.0
        )
        self._engine = LMCacheEngineBuilder.get_or_create(
            INSTANCE, config, metadata_of(model, MODEL_NAME, config), connector_of(model)
        )
        self._cached = CachedCausalLM(model, self._engine)

    def answer(self, prompt: Prompt) -> Answer:
        """Generate greedily."""
        ids = torch.tensor(self._tokenizer(prompt.text).input_ids)
        before = self._counters()
        generation = self._cached.generate(ids, prompt.max_new_tokens, eos_token_id=())
        moved = {name: value - before.get(name, 0) for name, value in self._counters().items()}
        by_tier = {
            tier: n for (name, tier), n in moved.items() if name == RETRIEVED_TOKENS_TOTAL and n
        }
        return Answer(
            generation.tokens,
            self._tokenizer.decode(generation.tokens),
            generation.num_prompt_tokens,
            generation.num_reused_tokens,
            by_tier,
            _total(moved, RETRIEVED_BYTES_TOTAL),
            _total(moved, STORED_BYTES_TOTAL),
            _total(moved, STORED_CHUNKS_TOTAL),
            generation.time_to_first_token_s,
            8 * self._model.dtype.itemsize,
        )

    def _counters(self) -> dict[tuple[str, str], int]:
        return self._engine.counters.snapshot() if self._engine is not None else {}


def _total(moved: dict[tuple[str, str], int], counter: str) -> int:
    return sum(value for (name, _), value in moved.items() if name == counter)


def main() -> None:
    """Serve prompts until standard input ends."""
    worker = Worker()
    decoder = msgspec.json.Decoder(Attach | Prompt | KeepDocuments | AskBlended)
    for line in sys.stdin.buffer:
        message = decoder.decode(line)
        if isinstance(message, Attach):
            worker.attach(message.socket)
            sys.stdout.write("ready\n")
        else:
            answer = (
                worker.answer(message) if isinstance(message, Prompt) else worker.blend(message)
            )
            sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
        sys.stdout.flush()
    LMCacheEngineBuilder.destroy(INSTANCE)


if __name__ == "__main__":
    main()
