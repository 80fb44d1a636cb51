"""A model that changes after `open` never gets the KV of what it was, nor stores under its name."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import lmcache_core
import pytest
import torch
from lmcache_core.integrations.transformers import CachedCausalLM, metadata_of
from transformers import LlamaForCausalLM

from tests.fixtures.tiny_llama import VOCAB, make_model

CHUNK = 16
PROMPT = torch.randint(0, VOCAB, (100,), generator=torch.Generator().manual_seed(7))
ALL_BUT_ONE = len(PROMPT) - 1
Change = Callable[[LlamaForCausalLM], object]


class AdaptedLinear(torch.nn.Linear):
    """A layer with adapters, which keeps what is active in attributes, as peft does."""

    def __init__(self, inner: torch.nn.Linear) -> None:
        super().__init__(inner.in_features, inner.out_features, bias=False)
        self.weight = inner.weight
        generator = torch.Generator().manual_seed(3)
        self.adapters = torch.nn.ParameterDict(
            {
                name: torch.nn.Parameter(
                    torch.randn(self.weight.shape, generator=generator) * 0.1, requires_grad=False
                )
                for name in ("a", "b")
            }
        )
        self.scaling = {"a": 1.0, "b": 1.0}
        self._active_adapter: str | list[str] = "a"
        self._disable_adapters = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        active = self._active_adapter
        active = [active] if isinstance(active, str) else active
        for name in [] if self._disable_adapters else active:
            y = y + self.scaling[name] * torch.nn.functional.linear(x, self.adapters[name])
        return y


def adapted_model() -> LlamaForCausalLM:
    model = make_model(0)
    for layer in model.model.layers:
        layer.mlp.down_proj = AdaptedLinear(layer.mlp.down_proj)
    return model.eval()


@contextlib.contextmanager
def opened(model: LlamaForCausalLM, disk: Path, **options: object) -> Iterator[CachedCausalLM]:
    with lmcache_core.open(
        model, disk=disk, disk_gb=0.01, memory_gb=0.01, chunk_size=CHUNK, **options
    ) as cache:
        yield cache


def plain(model: LlamaForCausalLM) -> list[int]:
    return CachedCausalLM(model, None).generate(PROMPT, 12).tokens


def each_adapted(model: LlamaForCausalLM) -> list[AdaptedLinear]:
    return [one for one in model.modules() if isinstance(one, AdaptedLinear)]


def activate(*names: str) -> Change:
    def change(model: LlamaForCausalLM) -> None:
        for one in each_adapted(model):
            one._active_adapter = list(names)

    return change


def disable(model: LlamaForCausalLM) -> None:
    for one in each_adapted(model):
        one._disable_adapters = True


def rescale(model: LlamaForCausalLM) -> None:
    for one in each_adapted(model):
        one.scaling["a"] = -1.0


@torch.no_grad()
def write_in_place(model: LlamaForCausalLM) -> None:
    model.model.layers[0].self_attn.v_proj.weight.neg_()


def put_other_data(model: LlamaForCausalLM) -> None:
    weight = model.model.layers[0].self_attn.v_proj.weight
    weight.data = -weight.data


def train_one_step(model: LlamaForCausalLM) -> None:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input_ids=PROMPT[None], labels=PROMPT[None]).loss.backward()
    optimizer.step()
    model.eval()


def turn_otherwise(model: LlamaForCausalLM) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


def replace_a_layer(model: LlamaForCausalLM) -> None:
    class Negated(torch.nn.Identity):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return -x

    model.model.layers[0].post_attention_layernorm = Negated().eval()


def change_a_norm(model: LlamaForCausalLM) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon = 10.0


CHANGES = [
    activate("b"),
    disable,
    rescale,
    write_in_place,
    put_other_data,
    train_one_step,
    turn_otherwise,
    replace_a_layer,
    change_a_norm,
]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_model_answers_as_it_is_now_and_leaves_the_old_name_alone(
    change: Change, tmp_path: Path
) -> None:
    model = adapted_model()
    was = plain(model)
    with opened(model, tmp_path) as cache:
        assert cache.generate(PROMPT, 12).tokens == was
        change(model)
        now = plain(model)
        assert now != was, "else this test could not fail"
        first, second = cache.generate(PROMPT, 12), cache.generate(PROMPT, 12)
        assert (first.tokens, first.num_reused_tokens) == (now, 0)
        assert (second.tokens, second.num_reused_tokens) == (now, ALL_BUT_ONE)
        assert cache.engine is not None
        assert cache.engine.metadata == metadata_of(model, "llama", cache.engine.config)
    with opened(adapted_model(), tmp_path) as cache:
        original = cache.generate(PROMPT, 12)
        assert (original.tokens, original.num_reused_tokens) == (was, ALL_BUT_ONE)
    with opened(model, tmp_path) as cache:
        changed = cache.generate(PROMPT, 12)
        assert (changed.tokens, changed.num_reused_tokens) == (now, ALL_BUT_ONE), (
            "another process that opens the model as it is now finds what it stored"
        )


def test_write_that_leaves_no_mark_is_announced(tmp_path: Path) -> None:
    model = make_model(0)
    with opened(model, tmp_path) as cache:
        cache.generate(PROMPT, 12)
        # One element, which no sample is likely to hold, that changes every answer.
        model.model.layers[0].self_attn.v_proj.weight.data[3, 5] += 100.0
        now = plain(model)
        cache.model_changed()
        assert cache.engine is not None
        assert cache.engine.lookup(PROMPT) == 0
        answer = cache.generate(PROMPT, 12)
        assert (answer.tokens, answer.num_reused_tokens) == (now, 0)


@pytest.mark.parametrize("moment", ["retrieve", "note_prefill"])
def test_change_during_a_call_is_neither_loaded_nor_stored(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adapted_model()
    known, new = PROMPT[: 3 * CHUNK + 5], PROMPT
    with opened(model, tmp_path, save_decode_cache=True) as cache:
        engine = cache.engine
        assert engine is not None
        cache.generate(known, 4)
        whole = getattr(engine, moment)

        def changing(*args: object, **kwargs: object) -> object:
            found = whole(*args, **kwargs)
            activate("b")(model)
            return found

        monkeypatch.setattr(engine, moment, changing)
        answer = cache.generate(new, CHUNK + 1)
        monkeypatch.undo()
        if moment == "retrieve":
            assert answer.num_reused_tokens == 0
            assert answer.tokens[:12] == plain(model)
        activate("b")(model)
        want = plain(model)
        again = cache.generate(new, 12)
        assert (again.tokens, again.num_reused_tokens) == (want, 0)
        activate("a")(model)
        want = plain(model)
        again = cache.generate(new, 12)
        assert again.tokens == want
        assert again.num_reused_tokens == 3 * CHUNK, "only what was stored before the change"


def hook(model: LlamaForCausalLM) -> Callable[[], object]:
    handle = model.model.layers[0].register_forward_hook(lambda _m, _i, output: output * 1.5)
    return handle.remove


def replaced_forward(model: LlamaForCausalLM) -> Callable[[], object]:
    norm = model.model.layers[0].input_layernorm
    whole = norm.forward
    norm.forward = lambda x: whole(x) * 1.5
    return lambda: delattr(norm, "forward")


def train_mode(model: LlamaForCausalLM) -> Callable[[], object]:
    model.model.layers[1].mlp.train()
    return model.eval


def other_dtype(model: LlamaForCausalLM) -> Callable[[], object]:
    weights = {name: one.clone() for name, one in model.state_dict().items()}
    buffers = {name: one.clone() for name, one in model.named_buffers()}
    model.to(torch.bfloat16)

    def back() -> None:
        model.to(torch.float32).load_state_dict(weights)
        for name, one in model.named_buffers():
            one.copy_(buffers[name])

    return back


@pytest.mark.parametrize("begin", [hook, replaced_forward, train_mode, other_dtype])
def test_what_cannot_be_cached_any_more_is_computed_until_it_can(
    begin: Callable[[LlamaForCausalLM], Callable[[], object]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make_model(0)
    with opened(model, tmp_path, save_decode_cache=True) as cache:
        was = cache.generate(PROMPT, 12).tokens
        end = begin(model)
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                answer = cache.generate(PROMPT, 12)
                assert (answer.tokens, answer.num_reused_tokens) == (plain(model), 0)
            cache.keep_document(PROMPT)
        warnings = [one for one in caplog.messages if "computing without the cache" in one]
        assert len(warnings) == 1, "once, not at every prompt"
        end()
        answer = cache.generate(PROMPT, 12)
        assert (answer.tokens, answer.num_reused_tokens) == (was, ALL_BUT_ONE)


def test_kv_that_was_computed_before_a_change_is_not_saved_after_it(tmp_path: Path) -> None:
    model = adapted_model()
    with opened(model, tmp_path) as cache:
        kv, num_loaded = cache.load(PROMPT)
        assert num_loaded == 0
        with torch.inference_mode():
            model(input_ids=PROMPT[None], past_key_values=kv, use_cache=True)
        activate("b")(model)
        cache.generate(PROMPT[:5], 1)
        cache.save(PROMPT, kv)
        want = plain(model)
        answer = cache.generate(PROMPT, 12)
        assert (answer.tokens, answer.num_reused_tokens) == (want, 0)
