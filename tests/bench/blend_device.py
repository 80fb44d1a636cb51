"""Blending's kernels on a GPU, beside a copy of the same bytes in its memory, plain torch, and
torch.topk.

Nothing is reported unless they give what their references give.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from lmcache_core.blend.selection import RECOMPUTED_TAIL_TOKENS, share_of
from lmcache_kernels.blend_select import (
    blend_deviation,
    blend_deviation_reference,
    blend_select,
    blend_select_reference,
)
from lmcache_kernels.rope_rotate import Rotation, rope_rotate, rope_rotate_reference

from tests.bench.measure import Figure, timed
from tests.bench.shape import DTYPE, HEAD_SIZE, NUM_HEADS, NUM_LAYERS, NUM_TOKENS

RATIO = 0.15
"""Share of the tokens that are selected: the default of `blend_recompute_ratio`."""
BATCHES = ((1, NUM_TOKENS), (16, 8192))
"""Requests, and tokens of each, among which is selected."""
CALLS = 100
"""Selections of a round: one alone is shorter than the wait for it."""
DOCUMENT_TOKENS = 512
THETA = 10_000.0


@dataclass(frozen=True, eq=False)
class Prompt:
    """Cached documents that stand elsewhere now, and room for their KV.

    Attributes:
        layers: Of each layer one side of the cached KV, `[tokens, heads, head_size]`; together more
            than a GPU's caches hold.
        targets: The same, written.
        rotation: From the positions in the documents to those in the prompt.
        is_valid: Booleans `[tokens]`: the last document was not cached.
    """

    layers: list[torch.Tensor]
    targets: list[torch.Tensor]
    rotation: Rotation
    is_valid: torch.Tensor

    @classmethod
    def make(cls, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> Prompt:
        """Random KV.

        Args:
            shape: Layers, tokens, heads, head size.
            dtype: Of the KV.
            device: Of everything.
        """
        num_layers, num_tokens, *heads = shape
        generator = torch.Generator(device).manual_seed(0)
        layers = [
            torch.randn(num_tokens, *heads, generator=generator, device=device).to(dtype)
            for _ in range(num_layers)
        ]
        positions = torch.arange(num_tokens, device=device)
        frequencies = THETA ** -(torch.arange(0, heads[-1], 2, device=device) / heads[-1])
        angles = positions[:, None] * frequencies
        table = torch.cat([angles.cos(), angles.sin()], 1)
        rotation = Rotation(positions % DOCUMENT_TOKENS, positions, table, table)
        return cls(
            layers,
            [torch.zeros_like(k) for k in layers],
            rotation,
            positions < num_tokens - DOCUMENT_TOKENS // 2,
        )

    @property
    def num_bytes(self) -> int:
        """Of all layers."""
        return sum(k.nbytes for k in self.layers)

    def copy(self) -> None:
        """Read and write every byte once: the limit."""
        for k, target in zip(self.layers, self.targets, strict=True):
            target.copy_(k)

    def rotate(self, run: Callable[[torch.Tensor, Rotation, torch.Tensor], object]) -> None:
        """All layers as K."""
        for k, target in zip(self.layers, self.targets, strict=True):
            run(k, self.rotation, target)

    def deviate(
        self, run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> None:
        """All layers as fresh V beside what is in their targets."""
        for fresh, retrieved in zip(self.layers, self.targets, strict=True):
            run(fresh.flatten(1), retrieved.flatten(1), self.is_valid)

    def check(self) -> None:
        """Raises AssertionError where a kernel gives something else than its reference."""
        k, expected = self.layers[0], torch.zeros_like(self.layers[0])
        rope_rotate_reference(k, self.rotation, expected)
        made = rope_rotate(k, self.rotation)
        if not torch.equal(made, expected):
            raise AssertionError("rope_rotate gives another K than its reference")
        sides = k.flatten(1), k.roll(1, 0).flatten(1), self.is_valid
        torch.testing.assert_close(
            blend_deviation(*sides), blend_deviation_reference(*sides), rtol=1e-5, atol=0
        )


@dataclass(frozen=True, eq=False)
class Choice:
    """Requests of one length, of which the most deviating tokens are selected.

    Attributes:
        deviation: float32 `[requests, tokens]`.
        is_valid: Booleans: all true.
    """

    deviation: torch.Tensor
    is_valid: torch.Tensor

    @classmethod
    def make(cls, num_requests: int, num_tokens: int, device: str) -> Choice:
        """Deviations in random order, no two of a request alike."""
        generator = torch.Generator(device).manual_seed(1)
        deviation = torch.stack(
            [
                torch.randperm(num_tokens, generator=generator, device=device)
                for _ in range(num_requests)
            ]
        ).float()
        return cls(deviation, torch.ones_like(deviation, dtype=torch.bool))

    @property
    def count(self) -> int:
        """Selected tokens of a request, but for its last."""
        return share_of(self.deviation.shape[1], RATIO)

    def select(self, run: Callable[..., torch.Tensor] = blend_select) -> torch.Tensor:
        """By the kernel, or what is given: booleans `[requests, tokens]`."""
        num_requests, num_tokens = self.deviation.shape
        starts: Sequence[int] = range(0, (num_requests + 1) * num_tokens, num_tokens)
        counts = [self.count] * num_requests
        return run(
            self.deviation.flatten(),
            self.is_valid.flatten(),
            starts,
            counts,
            RECOMPUTED_TAIL_TOKENS,
        ).view_as(self.is_valid)

    def select_by_topk(self) -> torch.Tensor:
        """The same by torch.topk."""
        selected = torch.zeros_like(self.is_valid)
        selected[:, -RECOMPUTED_TAIL_TOKENS:] = True
        largest = (
            self.deviation[:, :-RECOMPUTED_TAIL_TOKENS].topk(self.count, 1, sorted=False).indices
        )
        return selected.scatter_(1, largest, True)

    def check(self) -> None:
        """Raises AssertionError where the kernel chooses otherwise than its reference, or
        torch.topk.
        """
        made = self.select()
        if not torch.equal(made, self.select(blend_select_reference)) or int(
            made.sum()
        ) != made.shape[0] * (self.count + 1):
            raise AssertionError("blend_select chooses other tokens than its reference")
        if not torch.equal(made, self.select_by_topk()):
            raise AssertionError("blend_select chooses other tokens than torch.topk")


def gpu_figures() -> list[Figure]:
    """Rotation, deviation and selection; none without CUDA."""
    if not torch.cuda.is_available():
        return []
    prompt = Prompt.make((NUM_LAYERS, NUM_TOKENS, NUM_HEADS, HEAD_SIZE), DTYPE, "cuda")
    figures = prompt_figures(prompt, torch.cuda.synchronize)
    for num_requests, num_tokens in BATCHES:
        figures += choice_figures(
            Choice.make(num_requests, num_tokens, "cuda"), torch.cuda.synchronize
        )
    return figures


def prompt_figures(prompt: Prompt, wait: Callable[[], object]) -> list[Figure]:
    """K of a prompt rotated, and V compared, layer by layer; each beside a copy, which moves as
    many bytes.

    Args:
        prompt: Its targets are written.
        wait: Ends a round.

    Raises:
        AssertionError: A kernel gives something else than its reference.
    """
    prompt.check()
    num_layers = len(prompt.layers)
    copies = timed(_ended(prompt.copy, wait))
    limit = Figure(
        f"limit: device copy of one side of {num_layers} layers", prompt.num_bytes, copies
    )
    works: list[tuple[str, Callable[[], object], str]] = [
        ("rope_rotate", lambda: prompt.rotate(rope_rotate), "a launch a layer"),
        (
            "rope_rotate, in plain torch",
            lambda: prompt.rotate(rope_rotate_reference),
            "the reference: a pass an operation",
        ),
        (
            "blend_deviation",
            lambda: prompt.deviate(blend_deviation),
            "reads both sides; the copy reads one and writes one",
        ),
        (
            "blend_deviation, in plain torch",
            lambda: prompt.deviate(blend_deviation_reference),
            "the reference",
        ),
    ]
    return [
        limit,
        *(
            Figure(f"GPU: {name}", prompt.num_bytes, timed(_ended(work, wait)), limit, note)
            for name, work, note in works
        ),
    ]


def choice_figures(choice: Choice, wait: Callable[[], object]) -> list[Figure]:
    """Selection beside torch.topk.

    Args:
        choice: From which is selected.
        wait: Ends a round.

    Raises:
        AssertionError: The kernel chooses otherwise than its reference, or torch.topk.
    """
    choice.check()
    num_requests, num_tokens = choice.deviation.shape
    subject = f"{num_requests} x {num_tokens:,} tokens"
    beside = _calls_of(
        f"beside: torch.topk and a mask, {subject}", choice.select_by_topk, choice, wait
    )
    return [beside, _calls_of(f"GPU: blend_select, {subject}", choice.select, choice, wait, beside)]


def _calls_of(
    name: str,
    work: Callable[[], object],
    choice: Choice,
    wait: Callable[[], object],
    beside: Figure | None = None,
) -> Figure:
    seconds = timed(_ended(lambda: [work() for _ in range(CALLS)], wait))
    note = f"{statistics.median(seconds) / CALLS * 1e6:.1f} µs a call, with its launches"
    return Figure(name, CALLS * choice.deviation.nbytes, seconds, beside, note)


def _ended(work: Callable[[], object], wait: Callable[[], object]) -> Callable[[int], None]:
    def run(_turn: int) -> None:
        work()
        wait()

    return run
