"""Which inputs see which in training, and what each target counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lmcache_demo.model import MODEL_DIR, load_model

from tests.training.batches import TrainingRows
from tests.training.recipe import Recipe
from tests.training.trainer import NUM_EXTRA_VALUES, MeanExchange, Trainer

RECIPE = Recipe(num_steps=2, tokens_per_step=32, short_length=16, long_length=16)


@dataclass(frozen=True)
class SameRows:
    """The same sequences at every step."""

    rows: TrainingRows
    num_tokens: int = 34

    def draw(self, step: int, num_rows: int, length: int) -> TrainingRows:
        return self.rows


@pytest.fixture
def tokens() -> np.ndarray:
    return np.random.default_rng(5).integers(1, 2_000, (2, 17))


def loss_of_a_step(rows: TrainingRows) -> float:
    trainer = Trainer(RECIPE, SameRows(rows), 0, MODEL_DIR)
    num_parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    trainer.train_step(MeanExchange(1, num_parameters + NUM_EXTRA_VALUES), stop=False)
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())
    return trainer.progressed.loss


def losses_of(tokens: np.ndarray) -> np.ndarray:
    model, _ = load_model()
    ids = torch.from_numpy(tokens)
    with torch.inference_mode():
        logits = model(input_ids=ids[:, :-1]).logits
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").numpy()


def test_a_block_sees_itself_and_the_rest_sees_all() -> None:
    blocks = np.array([[0, 1, 1, 2, 0]], dtype=np.int16)
    mask = TrainingRows(np.zeros((1, 6), dtype=np.int64), None, blocks).mask()
    assert mask is not None
    assert mask[0].astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [1, 1, 1, 1, 1],
    ]


def test_the_trainer_applies_mask_and_weights(tokens: np.ndarray) -> None:
    """A target within a block that stands alone is predicted from the block, whatever stands
    before it.
    """
    weights, blocks = np.zeros((2, 16), dtype=np.float32), np.zeros((2, 16), dtype=np.int16)
    weights[:, 8:11] = 1
    blocks[:, 6:12] = 1
    loss = loss_of_a_step(TrainingRows(tokens, weights, blocks))
    assert loss == pytest.approx(losses_of(tokens[:, 6:13])[:, 2:5].mean(), rel=0.02)
    assert loss != pytest.approx(losses_of(tokens)[:, 8:11].mean(), rel=0.02)
    weights[:, 8:11] = 0
    weights[0, 4], weights[1, 14:] = 1.0, 0.25
    expected = (losses_of(tokens) * weights).sum() / weights.sum()
    assert loss_of_a_step(TrainingRows(tokens, weights)) == pytest.approx(expected, rel=0.02)


def test_rows_without_weights_leave_the_model_whole(tokens: np.ndarray) -> None:
    assert loss_of_a_step(TrainingRows(tokens, np.zeros((2, 16), dtype=np.float32))) == 0
