"""What one engine has stored, another one loads."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.sglang.engines import PAGE_SIZE
from tests.sglang.worlds import MODELS, TRAINED, Pair, Record, model_path, whole_pages
from tests.vllm.engines import CHUNK_SIZE, Ask, transfer_config
from tests.vllm.engines import engine_options as vllm_options
from tests.vllm.models import WIDE
from tests.vllm.sidecars import socket_of
from tests.vllm.test_damage import forge

LENGTHS = (
    *(PAGE_SIZE + 1, 2 * PAGE_SIZE - 1, 2 * PAGE_SIZE, 2 * PAGE_SIZE + 1),
    *(300, 1000, 16 * PAGE_SIZE, 3000),
)
NUM_NEW = 12


@pytest.mark.parametrize("model", MODELS)
def test_tokens_are_the_same_and_whole_pages_are_found(
    pair_of: Callable[[str], Pair], model: str, record_property: Record
) -> None:
    pair = pair_of(model)
    asks = [pair.ask(length) for length in LENGTHS]
    computed = pair.filled(asks)
    shares = []
    for ask, expected in zip(asks, computed, strict=True):
        (found,) = pair.second.generate([ask])
        assert found.tokens == expected.tokens, len(ask.tokens)
        assert found.finish_reason == "length"
        shares.append(found.num_cached / whole_pages(len(ask.tokens)))
    figure = f"{len(asks)} prompts, {min(shares):.1%}"
    record_property(f"{model}: equal tokens; least part of whole pages that was found", figure)
    assert min(shares) >= 0.9


def test_a_longer_prompt_finds_its_beginning(pair_of: Callable[[str], Pair]) -> None:
    """And so do several that begin alike, asked at once."""
    pair = pair_of(TRAINED)
    ask = pair.ask(1000)
    longer = [Ask(ask.tokens + pair.ask(50 * number).tokens, NUM_NEW) for number in range(1, 4)]
    pair.filled([ask])
    found = pair.second.generate(longer)
    computed = pair.first.generate(longer)
    assert [one.tokens for one in found] == [one.tokens for one in computed]
    assert min(one.num_cached for one in found) >= whole_pages(1001)


def test_prompts_of_other_tenants_are_not_found(pair_of: Callable[[str], Pair]) -> None:
    """SGLang's `cache_salt` keeps them apart, here too."""
    pair = pair_of(TRAINED)
    ask = pair.ask(500)
    pair.filled([ask])
    salted = Ask(ask.tokens, NUM_NEW, salt="tenant")
    assert pair.second.generate([salted])[0].num_cached == 0
    pair.second.generate([ask])
    pair.first.generate([salted])
    assert pair.first.generate([Ask(ask.tokens, NUM_NEW, salt="other")])[0].num_cached == 0


def test_the_kv_of_another_prompt_under_the_same_name_is_used(
    pair_of: Callable[[str], Pair],
) -> None:
    """The control: what is found is what the tokens come from."""
    pair = pair_of(TRAINED)
    ask = pair.ask(700, 24)
    (expected,) = pair.filled([ask])
    assert forge(pair.storage, lambda payload: payload[len(payload) // 2 :] * 2) > 0
    pair.sidecar.post("/v1/admin/clear", {"tiers": ["memory"]})
    (found,) = pair.second.generate([ask])
    assert found.num_cached >= whole_pages(700)
    assert found.tokens != expected.tokens


def test_vllm_at_the_same_sidecar_finds_its_own_alone(pair_of: Callable[[str], Pair]) -> None:
    pair = pair_of(TRAINED)
    vllm = pair.owner.engine("vllm", {"PYTHONPATH": os.environ["VLLM_PATH"]})
    extra = {"sidecar_socket": str(socket_of(pair.owner)), "prefill_tokens_per_s": 100.0}
    config = transfer_config({f"lmcache.{name}": value for name, value in extra.items()})
    path = model_path(Path(), TRAINED)
    vllm.open(vllm_options(path, kv_transfer_config=config))
    try:
        ours, theirs = pair.ask(1000), pair.ask(1000)
        pair.filled([ours])
        assert vllm.ask(ours).num_cached == 0
        vllm.ask(theirs)
        pair.settle()
        assert pair.second.generate([theirs])[0].num_cached == 0
        vllm.reset()
        assert vllm.ask(theirs).num_cached >= 3 * CHUNK_SIZE
        assert pair.second.generate([ours])[0].num_cached >= whole_pages(1000)
    finally:
        vllm.end()


def test_a_hit_is_faster_than_computing(
    pair_of: Callable[[str], Pair], record_property: Record
) -> None:
    """Of a model that computes most outside of attention, which SGLang's backend for processors
    computes again for every token of a cached prefix, too.
    """
    pair = pair_of(WIDE)
    cold, hit = [], []
    for _ in range(5):
        ask = pair.ask(3900, 4)
        cold.append(pair.first.call(60.0, do="first_token", ask=asdict(ask)))
        pair.settle()
        hit.append(pair.second.call(60.0, do="first_token", ask=asdict(ask)))
    found, computed = statistics.median(hit), statistics.median(cold)
    figure = f"{found:.3f} / {computed:.3f} s"
    record_property("first token at 3,900 tokens, found / computed, a third or less", figure)
    assert found <= computed / 3
