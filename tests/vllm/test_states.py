"""Models with recurrent state and attention: a hit needs the state after its last token."""

from __future__ import annotations

import contextlib
import math
import threading
from dataclasses import dataclass, replace
from typing import Any

import pytest
from lmcache_core.engine.transfer import BegunLoad, KVTransfer
from lmcache_core.sidecar import SidecarChunkStore
from vllm import SamplingParams

from tests.vllm.engines import Answer, Ask, running_engine
from tests.vllm.models import GATED_DELTA, MAMBA2
from tests.vllm.references import TOLERANCES, References, distance, prompt
from tests.vllm.sabotage import AFTER, BEFORE, Sabotage
from tests.vllm.sidecars import Growth, await_calm, eventually, storage
from tests.vllm.test_damage import forge
from tests.vllm.test_failed_loads import NothingComes
from tests.vllm.worlds import BACK_S, BOUND_S, World

pytestmark = pytest.mark.since("0.32")


@dataclass(frozen=True)
class Kind:
    """A model, and how it is served here.

    Attributes:
        model: Its name.
        dtype: The only one that vLLM has for it on a CPU.
        chunk_size: vLLM's block size for it.
        length: Tokens of a prompt of which the last few are computed after a hit: what went into
            the state long ago has little effect.
        step: Tokens in a step of prefill. Of Mamba-2, vLLM saves no state inside of a step on a
            CPU (0.32.0 ends with an error).
        drafts: vLLM's `speculative_config`.
    """

    model: str
    dtype: str
    chunk_size: int
    length: int
    step: int
    drafts: dict[str, Any] | None = None

    def options(self, world: World, **options: Any) -> dict[str, Any]:
        """Options of an engine."""
        common: dict[str, Any] = {
            "dtype": self.dtype,
            "enable_prefix_caching": True,
            "max_num_batched_tokens": self.step,
            "lmcache_chunk_size": self.chunk_size,
            "speculative_config": self.drafts,
        }
        return world.options(self.model, **(common | options))

    def whole(self, num_tokens: int) -> int:
        """How many tokens of a prompt can be loaded: at least one is computed."""
        return (num_tokens - 1) // self.chunk_size * self.chunk_size

    def kept(self, num_tokens: int) -> int:
        """Where vLLM keeps the last state of a prompt. With drafts, it computes the last whole
        block again for a layer that predicts them.
        """
        return self.whole(num_tokens) - (self.chunk_size if self.drafts else 0)

    def filling(self, ask: Ask) -> Ask:
        """A request that begins like it, and that leaves all that can be loaded of it."""
        more = prompt(89, self.chunk_size) if self.drafts else ()
        return replace(ask, tokens=ask.tokens + more)


GATED = Kind(GATED_DELTA, "bfloat16", 128, 899, 512)
MAMBA = Kind(MAMBA2, "float32", 256, 1027, 256)
DRAFTED = replace(GATED, drafts={"method": "mtp", "num_speculative_tokens": 3})
KINDS = pytest.mark.parametrize(
    "kind", [GATED, MAMBA, DRAFTED], ids=["gated delta net", "mamba2", "drafts"]
)
AT, FLIPPED = 6 * 384 * 2 + 4 * 1000 + 3, 0x40
"""A byte of `DRAFTED`'s state, behind that of the convolutions: the exponent of a number."""
DENSE = {"prefix_cache_retention_interval": None}
"""vLLM keeps the state of each step, not only that at the end of a prompt."""


