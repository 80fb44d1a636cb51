"""Measures, on text, what blending costs a model's answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from lmcache_core._typing import override
from lmcache_core.blend import BlendRetriever, BlendRetrieverResult, BlendRetrieverTask
from lmcache_core.blend.certificate import (
    DEFAULT_BOUNDS,
    FORMAT_VERSION,
    BlendCertificate,
    BlendProfile,
    Quality,
    QualityBounds,
)
from lmcache_core.config import LMCacheEngineConfig
from lmcache_core.integrations.transformers.blended import BlendingModel, blending_model_of
from lmcache_core.integrations.transformers.identity import metadata_of


@dataclass(frozen=True, eq=False)
class SplitPrompt:
    """A prompt whose documents are cached, each computed separately.

    Attributes:
        documents: Token ids of each, with the separator at its end; at least one.
        ending: Token ids after them, at least two: each is predicted from those before it.
        judged: Indices in the ending of the tokens whose prediction counts, from 1, such as those
            of an answer after its question, `[num_judged]`; None: all except the first.
    """

    documents: Sequence[torch.Tensor]
    ending: torch.Tensor
    judged: torch.Tensor | None = None

    def tokens(self) -> torch.Tensor:
        """Return the whole prompt, `[num_tokens]`."""
        return torch.cat([*self.documents, self.ending])

    def judged_places(self) -> torch.Tensor:
        """Return the indices in the ending of the judged tokens, `[num_judged]`.

        Raises:
            ValueError: There is no document, no such token, or no token after the documents from
                which it could be predicted.
        """
        count = len(self.ending)
        if count < 2 or not self.documents:
            raise ValueError(
                f"a prompt of {len(self.documents)} documents and {count} tokens after them; at"
                " least 1 and 2 are needed"
            )
        if self.judged is None:
            return torch.arange(1, count, device=self.ending.device)
        if len(self.judged) == 0 or not bool(((self.judged >= 1) & (self.judged < count)).all()):
            raise ValueError(
                f"judged tokens {self.judged.tolist()} of an ending of {count}; give one at least,"
                f" all in 1 … {count - 1}"
            )
        return self.judged


class DocumentRetriever(BlendRetriever, BlendRetrieverTask):
    """Computes the KV of a prompt's documents, each separately: the same that a cache would return.

    Args:
        model: A model in eval mode.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._valid_mask = torch.zeros(0, dtype=torch.bool)
        self._original_positions = torch.zeros(0, dtype=torch.int64)

    def compute(self, prompt: SplitPrompt) -> None:
        """Compute the documents of the prompt that is requested next.

        Raises:
            ValueError: See `SplitPrompt.judged_places`.
        """
        prompt.judged_places()
        sides: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        with torch.inference_mode():
            for document in prompt.documents:
                cache = self._model(
                    input_ids=document[None], use_cache=True, logits_to_keep=1
                ).past_key_values
                sides.append([(_flat(layer.keys), _flat(layer.values)) for layer in cache.layers])
            room = torch.zeros(
                len(prompt.ending),
                sides[0][0][0].shape[1],
                dtype=self._model.dtype,
                device=prompt.ending.device,
            )
            self._layers = [
                (
                    torch.cat([*(own[i][0] for own in sides), room]),
                    torch.cat([*(own[i][1] for own in sides), room]),
                )
                for i in range(len(sides[0]))
            ]
        lengths = [len(document) for document in prompt.documents]
        self._valid_mask = torch.arange(sum(lengths) + len(prompt.ending)) < sum(lengths)
        parts = [torch.arange(length) for length in lengths]
        self._original_positions = torch.cat(
            [*parts, torch.zeros(len(prompt.ending), dtype=torch.int64)]
        ).to(prompt.ending.device)

    @override
    def new_request(
        self, input_tokens: torch.Tensor, query_start_loc: torch.Tensor
    ) -> BlendRetrieverTask:
        """Return the task of the prompt last passed to `compute`."""
        return self

    @override
    def result(self, layer_id: int) -> BlendRetrieverResult:
        k, v = self._layers[layer_id]
        return BlendRetrieverResult(k, v, self._valid_mask, self._original_positions)


@dataclass(frozen=True)
class PromptQuality:
    """One prompt: sums over the judged tokens of its ending.

    Attributes:
        num_tokens: Number of judged tokens.
        kl_nats: Divergence of the blended distributions from the full ones.
        num_agreeing: Tokens with the same most probable successor.
        full_loss_nats: Loss of the text after full recompute.
        blended_loss_nats: Loss after blending.
        num_reused: Tokens of the prompt that were retrieved.
    """

    num_tokens: int
    kl_nats: float
    num_agreeing: int
    full_loss_nats: float
    blended_loss_nats: float
    num_reused: int
    num_prompt_tokens: int


