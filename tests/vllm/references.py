"""What the models say when nothing is cached: by engines without connector and prefix cache, in
processes beside the tests.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.vllm.engines import MAX_MODEL_LEN, Answer, Ask, engine_options
from tests.vllm.models import FIRST_WORD, VOCABULARY
from tests.vllm.processes import EngineProcess, Owner

TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}
"""How far logprobs may differ. A prompt of which a part is loaded, or that is computed beside
another one, is computed in pieces of another shape, whose sums round otherwise: in float32 by up to
2e-5 on processors without AVX-512, also where nothing is loaded. KV of another prompt differs by
0.9.
"""

NUM_BLOCKS = 2 * MAX_MODEL_LEN // 16
"""Room for one request in each of these engines, in vLLM's smallest blocks. With a gigabyte each,
some ten in one process need more memory than a small machine has.
"""


class References:
    """Answers without a cache, by model and dtype.

    Models with experts have a process of their own: vLLM makes the group of ranks that they need
    only if a process's first model has experts.

    Args:
        owner: Of the processes where their engines live.
        models: Directory of the models.
    """

    def __init__(self, owner: Owner, models: Path) -> None:
        self._owner = owner
        self._models = models
        self._processes: dict[bool, EngineProcess] = {}
        self._names: set[str] = set()

    def answers(
        self, asks: Sequence[Ask], model: str, dtype: str = "float32", **options: Any
    ) -> list[Answer]:
        """What `model` answers to each, asked alone."""
        has_lora = any(ask.adapter for ask in asks)
        name = f"{model} {dtype} {has_lora} {sorted(options.items())}"
        process = self._process(model)
        if name not in self._names:
            lora = {"enable_lora": True, "max_lora_rank": 8} if has_lora else {}
            process.open(
                engine_options(
                    self._models / model,
                    dtype=dtype,
                    enable_prefix_caching=False,
                    num_gpu_blocks_override=NUM_BLOCKS,
                    **lora,
                    **options,
                ),
                name,
            )
            self._names.add(name)
        return [process.generate([ask], name)[0] for ask in asks]

    def _process(self, model: str) -> EngineProcess:
        config = json.loads((self._models / model / "config.json").read_text())
        has_experts = config.get("num_experts_per_tok", 0) > 0
        if has_experts not in self._processes:
            name = "experts" if has_experts else "references"
            self._processes[has_experts] = self._owner.engine(name)
        return self._processes[has_experts]

    def check(
        self,
        answers: Sequence[Answer],
        asks: Sequence[Ask],
        model: str,
        dtype: str = "float32",
        **options: Any,
    ) -> None:
        """Fail unless the answers are those without a cache."""
        for number, (answer, expected) in enumerate(
            zip(answers, self.answers(asks, model, dtype, **options), strict=True)
        ):
            assert_same(answer, expected, TOLERANCES[dtype], f"answer {number}")


def assert_same(answer: Answer, expected: Answer, tolerance: float, name: str = "answer") -> None:
    """Fail unless both have the same tokens, and logprobs within the tolerance."""
    assert expected.num_cached == 0, "the reference has used a cache"
    assert answer.finish_reason == expected.finish_reason, name
    assert answer.tokens == expected.tokens, name
    difference = distance(answer, expected)
    assert difference <= tolerance, f"{name}: logprobs differ by {difference:.1e}"
    assert len(answer.prompt_logprobs) == len(expected.prompt_logprobs), name
    if expected.prompt_logprobs:
        differs = "its prompt's logprobs"
        assert _largest_difference(answer.prompt_logprobs, expected.prompt_logprobs) <= tolerance, (
            f"{name}: {differs}"
        )


def distance(answer: Answer, other: Answer) -> float:
    """The largest difference of a logprob that both name, over all their tokens; infinite where
    they name nothing in common.
    """
    assert len(answer.logprobs) == len(other.logprobs) > 0
    return _largest_difference(answer.logprobs, other.logprobs)


def _largest_difference(
    ours: Sequence[dict[int, float]], theirs: Sequence[dict[int, float]]
) -> float:
    differences = []
    for one, other in zip(ours, theirs, strict=True):
        differences.append(
            max(
                (abs(one[token] - other[token]) for token in one.keys() & other.keys()),
                default=math.inf,
            )
        )
    return max(differences)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    """Random words; the same for the same seed, and one of another length begins alike."""
    dice = random.Random(seed)
    return tuple(dice.randrange(FIRST_WORD, VOCABULARY) for _ in range(length))