class LateLoads:
    """The chunk store's loads begin, and do not end before they may."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.have_begun, self.may_end = threading.Event(), threading.Event()
        self._get = SidecarChunkStore.get
        patch.setattr(SidecarChunkStore, "get", lambda *args, **options: self._late(args, options))

    def _late(self, args: Any, options: Any) -> Any:
        self.have_begun.set()
        assert self.may_end.wait(BOUND_S)
        return self._get(*args, **options)


def check(references: References, kind: Kind, asks: list[Ask], answers: list[Answer]) -> None:
    """Fail unless the answers are those without a cache, up to the first word that is as likely as
    another one: in bfloat16 that is not rare, and requests that are computed in other steps are
    added up in another order.
    """
    tolerance = 4 * TOLERANCES[kind.dtype]
    # Several tokens at once are added up in another order, too.
    options = {"speculative_config": kind.drafts} if kind.drafts else {}
    wanted_answers = references.answers(asks, kind.model, kind.dtype, **options)
    for answer, expected in zip(answers, wanted_answers, strict=True):
        assert answer.finish_reason == expected.finish_reason
        words = zip(answer.tokens, expected.tokens, strict=True)
        same = next((i for i, (one, other) in enumerate(words) if one != other), len(answer.tokens))
        # Of the first word that differs, too, what came before is the same.
        begin, wanted = (
            replace(one, logprobs=one.logprobs[: same + 1]) for one in (answer, expected)
        )
        assert distance(begin, wanted) <= tolerance
        if same < len(answer.tokens):
            likely = expected.logprobs[same]
            assert max(likely.values()) - likely.get(answer.tokens[same], -math.inf) <= tolerance


@KINDS
def test_hits(world: World, kind: Kind) -> None:
    """In an engine that has computed nothing itself."""
    sidecar = world.sidecar()
    ask, branch = Ask(prompt(90, kind.length)), Ask(prompt(90, 600) + prompt(91, 300))
    longer = Ask(prompt(90, kind.length) + prompt(92, 300))
    with running_engine(kind.options(world, **DENSE)) as first:
        cold = first.ask(kind.filling(ask))
        await_calm(sidecar)
    with running_engine(kind.options(world, **DENSE)) as second:
        answers = [second.ask(one) for one in (ask, branch, longer)]
        second.reset()
        answers += second.generate([branch, ask])
        num_drafts = second.metrics().get("vllm:spec_decode_num_draft_tokens", 0)
        assert (num_drafts > 0) == (kind.drafts is not None)
    assert cold.num_cached == 0
    whole, part = kind.whole(kind.length), 512  # where a step has ended
    assert [answer.num_cached for answer in answers] == [whole, part, whole, kind.kept(900), whole]
    asks = [kind.filling(ask), ask, branch, longer, branch, ask]
    check(world.references, kind, asks, [cold, *answers])


def test_states_at_the_end_of_prompts_alone(world: World) -> None:
    """This is vLLM's default. The next turn of a conversation continues from there."""
    sidecar = world.sidecar()
    asks = [Ask(prompt(93, 1000)), Ask(prompt(93, 1000) + prompt(94, 700))]
    branch = Ask(prompt(93, 600) + prompt(95, 300))
    with running_engine(GATED.options(world)) as first:
        answers = [first.ask(asks[0])]
        await_calm(sidecar)
    with running_engine(GATED.options(world)) as second:
        answers += [second.ask(one) for one in (asks[1], branch)]
        await_calm(sidecar)
    with running_engine(GATED.options(world)) as third:
        answers += [third.ask(asks[1])]
    assert [answer.num_cached for answer in answers] == [0, 896, 0, GATED.whole(1700)]
    check(world.references, GATED, [asks[0], asks[1], branch, asks[1]], answers)