def compare(model: PreTrainedModel, blended: BlendingModel, prompt: SplitPrompt) -> PromptQuality:
    """Predict a prompt's ending after full recompute and after blending.

    Args:
        model: A model in eval mode.
        blended: The same model; its retriever returns the prompt's documents.
        prompt: A prompt on the model's device.

    Raises:
        ValueError: See `SplitPrompt.judged_places`.
    """
    places = prompt.judged_places()
    tokens, num_kept = prompt.tokens(), len(prompt.ending)
    with torch.inference_mode():
        full = (
            model(input_ids=tokens[None], use_cache=False, logits_to_keep=num_kept)
            .logits[0, places - 1]
            .float()
            .log_softmax(-1)
        )
        got = blended.prefill(tokens, torch.tensor([0, len(tokens)]), num_kept)
        ours = got.logits[0, places - 1].float().log_softmax(-1)
        targets = prompt.ending[places]
        return PromptQuality(
            len(targets),
            float(F.kl_div(ours, full, reduction="sum", log_target=True)),
            int((ours.argmax(-1) == full.argmax(-1)).sum()),
            float(F.nll_loss(full, targets, reduction="sum")),
            float(F.nll_loss(ours, targets, reduction="sum")),
            got.num_retrieved,
            len(tokens),
        )


def measure(
    model: PreTrainedModel,
    prompts: Iterable[SplitPrompt],
    blending: Callable[[BlendRetriever], BlendingModel],
    progress: Callable[[int], None] = lambda _: None,
) -> Quality:
    """Blend each prompt and compare.

    Args:
        model: In eval mode.
        prompts: At least two.
        blending: Makes the blending model around a retriever.
        progress: Called with the number of prompts done.

    Raises:
        ValueError: There are fewer than two, or one cannot be judged; see
            `SplitPrompt.judged_places`.
    """
    retriever = DocumentRetriever(model)
    blended, found = blending(retriever), []
    for prompt in prompts:
        retriever.compute(prompt)
        found.append(compare(model, blended, prompt))
        progress(len(found))
    if len(found) < 2:
        raise ValueError(f"{len(found)} prompts; a standard error needs at least two")
    num_tokens = sum(one.num_tokens for one in found)
    deltas = torch.tensor(
        [(one.blended_loss_nats - one.full_loss_nats) / one.num_tokens for one in found],
        dtype=torch.float64,
    )
    return Quality(
        len(found),
        num_tokens,
        sum(one.kl_nats for one in found) / num_tokens,
        sum(one.num_agreeing for one in found) / num_tokens,
        float(deltas.mean()),
        float(deltas.std() / len(found) ** 0.5),
        sum(one.num_reused for one in found) / sum(one.num_prompt_tokens for one in found),
    )


def certify(
    model: PreTrainedModel,
    model_name: str,
    prompts: Iterable[SplitPrompt],
    profile: BlendProfile,
    *,
    bounds: QualityBounds = DEFAULT_BOUNDS,
    revision: str | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> BlendCertificate:
    """Measure what blending costs a model on prompts, and return the certificate of that, passed or
    not; `CertificateFolder` keeps it.

    Args:
        model: In eval mode.
        model_name: Name under which its KV is shared.
        prompts: At least two.
        profile: The parameters of blending.
        bounds: What the model must keep to.
        revision: Revision of the weights, as for `metadata_of`.
        progress: Called with the number of prompts done.

    Raises:
        ValueError: The model cannot be blended, or the prompts cannot be measured; see
            `blending_model_of`, `metadata_of` and `measure`.
    """
    metadata = metadata_of(model, model_name, LMCacheEngineConfig.from_defaults(), revision)
    quality = measure(
        model, prompts, lambda retriever: blending_model_of(model, retriever, profile), progress
    )
    return BlendCertificate(
        FORMAT_VERSION,
        metadata.model_name,
        metadata.revision,
        profile,
        bounds,
        quality,
        version("lmcache-core"),
    )


def _flat(side: torch.Tensor) -> torch.Tensor:
    """Return K or V of a cache, `[1, num_heads, num_tokens, head_size]`, as `[num_tokens, num_heads
    * head_size]`.
    """
    return side[0].transpose(0, 1).flatten(1)
