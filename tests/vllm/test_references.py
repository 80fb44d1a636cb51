"""What other tests compare with does not depend on their order."""

from __future__ import annotations

import pytest

from tests.vllm.engines import Ask
from tests.vllm.models import GATED_DELTA, LLAMA
from tests.vllm.references import References, prompt
from tests.vllm.worlds import World


@pytest.mark.parametrize("order", [(LLAMA, GATED_DELTA), (GATED_DELTA, LLAMA)])
def test_models_with_and_without_experts_in_any_order(world: World, order: tuple[str, str]) -> None:
    references = References(world.owner, world.models)
    ask = Ask(prompt(610, 100))
    first, other = [references.answers([ask], model, "bfloat16")[0] for model in order]
    (again,) = references.answers([ask], order[0], "bfloat16")
    assert len(first.tokens) == len(other.tokens) == ask.num_new
    assert again.tokens == first.tokens
