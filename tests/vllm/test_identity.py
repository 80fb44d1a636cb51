"""What must not share KV does not: adapters, salts, other models."""

from __future__ import annotations

from tests.vllm.engines import CHUNK_SIZE, Ask, running_engine
from tests.vllm.models import LLAMA, LORA, OTHER_LORA
from tests.vllm.references import distance, prompt
from tests.vllm.sidecars import Growth, storage
from tests.vllm.worlds import World, fill, whole_chunks


def test_adapters_share_nothing(world: World) -> None:
    sidecar = world.sidecar()
    base = Ask(prompt(30, 1000))
    adapted, other = (
        Ask(base.tokens, adapter=str(world.models / name)) for name in (LORA, OTHER_LORA)
    )
    with running_engine(world.options(enable_lora=True, max_lora_rank=8, max_loras=2)) as engine:
        for ask in (base, adapted, other):
            fill(engine, sidecar, ask)
        hits = [engine.ask(ask) for ask in (other, base, adapted)]
        assert [hit.num_cached for hit in hits] == [3 * CHUNK_SIZE] * 3
    assert distance(hits[0], hits[1]) > 0.01, "the adapter changes nothing: the test tests nothing"
    world.references.check(hits, [other, base, adapted], LLAMA)


def test_salts_share_nothing(world: World) -> None:
    sidecar = world.sidecar()
    plain = Ask(prompt(31, 1000))
    ours, theirs = (Ask(plain.tokens, salt=salt) for salt in ("ours", "theirs"))
    with running_engine(world.options()) as engine:
        for ask in (plain, ours, theirs):
            fill(engine, sidecar, ask)
        hits = [engine.ask(ask) for ask in (theirs, plain, ours)]
        assert [hit.num_cached for hit in hits] == [3 * CHUNK_SIZE] * 3
    world.references.check(hits, [plain] * 3, LLAMA)


def test_a_sidecars_salt_divides_its_tenants(world: World) -> None:
    """Two sidecars with one storage, whose pods have other salts, find nothing of each other's."""
    keeper = storage(world.owner)
    remote = {"remote_url": f"lm://127.0.0.1:{keeper.ports['lm_port']}"}
    for name in ("red", "blue"):
        salt = world.owner.directory / f"{name}.salt"
        salt.write_text(f"the-salt-of-{name}-0123456789")
        salt.chmod(0o600)
        world.sidecar(name, salt_file=salt, **remote)
    world.sidecar("red-again", salt_file=world.owner.directory / "red.salt", **remote)
    ask = Ask(prompt(32, 800))
    for name, num_cached in (("red", 0), ("blue", 0), ("red-again", 3 * CHUNK_SIZE)):
        with running_engine(world.options(at=name)) as engine:
            stored = Growth(keeper)
            answer = engine.ask(ask)
            assert answer.num_cached == num_cached, name
            if not num_cached:
                stored.reaches(whole_chunks(800))
        world.references.check([answer], [ask], LLAMA)
