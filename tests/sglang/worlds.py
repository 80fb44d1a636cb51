"""Two engines and their sidecar and storage."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.sglang.engines import LINKER, PAGE_SIZE, engine_options, linked, start
from tests.vllm.engines import Answer, Ask
from tests.vllm.models import MHA, MLA
from tests.vllm.processes import ROOT, EngineProcess, Owner, Service
from tests.vllm.references import prompt
from tests.vllm.sidecars import await_calm, eventually, sidecar, socket_of, storage

TRAINED = "trained"
"""The demo's llama, two of whose heads share keys and values (GQA)."""
MODELS = (TRAINED, MHA, MLA)
LATENT_LINKER = "tests.sglang.latents:LMCacheLinker"
Record = Callable[[str, object], None]
"""pytest's `record_property`: a figure that is printed at the end."""
_NUMBERS = itertools.count(1)


def model_path(models: Path, model: str) -> Path:
    """Where a model lies."""
    if model == TRAINED:
        return ROOT / "libs/lmcache_demo/src/lmcache_demo/model/assets"
    return models / model


@dataclass
class Pair:
    """Two engines at one sidecar.

    Attributes:
        first: Computes what the other one finds.
    """

    owner: Owner
    sidecar: Service
    first: EngineProcess
    second: EngineProcess
    storage: Service
    vocabulary: int = field(default=4096)

    def ask(self, length: int, num_new: int = 12, **more: Any) -> Ask:
        """A prompt that begins as none before it."""
        tokens = prompt(next(_NUMBERS), length)
        return Ask(tuple(token % self.vocabulary for token in tokens), num_new, **more)

    def settle(self) -> None:
        """Wait until everything that was computed is stored, also at the storage."""
        await_calm(self.sidecar)
        eventually(lambda: self.sidecar.get("/v1/status")["settled"], "not written everywhere")

    def await_hits(self) -> None:
        """Wait until the second engine finds what the first one stores."""

        def finds() -> bool:
            ask = self.ask(300, 1)
            self.first.generate([ask])
            time.sleep(0.2)
            return self.second.generate([ask])[0].num_cached >= whole_pages(300)

        eventually(finds, "the engines do not come back to the sidecar", 90.0)

    def filled(self, asks: Sequence[Ask]) -> list[Answer]:
        """Let the first engine compute these, and wait until the sidecar has them; its answers."""
        answers = self.first.generate(asks)
        assert all(answer.num_cached == 0 for answer in answers), "it has seen none of them"
        self.settle()
        return answers


def opened_pair(
    directory: Path,
    models: Path,
    model: str,
    linker: str = LINKER,
    tokens_per_s: float = 100.0,
    **settings: Any,
) -> Pair:
    """A running pair.

    Args:
        linker: The second engine's.
        tokens_per_s: How fast they believe to compute. So slow an engine waits for hits.
        **settings: Of the sidecar.
    """
    own = LATENT_LINKER if model == MLA else LINKER
    owner = Owner(directory).__enter__()
    try:
        store = storage(owner, disk_path=directory / "storage-disk", disk_gb=0.5)
        beside = sidecar(owner, verify_hot="always", remote_url=remote_url(store), **settings)
        engines = []
        for name, named in (("first", own), ("second", own if linker == LINKER else linker)):
            linked_in = linked(socket_of(owner), named, tokens_per_s)
            options = engine_options(model_path(models, model), **linked_in)
            engines.append(start(owner, name, options))
    except BaseException:
        owner.__exit__(None, None, None)
        raise
    return Pair(owner, beside, *engines, store, vocabulary=2048 if model == TRAINED else 4096)


def remote_url(storage: Service) -> str:
    """Where sidecars reach it; another one after each start."""
    return f"lm://127.0.0.1:{storage.ports['lm_port']}"


def whole_pages(length: int) -> int:
    """Tokens of a prompt that another engine can find: its last token is always computed."""
    return (length - 1) // PAGE_SIZE * PAGE_SIZE
