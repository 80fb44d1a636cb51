"""Everything that docs/blend.md shows is run as it is written there, on the demonstration's
model.
"""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from pydoc_data import topics
from typing import Any

import pytest
from lmcache_core.blend import certify
from lmcache_demo.model import MODEL_DIR

from tests.unit.docs.pages import ROOT, blocks

PAGE = ROOT / "docs" / "blend.md"
SMALL = ("--prompts", "2", "--documents", "2", "--document-tokens", "64", "--ending-tokens", "16")
LOOSE = ("--max-kl", "9", "--min-agreement", "0", "--max-loss", "9")
OWN_POLICY = """
from dataclasses import dataclass

from lmcache_core.blend import CacheBlendImpl, RotaryEmbedding
from lmcache_core.integrations.transformers.blended import BlendingModel, rope_parameters_of


@dataclass(frozen=True)
class EveryNth:
    interval: int
    check_layer: int = 0
    needs_deviation: bool = False

    def choose(self, candidates):
        return candidates.positions % self.interval == 0


executor = CacheBlendImpl(0.0, EveryNth(8))
executor.set_mover(RotaryEmbedding(rope_parameters_of(model.config)).mover)
retriever = SPTBlendRetriever(separator, engine, engine.metadata)
starts = torch.tensor([0, len(prompts[0])])
print(BlendingModel(model, retriever, executor).prefill(prompts[0], starts).num_computed)
retriever.close()
"""
"""The example of `SelectionPolicy`."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With the files that the page names."""
    shutil.copytree(MODEL_DIR, tmp_path / "llama", ignore=shutil.ignore_patterns("two_documents"))
    (tmp_path / "held-out.txt").write_text(topics.topics["import"], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_does_what_it_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [command] = [line for block in blocks(PAGE, "sh") for line in block.splitlines()]
    program, arguments = command.split(" --", 1)
    assert program == "python -m lmcache_core.blend.certify"
    assert certify.main([*shlex.split(f"--{arguments}"), *SMALL, *LOOSE]) == 0
    capsys.readouterr()
    names: dict[str, Any] = {"__name__": "page"}
    snippets = [*blocks(PAGE, "python"), OWN_POLICY]
    for code in snippets:
        exec(compile(code, str(PAGE), "exec", dont_inherit=True), names)
    names["cache"].close()
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len(snippets) == 3
    num_documents = sum(map(len, names["documents"]))
    assert said[0] == f"True {num_documents} None"
    assert said[1].startswith(f"{2 * num_documents} ")
    assert said[1].endswith(f"torch.Size([2, 1, {names['model'].config.vocab_size}])")
    assert num_documents // 8 <= int(said[2]) < num_documents // 4
