"""The model's architecture and the recipe of its training: everything that fixes the result
besides the text.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from transformers import LlamaConfig

MAX_POSITIONS: Final = 4_096
VOCAB_SIZE: Final = 2_048


def build_config() -> "LlamaConfig":
    """Returns the architecture: about 2.33 million parameters, which is 4.66 MB as bfloat16."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


@dataclass(frozen=True, slots=True)
class Recipe:
    """Schedule of a training run.

    Attributes:
        num_steps: Optimizer steps in all.
        tokens_per_step: Tokens per step, the same for both lengths.
        short_length: Sequence length of the first part of the run, in tokens.
        long_length: Sequence length of the last part, in tokens.
        long_ratio: Share of the steps at the long length.
        warmup_steps: Steps over which the learning rate rises from 0.
        decay_ratio: Share of the steps, at the end, over which it falls to ``final_lr_ratio`` of
            its peak.
        final_lr_ratio: Learning rate of the last step as a share of the peak.
        matrix_lr: Peak learning rate of Muon, which updates the weight matrices.
        vector_lr: Peak learning rate of AdamW, which updates the embedding and the norms.
        weight_decay: Weight decay of the matrices.
        max_grad_norm: Gradients are scaled down to this norm.
        seed: Seed of the initial weights and of the data.
    """

    num_steps: int = 1_500
    tokens_per_step: int = 8_192
    short_length: int = 1_024
    long_length: int = MAX_POSITIONS
    long_ratio: float = 0.15
    warmup_steps: int = 40
    decay_ratio: float = 0.4
    final_lr_ratio: float = 0.03
    matrix_lr: float = 1e-2
    vector_lr: float = 1e-2
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    seed: int = 20_240_601

    def length_at(self, step: int) -> int:
        """Returns the sequence length of a step, in tokens."""
        return (
            self.long_length
            if step >= self.num_steps * (1 - self.long_ratio)
            else self.short_length
        )

    def lr_scale_at(self, step: int) -> float:
        """Returns the factor of the peak learning rates at a step: a rise, a plateau, a linear
        fall.
        """
        decay_start = self.num_steps * (1 - self.decay_ratio)
        if step < decay_start:
            return min(1.0, (step + 1) / self.warmup_steps)
        progress = (step - decay_start) / (self.num_steps - decay_start)
        return 1.0 - (1.0 - self.final_lr_ratio) * progress


TWO_DOCUMENT_RECIPE: Final = Recipe(
    num_steps=1_400,
    tokens_per_step=4_096,
    short_length=256,
    long_length=512,
    long_ratio=0.3,
    warmup_steps=30,
    matrix_lr=4e-3,
    vector_lr=1e-3,
    weight_decay=0.05,
    seed=20_261_122,
)
"""How the shipped model is taught to answer from two documents."""


@dataclass(frozen=True, slots=True)
class Curriculum:
    """How prompts of two documents grow harder: few words and short at first, until the way to
    answer has been found.

    Attributes:
        first_words: Words of each kind at the beginning.
        words_ratio: Growth of their number per step, once the first phase is over.
        first_owners: Most owners in a prompt at the beginning.
        owners_interval: Steps per further owner, once the first phase is over.
        most_owners: Most owners at last.
        first_steps: Length of the first phase.
    """

    first_words: int = 24
    words_ratio: float = 1.02
    first_owners: int = 4
    owners_interval: int = 60
    most_owners: int = 14
    first_steps: int = 120

    def num_words_at(self, step: int) -> int:
        """Returns how many words of each kind there are at a step; the vocabulary may have
        fewer.
        """
        later = min(max(0, step - self.first_steps), self.first_steps * 2)
        return int(self.first_words * self.words_ratio**later)

    def max_owners_at(self, step: int) -> int:
        """Returns the most owners in a prompt of a step."""
        return min(
            self.most_owners,
            self.first_owners + max(0, step - self.first_steps) // self.owners_interval,
        )
