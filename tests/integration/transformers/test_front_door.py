"""`lmcache_core.open`: a model and its cache in one call."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import lmcache_core
import numpy as np
import pytest
import torch
from lmcache_core.integrations.transformers import CachedCausalLM
from lmcache_demo.model import MODEL_DIR
from transformers import LlamaForCausalLM

from tests.fixtures.tiny_llama import VOCAB, make_model
from tests.fixtures.waiting import threads_end
from tests.unit.docs.pages import ROOT, blocks

SMALL = {"memory_gb": 0.01, "chunk_size": 16}
OTHERS: set[threading.Thread] = set()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return make_model(0)


def prompt(num_tokens: int = 70) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randint(0, VOCAB, (num_tokens,), generator=generator)


@pytest.fixture(scope="module", autouse=True)
def _threads_of_other_tests() -> None:
    OTHERS.update(threading.enumerate())


def test_the_readme_runs_as_it_is_pasted(tmp_path: Path) -> None:
    """Byte for byte: a hub cache without a network has the demo's model under the block's name."""
    [program] = blocks(ROOT / "README.md", "python")
    [repository] = re.findall(r'(?m)^name = "(\S+/\S+)"', program)
    cached = tmp_path / "hub" / f"models--{repository.replace('/', '--')}"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text("0" * 40)
    (cached / "snapshots").mkdir()
    (cached / "snapshots" / ("0" * 40)).symlink_to(MODEL_DIR)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    first, second = (int(line.split(" of ")[0]) for line in done.stdout.splitlines())
    assert first == 0
    assert second >= 256
    assert any((tmp_path / "kv-cache").iterdir())


def test_a_disk_outlives_the_cache(model: LlamaForCausalLM, tmp_path: Path) -> None:
    ids = prompt()
    want = CachedCausalLM(model, None).generate(ids, 8).tokens
    for reused, disk in ((0, tmp_path / "a, b"), (69, f"file://{tmp_path}/a%2C%20b/")):
        with lmcache_core.open(model, disk=disk, disk_gb=0.01, **SMALL) as cache:
            answer = cache.generate(ids, max_new_tokens=8)
            assert (answer.tokens, answer.num_reused_tokens) == (want, reused)
        cache.close()
    threads_end("lmcache", OTHERS)


def test_the_name_does_not_depend_on_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("llama").mkdir()
    model = make_model(0)
    for source, want in (
        ("org/model", "org/model"),
        ("./llama", "llama"),
        (f"{tmp_path}/llama/", "llama"),
    ):
        model.name_or_path = source
        with lmcache_core.open(model, **SMALL) as cache:
            assert cache.engine is not None
            assert cache.engine.metadata.model_name == want


def test_an_unavailable_tier_is_a_miss(model: LlamaForCausalLM, tmp_path: Path) -> None:
    ids = prompt()
    want = CachedCausalLM(model, None).generate(ids, 8).tokens
    for place in ({"remote": "lm://127.0.0.1:9"}, {"sidecar": tmp_path / "absent.sock"}):
        with lmcache_core.open(model, name="org/model", **place, **SMALL) as cache:
            assert cache.generate(ids, max_new_tokens=8).tokens == want


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"remote": "s3://bucket"}, "remote='s3://bucket': must be a URL with one of"),
        ({"disk": "/tmp/d", "disk_gb": 0}, "a disk without room keeps nothing"),
        ({"disk": "/tmp/d", "sidecar": "/tmp/s"}, "the tiers are the sidecar's"),
        ({"disk": 5}, "disk=5: must be a directory"),
        ({"chunk_sizes": 1}, "did you mean 'chunk_size'?"),
        ({"dsik": "/tmp/d"}, "open has no option 'dsik'; did you mean 'disk'?"),
        ({"disk": __file__}, "is no directory and cannot be made one: File exists"),
        ({"disk": "/proc/x"}, "disk='/proc/x': is no directory and cannot be made one"),
        ({"local_disk": "/tmp/d"}, "local_disk='/tmp/d': open calls it disk"),
        ({"enable_blending": True}, "blending needs a separator"),
        ({"enable_blending": True, "separator": [VOCAB]}, f"separator has the token id {VOCAB}"),
    ],
)
def test_a_bad_option_is_refused(
    model: LlamaForCausalLM, options: dict[str, object], message: str
) -> None:
    with pytest.raises(lmcache_core.ConfigError) as refused:
        lmcache_core.open(model, **options)  # type: ignore[arg-type]
    assert message in str(refused.value)
    threads_end("lmcache", OTHERS)


def test_an_answer_ends_where_the_model_ends_it() -> None:
    model = make_model(0)
    plain = CachedCausalLM(model, None)
    endless = plain.generate(prompt(), 12).tokens
    assert len(set(endless)) > 3
    several = [endless[5], VOCAB - 1]
    for end in (endless[5], several, torch.tensor(endless[5]), torch.tensor(several)):
        model.generation_config.eos_token_id = end
        want = endless[: endless.index(endless[5]) + 1]
        assert plain.generate(prompt(), 12).tokens == want
        whole = model.generate(prompt()[None], max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert whole[0, 70:].tolist() == want
        assert plain.generate(prompt(), 12, eos_token_id=()).tokens == endless
        for first in (endless[0], np.array(endless[:1])):
            assert len(plain.generate(prompt(), 12, eos_token_id=first).tokens) == 1


@pytest.mark.parametrize(
    "form",
    [
        prompt()[None],
        prompt()[None].numpy(),
        prompt().tolist(),
        {"input_ids": prompt()[None], "attention_mask": torch.ones(1, 70)},
    ],
)
def test_one_prompt_is_taken_as_tokenizers_return_it(
    model: LlamaForCausalLM, form: torch.Tensor | list[int]
) -> None:
    plain = CachedCausalLM(model, None)
    assert plain.generate(form, 8).tokens == plain.generate(prompt(), 8).tokens


def test_the_models_own_generate_takes_the_loaded_kv(model: LlamaForCausalLM) -> None:
    with lmcache_core.open(model, name="org/model", **SMALL) as cache:
        want = cache.generate(prompt(), 8).tokens
        kv, num_reused = cache.load(prompt())
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        whole = model.generate(prompt()[None], past_key_values=kv, **options)
        assert num_reused > 0
        assert whole[0, len(prompt()) :].tolist() == want
        with pytest.raises(TypeError, match="generate has no temperature, top_p: it is greedy"):
            cache.generate(prompt(), 8, temperature=0.5, top_p=0.9)
    with pytest.raises(RuntimeError, match="closed; open it again"):
        cache.generate(prompt(), 8)


@pytest.mark.parametrize("options", [{"name": 7}, {"separator": "</s>", "enable_blending": True}])
def test_an_option_of_another_type_is_refused(
    model: LlamaForCausalLM, options: dict[str, Any]
) -> None:
    with pytest.raises(TypeError, match=f"{next(iter(options))}="):
        lmcache_core.open(model, **options, **SMALL)
    threads_end("lmcache", OTHERS)


IDS = prompt()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.ones(2, 7, dtype=torch.int64), 8), ValueError, "holds 2 prompts"),
        (([], 8), ValueError, "at least one"),
        ((torch.ones(1, 1, 7, dtype=torch.int64), 8), ValueError, "of shape (1, 1, 7)"),
        (([0.5], 8), ValueError, "not torch.float32"),
        (([1, VOCAB], 8), ValueError, "input_ids"),
        (("hello", 8), TypeError, "input_ids='hello': must be token ids"),
        ((IDS, 8, "</s>"), TypeError, "eos_token_id='</s>': must be token ids"),
        ((IDS, "3"), TypeError, "max_new_tokens='3': must be an integer of at least 1"),
        ((IDS, 0), ValueError, "max_new_tokens=0: must be an integer of at least 1"),
    ],
)
def test_a_bad_argument_of_generate_is_refused(
    model: LlamaForCausalLM, arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as refused:
        CachedCausalLM(model, None).generate(*arguments)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("org/model", "model='org/model': must be a loaded model, such as"),
        (torch.nn.Linear(1, 1), "must be a loaded model"),
    ],
)
def test_anything_but_a_model_is_refused(given: object, message: str) -> None:
    with pytest.raises(TypeError) as refused:
        lmcache_core.open(given, **SMALL)  # type: ignore[arg-type]
    assert message in str(refused.value)
    threads_end("lmcache", OTHERS)
