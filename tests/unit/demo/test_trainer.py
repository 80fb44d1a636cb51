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
        assert self.rows.tokens.shape == (num_rows, length + 1)
        return self.rows


@pytest.fixture
def tokens() -> np.ndarray:
    return np.random.default_rng(5).integers(1, 2_000, (2, 17))


def trained_one_step(rows: TrainingRows) -> Trainer:
    trainer = Trainer(RECIPE, SameRows(rows), 0, MODEL_DIR)
    num_values = (
        sum(parameter.numel() for parameter in trainer.model.parameters()) + NUM_EXTRA_VALUES
    )
    assert not trainer.train_step(MeanExchange(1, num_values), stop=False)
    return trainer


def losses_of(tokens: np.ndarray) -> np.ndarray:
    model, _ = load_model()
    ids = torch.from_numpy(tokens)
    with torch.inference_mode():
        logits = model(input_ids=ids[:, :-1]).logits
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").numpy()


def test_a_block_sees_itself_and_the_rest_sees_all() -> None:
    blocks = np.array([[0, 1, 1, 2, 0], [0, 0, 0, 0, 0]], dtype=np.int16)
    mask = TrainingRows(np.zeros((2, 6), dtype=np.int64), None, blocks).mask()
    assert mask is not None
    assert mask.dtype == np.bool_
    assert mask[0].astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [1, 1, 1, 1, 1],
    ]
    assert (mask[1] == np.tril(np.ones((5, 5), dtype=np.bool_))).all()
    assert TrainingRows(np.zeros((2, 6), dtype=np.int64)).mask() is None


def test_the_model_reads_a_block_as_if_it_stood_alone(tokens: np.ndarray) -> None:
    blocks = np.zeros((1, 17), dtype=np.int16)
    blocks[0, 6:12] = 1
    mask = TrainingRows(tokens[:1], None, blocks).mask()
    model, _ = load_model()
    ids = torch.from_numpy(tokens[:1])
    with torch.inference_mode():
        masked = model(input_ids=ids, attention_mask=torch.from_numpy(mask)[:, None]).logits[0]
        alone = model(input_ids=ids[:, 6:12]).logits[0]
        whole = model(input_ids=ids).logits[0]
    assert torch.allclose(masked[6:12], alone, atol=1e-3)
    assert torch.allclose(masked[:6], whole[:6], atol=1e-3)
    assert not torch.allclose(masked[6:12], whole[6:12], atol=0.1)
    assert not torch.allclose(masked[12:], whole[12:], atol=0.1)


def test_the_trainer_applies_the_mask(tokens: np.ndarray) -> None:
    """A target within a block that stands alone is foretold from the block, whatever stands
    before it.
    """
    weights = np.zeros((2, 16), dtype=np.float32)
    weights[:, 8:11] = 1
    blocks = np.zeros((2, 16), dtype=np.int16)
    blocks[:, 6:12] = 1
    loss = trained_one_step(TrainingRows(tokens, weights, blocks)).progressed.loss
    assert loss == pytest.approx(losses_of(tokens[:, 6:13])[:, 2:5].mean(), rel=0.02)
    assert loss != pytest.approx(losses_of(tokens)[:, 8:11].mean(), rel=0.02)


def test_the_loss_is_the_weighted_mean(tokens: np.ndarray) -> None:
    weights = np.zeros((2, 16), dtype=np.float32)
    weights[0, 4], weights[1, 14:] = 1.0, 0.25
    expected = (losses_of(tokens) * weights).sum() / weights.sum()
    assert trained_one_step(TrainingRows(tokens, weights)).progressed.loss == pytest.approx(
        expected, rel=0.02
    )
    assert expected != pytest.approx(losses_of(tokens).mean(), rel=0.1)
    assert trained_one_step(TrainingRows(tokens)).progressed.loss == pytest.approx(
        losses_of(tokens).mean(), rel=0.02
    )


def test_rows_without_weights_leave_the_model_whole(tokens: np.ndarray) -> None:
    trainer = trained_one_step(TrainingRows(tokens, np.zeros((2, 16), dtype=np.float32)))
    assert trainer.progressed.loss == 0
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())
