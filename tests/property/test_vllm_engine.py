"""The connector in a replayed vLLM under random requests, aborts, failed loads, evictions and
absent sidecars.

The engine raises when a request goes on after it has read KV that is not that of its tokens. Beyond
that: every request ends, no load is offered again after it failed, and at the end nothing is held
for anybody.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.fixtures.embedded import noting_parts
from tests.fixtures.fake_vllm import NEW, OLD, imported_connector
from tests.fixtures.sidecar import RunningSocket, running_socket, unhurried_clients
from tests.fixtures.vllm_engine import (
    FULL,
    MLA,
    STATE,
    Adapter,
    Engine,
    Feature,
    Limits,
    Request,
    Shape,
    Status,
    local,
    window,
)
from tests.fixtures.vllm_engine.stores import FlakyStore
from tests.fixtures.vllm_engine.worlds import (
    embedded,
    make_adapter,
    make_model,
    prompt,
    with_sidecar,
)

ONE_RANK = [
    Shape(num_blocks=20),
    Shape((window(6),), num_blocks=24),
    Shape((FULL, window(6), window(9)), num_blocks=52),
    Shape((MLA,), num_blocks=20),
    Shape((FULL, STATE), num_blocks=24, zeroes_early=True),
    Shape((FULL, STATE, window(6)), num_blocks=44),
    Shape((FULL, STATE), num_blocks=30, num_drafts=3),
    Shape((FULL, local(16)), num_blocks=36),
    Shape((local(8),), num_blocks=24),
]
TWO_RANKS = [
    Shape(num_ranks=2, num_blocks=20),
    Shape((FULL, window(6)), num_ranks=2, num_blocks=36),
    Shape((MLA,), num_ranks=2, replicas=2, num_blocks=20),
    Shape((FULL, STATE), num_ranks=2, num_blocks=24, zeroes_early=True),
]
PROMPTS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 14)), min_size=1, max_size=4)
"""Pieces of few prompts, each a prefix of one: many requests begin alike."""
MAX_PROMPT_TOKENS = 48
MAX_STEPS = 4000
ARENA_BYTES = {"roomy": 1 << 20, "tight": 24_000}


class EngineMachine(RuleBasedStateMachine):
    """Subclasses say where chunks are."""

    shapes: ClassVar[list[Shape]]
    max_examples: ClassVar[int]

    def __init_subclass__(cls) -> None:
        checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
        cls.TestCase.settings = settings(
            max_examples=cls.max_examples,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=checks,
        )

    def open_store(self, room: str) -> dict[str, Any]:
        """Make chunks' place; the options that lead there."""
        raise NotImplementedError

    def hot(self) -> Any:
        """The tier in memory; None while it is away."""
        raise NotImplementedError

    @initialize(
        data=st.data(),
        release=st.sampled_from([NEW, NEW, OLD]),
        policy=st.sampled_from(["recompute", "recompute", "fail"]),
        limits=st.builds(
            Limits, st.sampled_from([5, 16, 64]), st.sampled_from([1, 3, 8]), st.booleans()
        ),
        room=st.sampled_from(sorted(ARENA_BYTES)),
        options=st.fixed_dictionaries(
            {"chunk_size": st.sampled_from([4, 8, 16]), "save_decode_cache": st.booleans()}
        ),
    )
    def begin(
        self,
        data: Any,
        release: str,
        policy: str,
        limits: Limits,
        room: str,
        options: dict[str, Any],
    ) -> None:
        self.exits = contextlib.ExitStack()
        self.directory = Path(self.exits.enter_context(tempfile.TemporaryDirectory()))
        module = self.exits.enter_context(imported_connector(release))
        shapes = [shape for shape in self.shapes if release == NEW or len(shape.groups) == 1]
        self.stores: list[FlakyStore] = []
        shape = data.draw(st.sampled_from(shapes))
        if any(group.is_state for group in shape.groups):
            options = options | {"chunk_size": shape.block_size}
        extra = self.open_store(room) | {
            f"lmcache.{name}": value for name, value in options.items()
        }
        self.engine = Engine(
            module,
            make_model(self.directory),
            extra,
            shape,
            limits,
            self.wrap,
            policy=policy,
        )
        self.exits.callback(self.engine.close)
        self.adapter = Adapter("adapter", str(make_adapter(self.directory, "adapter")))
        self.requests: list[Request] = []
        self.has_lost = False

    def wrap(self, store: Any) -> FlakyStore:
        self.stores.append(FlakyStore(store, len(self.stores), 0.0))
        return self.stores[-1]

    @rule(
        pieces=PROMPTS,
        max_tokens=st.integers(1, 12),
        kind=st.sampled_from(["plain", "plain", "plain", "salt", "adapter", "image", "logprobs"]),
    )
    def add(self, pieces: list[tuple[int, int]], max_tokens: int, kind: str) -> None:
        tokens = [token for number, length in pieces for token in prompt(number, length)][
            :MAX_PROMPT_TOKENS
        ]
        options: dict[str, Callable[[], dict[str, Any]]] = {
            "plain": dict,
            "salt": lambda: {"salt": "salt"},
            "adapter": lambda: {"adapter": self.adapter},
            "image": lambda: {"features": [Feature(f"image {len(tokens) % 2}", 2, 5)]},
            "logprobs": lambda: {"prompt_logprobs": True},
        }
        self.requests.append(self.engine.add(tokens, max_tokens, **options[kind]()))

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @rule(place=st.integers(0, 50))
    @precondition(lambda self: bool(self.requests))
    def abort(self, place: int) -> None:
        self.engine.abort(self.requests[place % len(self.requests)])

    @rule(new_weights=st.booleans())
    def forget(self, new_weights: bool) -> None:
        # Not a precondition: when blocks are copied depends on a thread.
        if self.engine.scheduler.has_requests:
            return
        if new_weights:
            self.engine.replace_weights(f"weights {len(self.requests)}")
        else:
            self.engine.forget()

    @rule(share=st.sampled_from([0.0, 0.2, 0.7]))
    def lose(self, share: float) -> None:
        self.has_lost |= share > 0
        for store in self.stores:
            store.share = share

    @rule(share=st.sampled_from([0.3, 1.0]))
    def evict(self, share: float) -> None:
        hot = self.hot()
        if hot is not None:
            self.has_lost = True
            hot.evict_bytes(int(hot.stats()["used_bytes"] * share))

    def teardown(self) -> None:
        with getattr(self, "exits", contextlib.nullcontext()):
            if not hasattr(self, "engine"):
                return
            self.engine.run(MAX_STEPS)
            self.engine.check_idle()
            for request in self.requests:
                self.check(request)
            hot = self.hot()
            if hot is not None:
                hot.check_integrity()
                hot.evict_bytes(hot.stats()["used_bytes"])
                assert hot.stats()["arena_used_bytes"] == 0, (
                    "a ticket, a load or a store still holds memory"
                )

    def check(self, request: Request) -> None:
        """It has ended as it should, and has not been offered what failed."""
        assert request.status.is_finished
        assert request.status is not Status.FINISHED_ERROR or not self.engine.scheduler.recomputes
        if request.status is Status.FINISHED_STOPPED:
            assert len(request.output) == request.max_tokens
        assert self.engine.tally(request).num_loads <= 1 + request.num_preemptions


