"""vLLM's own HTTP server, as people run it: three processes, and hits visible in the answers."""

from __future__ import annotations

import pytest

from tests.vllm.engines import CHUNK_SIZE, Ask
from tests.vllm.models import LLAMA
from tests.vllm.references import TOLERANCES, prompt
from tests.vllm.servers import START_TIMEOUT_S, start
from tests.vllm.sidecars import Growth, eventually
from tests.vllm.worlds import World, with_example_connector


@pytest.mark.parametrize("is_child", [False, True])
def test_hits_are_visible_in_the_answers(world: World, is_child: bool) -> None:
    """By itself, and as a child of `MultiConnector`, of which the server reads figures in
    another way.
    """
    sidecar = world.sidecar()
    ask = Ask(prompt(280, 1000))
    options = world.options()
    server = start(
        world.owner, with_example_connector(options, world.owner.directory) if is_child else options
    )
    eventually(server.is_healthy, "the server does not become healthy", START_TIMEOUT_S)
    # Its scheduler, and its worker's stores and loads: or the first request of a new pod would
    # miss.
    assert len(sidecar.get("/v1/clients")["clients"]) == 3
    stored = Growth(sidecar)
    cold = server.complete(ask)
    stored.reaches(3)
    server.post("/reset_prefix_cache")
    hit = server.complete(ask)
    assert (cold["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0) == 0
    assert hit["usage"]["prompt_tokens_details"]["cached_tokens"] == 3 * CHUNK_SIZE
    (expected,) = world.references.answers([ask], LLAMA)
    for answer in (cold, hit):
        said = answer["choices"][0]["logprobs"]
        assert said["tokens"] == [f"w{token}" for token in expected.tokens]
        wanted = [
            of_token[token]
            for of_token, token in zip(expected.logprobs, expected.tokens, strict=True)
        ]
        assert (
            max(
                abs(ours - theirs)
                for ours, theirs in zip(said["token_logprobs"], wanted, strict=True)
            )
            <= TOLERANCES["float32"]
        )
    lines = server.metrics().splitlines()
    assert any(
        line.startswith("vllm:lmcache_stored_chunks_total{") and float(line.split()[-1]) >= 3
        for line in lines
    )
