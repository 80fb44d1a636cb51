"""One engine of the demo, in a process of its own: reads prompts as JSON lines, answers as JSON lines.

    python -m lmcache_demo.engine_worker [SOCKET]

Without a socket it runs with no cache at all.
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

from lmcache_demo.engine_messages import Answer, Prompt
from lmcache_demo.model import load_model

INSTANCE = "demo"
MODEL_NAME = "lmcache-demo-llama"


class Worker:
    """The model behind a cache engine, or behind none.

    Args:
        socket: The sidecar's socket; None for no cache.
    """

    def __init__(self, socket: str | None) -> None:
        model, self._tokenizer = load_model()
        self._engine: LMCacheEngine | None = None
        if socket is not None:
            config = LMCacheEngineConfig.from_defaults(remote_url=None, sidecar_socket=socket, tier_timeout_s=5.0)
            self._engine = LMCacheEngineBuilder.get_or_create(INSTANCE, config, metadata_of(model, MODEL_NAME, config), connector_of(model))
        self._cached = CachedCausalLM(model, self._engine)
        CachedCausalLM(model, None).generate(torch.arange(1, 65), 2)  # the first forward pass of a process is slow

    def answer(self, prompt: Prompt) -> Answer:
        """Generate greedily."""
        ids = torch.tensor(self._tokenizer(prompt.text).input_ids)
        before = self._counters()
        generation = self._cached.generate(ids, prompt.max_new_tokens)
        moved = {name: value - before.get(name, 0) for name, value in self._counters().items()}
        by_tier = {tier: n for (name, tier), n in moved.items() if name == RETRIEVED_TOKENS_TOTAL and n}
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
        )

    def _counters(self) -> dict[tuple[str, str], int]:
        return self._engine.counters.snapshot() if self._engine is not None else {}


def _total(moved: dict[tuple[str, str], int], counter: str) -> int:
    return sum(value for (name, _), value in moved.items() if name == counter)


def main() -> None:
    """Serve prompts until standard input ends."""
    worker = Worker(sys.argv[1] if len(sys.argv) > 1 else None)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin.buffer:
        answer = worker.answer(msgspec.json.decode(line, type=Prompt))
        sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
        sys.stdout.flush()
    LMCacheEngineBuilder.destroy(INSTANCE)


if __name__ == "__main__":
    main()