class _Embedded(EngineMachine):
    shapes, max_examples = ONE_RANK, 40

    def open_store(self, room: str) -> dict[str, Any]:
        self.parts = self.exits.enter_context(noting_parts())
        return embedded(max_local_cpu_size=ARENA_BYTES[room] / (1 << 30))

    def hot(self) -> Any:
        return self.parts.hot if self.stores else None


class _Sidecar(EngineMachine):
    shapes, max_examples = ONE_RANK + TWO_RANKS, 20

    def open_store(self, room: str) -> dict[str, Any]:
        # A busy machine must not make the sidecar late, which is then not asked.
        self.exits.enter_context(unhurried_clients())
        self.room = room
        self.path = self.directory / "s.sock"
        self.num_starts = 0
        self.sidecar: tuple[contextlib.ExitStack, RunningSocket] | None = None
        self.start()
        self.exits.callback(self.stop)
        return with_sidecar(self.path)

    def hot(self) -> Any:
        return None if self.sidecar is None else self.sidecar[1].hot

    def start(self) -> None:
        self.num_starts += 1
        directory = self.directory / str(self.num_starts)
        directory.mkdir()
        stack = contextlib.ExitStack()
        self.sidecar = (
            stack,
            stack.enter_context(running_socket(directory, ARENA_BYTES[self.room], path=self.path)),
        )

    def stop(self) -> None:
        if self.sidecar is not None:
            stack, self.sidecar = self.sidecar[0], None
            stack.close()

    @rule()
    def leave_or_return(self) -> None:
        """The engines find a sidecar that is back by themselves, some steps later."""
        self.has_lost = True
        if self.sidecar is None:
            self.start()
        else:
            self.stop()


TestEmbedded, TestSidecar = _Embedded.TestCase, _Sidecar.TestCase