@pytest.mark.parametrize("kind", [GATED, DRAFTED], ids=["gated delta net", "drafts"])
def test_without_its_state_an_answer_is_another(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    """So a state that is lost or wrong does not go unnoticed by these tests."""
    sidecar = world.sidecar()
    ask = Ask(prompt(96, kind.length))
    finish = KVTransfer.finish_load

    def finish_attention(transfer: KVTransfer, begun: BegunLoad, *others: Any) -> int:
        if "state" not in begun.named[0][2].group:
            return finish(transfer, begun, *others)
        num_chunks = begun.num_fitting
        transfer.abandon_load(begun)
        return num_chunks

    with running_engine(kind.options(world)) as first:
        first.ask(kind.filling(ask))
        await_calm(sidecar)
    monkeypatch.setattr(KVTransfer, "finish_load", finish_attention)
    with running_engine(kind.options(world)) as second:
        wrong = second.ask(ask)
        assert wrong.num_cached == kind.whole(kind.length)
    with pytest.raises(AssertionError):
        check(world.references, kind, [ask], [wrong])


@pytest.mark.parametrize("is_forged", [True, False])
def test_one_bit_of_a_state_changes_the_answer(world: World, is_forged: bool) -> None:
    """The control: its digest fits. With drafts, as without."""
    keeper, ask = storage(world.owner), Ask(prompt(109, DRAFTED.length))
    remote = {"remote_url": f"lm://127.0.0.1:{keeper.ports['lm_port']}"}
    first = world.sidecar("first", **remote)
    with running_engine(DRAFTED.options(world, at="first")) as engine:
        engine.ask(DRAFTED.filling(ask))
        await_calm(first)
        eventually(lambda: first.get("/v1/status")["settled"], "written to the storage")

    def flip(payload: bytes) -> bytes:
        assert payload[AT] not in (0, FLIPPED)
        return payload[:AT] + bytes([payload[AT] ^ FLIPPED]) + payload[AT + 1 :]

    if is_forged:
        assert forge(keeper, flip, of="state") > 0
    world.sidecar("second", **remote)
    with running_engine(DRAFTED.options(world, at="second")) as engine:
        hit = engine.ask(ask)
    assert hit.num_cached == DRAFTED.whole(DRAFTED.length)
    with pytest.raises(AssertionError) if is_forged else contextlib.nullcontext():
        check(world.references, DRAFTED, [ask], [hit])


def test_a_state_that_vllm_has_evicted(world: World) -> None:
    """It is loaded with the attention, which vLLM still has. A connector that
    `supports_divergent_local_hybrid_hits` is asked only for what follows the attention, and vLLM
    computes all of the prompt if that is nothing.
    """
    from vllm.v1.core.kv_cache_utils import get_group_id

    sidecar = world.sidecar()
    ask = Ask(prompt(108, GATED.length))
    with running_engine(GATED.options(world)) as engine:
        engine.ask(ask)
        await_calm(sidecar)
        manager = engine.scheduler.kv_cache_manager
        groups = engine.scheduler.kv_cache_config.kv_cache_groups
        names = [type(group.kv_cache_spec).__name__ for group in groups]
        named = [block for block in manager.block_pool.blocks if block.block_hash is not None]
        states = {
            block.block_id
            for block in named
            if names[get_group_id(block.block_hash)] == "MambaSpec"
        }
        assert 0 < len(states) < len(named)
        manager.evict_blocks(states)
        hit = engine.ask(ask)
        whole = GATED.whole(GATED.length)
        assert engine.metrics()["vllm:external_prefix_cache_hits"] == hit.num_cached == whole
    check(world.references, GATED, [ask], [hit])


@pytest.mark.parametrize("kind", [GATED, DRAFTED], ids=["gated delta net", "drafts"])
def test_requests_that_are_preempted(world: World, kind: Kind) -> None:
    sidecar = world.sidecar()
    asks = [Ask(prompt(97 + i, 3 * kind.chunk_size - 60), num_new=90) for i in range(3)]
    num_blocks = 24 if kind.drafts else 12
    few = kind.options(world, num_gpu_blocks_override=num_blocks, max_model_len=1024, **DENSE)
    with running_engine(few) as engine:
        stored = Growth(sidecar)
        cold = engine.generate(asks)
        assert engine.metrics()["vllm:num_preemptions"] > 0, (
            "there was room for all: the test tests nothing"
        )
        stored.reaches(2 * len(asks))
        engine.reset()
        hits = engine.generate(asks)
        assert any(answer.num_cached for answer in hits)
        single = [engine.ask(ask) for ask in asks]
        num_accepted = engine.metrics().get("vllm:spec_decode_num_accepted_tokens", 0)
        assert (num_accepted > 0) == (kind.drafts is not None), "no draft was right"
    check(world.references, kind, [*asks, *asks, *asks], [*cold, *hits, *single])


def test_two_workers(world: World) -> None:
    """Each has the state of half of the heads."""
    sidecar = world.sidecar()
    asks = [Ask(prompt(104, 1000)), Ask(prompt(104, 600) + prompt(105, 300))]
    both = world.owner.engine(
        "tp2", {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    )
    both.open(MAMBA.options(world, tensor_parallel_size=2, **DENSE))
    cold = [both.ask(ask) for ask in asks]
    await_calm(sidecar)
    both.reset()
    hits = [both.ask(ask) for ask in asks]
    assert [answer.num_cached for answer in cold] == [0, 512]
    assert [answer.num_cached for answer in hits] == [MAMBA.whole(1000), MAMBA.whole(900)]
    check(world.references, MAMBA, asks * 2, [*cold, *hits])


@KINDS
def test_a_load_that_fails(world: World, monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    sidecar = world.sidecar()
    ask, longer = Ask(prompt(101, kind.length)), Ask(prompt(101, kind.length) + prompt(102, 200))
    with running_engine(kind.options(world)) as engine:
        engine.ask(kind.filling(ask))
        await_calm(sidecar)
        engine.reset()
        nothing = NothingComes(monkeypatch)
        failed = engine.ask(ask)
        assert nothing.num_loads > 0, "nothing was loaded: the test tests nothing"
        assert failed.took_s < BOUND_S
        engine.reset()
        both = engine.generate([ask, longer])
        monkeypatch.undo()
        engine.reset()
        again = engine.ask(ask)
        assert again.num_cached == kind.whole(kind.length)
    check(world.references, kind, [ask, ask, longer, ask], [failed, *both, again])


@KINDS
def test_a_request_that_is_aborted_while_it_is_loaded(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    """A load that is still running affects neither the next request nor the next hit."""
    sidecar = world.sidecar()
    ask, other = Ask(prompt(106, kind.length)), Ask(prompt(107, kind.length))
    with running_engine(kind.options(world)) as engine:
        engine.ask(kind.filling(ask))
        await_calm(sidecar)
        engine.reset()
        late = LateLoads(monkeypatch)
        core = engine.llm.llm_engine
        core.add_request("gone", {"prompt_token_ids": list(ask.tokens)}, SamplingParams())
        while not late.have_begun.is_set():
            core.step()
        core.abort_request(["gone"])
        meanwhile = engine.ask(other)
        late.may_end.set()
        engine.reset()
        hit = engine.ask(ask)
        assert hit.num_cached == kind.whole(kind.length)
    check(world.references, kind, [other, ask], [meanwhile, hit])


@pytest.mark.parametrize("kind", [GATED, DRAFTED], ids=["gated delta net", "drafts"])
@pytest.mark.parametrize(
    ("message", "when"), [("LOAD", BEFORE), ("LOAD", AFTER), ("RESERVE", AFTER), ("COMMIT", BEFORE)]
)
def test_a_killed_sidecar(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    message: str,
    when: str,
    kind: Kind,
) -> None:
    sidecar = world.sidecar()
    ask = Ask(prompt(103, kind.length))
    with running_engine(kind.options(world)) as engine:
        if message == "LOAD":
            engine.ask(kind.filling(ask))
            await_calm(sidecar)
            engine.reset()
        with Sabotage(monkeypatch, message, when, sidecar.kill) as sabotage:
            answer = engine.ask(ask)
            eventually(lambda: sabotage.has_happened, f"{message} was not said")
        assert answer.took_s < BOUND_S
        sidecar.start()

        def is_found() -> bool:
            engine.reset()
            engine.ask(kind.filling(ask))
            engine.reset()
            return engine.ask(ask).num_cached == kind.whole(kind.length)

        eventually(is_found, "it is stored again", BACK_S)
        engine.reset()
        hit = engine.ask(ask)
    check(world.references, kind, [ask, ask], [answer, hit])
