"""Blended prompts, in an engine process: the documents of several prompts are kept, and read in
another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from lmcache_core.blend.certificate import (
    FORMAT_VERSION,
    BlendCertificate,
    BlendProfile,
    CertificateFolder,
    Quality,
    QualityBounds,
)
from lmcache_core.config import LMCacheEngineConfig
from lmcache_core.engine import LMCacheEngine, LMCacheEngineBuilder
from lmcache_core.integrations.transformers import CachedCausalLM, connector_of, metadata_of
from lmcache_core.integrations.transformers.blend_quality import SplitPrompt, measure
from lmcache_core.integrations.transformers.blended import blending_model_of

from lmcache_demo.engines import AskBlended, BlendedAnswers, KeepDocuments
from lmcache_demo.model import load_two_document_model
from lmcache_demo.model.two_documents import (
    SEPARATOR,
    TwoDocumentPrompt,
    Vocabulary,
    draw_prompt,
    encode_questions,
)

INSTANCE = "demo-blend"
MODEL_NAME = "lmcache-demo-two-documents"
NUM_PROMPTS, NUM_CERTIFIED_PROMPTS, NUM_QUESTIONS = 6, 40, 4
NUM_OWNERS, NUM_THINGS = 10, 20
MIN_TOKENS = 64
SEED = 7


class BlendingWorker:
    """The model that answers from two documents, and the prompts; its process computes with one
    thread from now on.
    """

    def __init__(self) -> None:
        # Prompts of a hundred tokens gain nothing from a second thread, and where cores are shared
        # threads wait for each other at every operator: 30 seconds instead of 2 were measured.
        torch.set_num_threads(1)
        self._model, self._tokenizer = load_two_document_model()
        self._separator = self._encode(SEPARATOR)
        words, rng = Vocabulary(self._tokenizer), np.random.default_rng(SEED)
        drawn = [
            draw_prompt(rng, words, NUM_OWNERS, NUM_THINGS)
            for _ in range(NUM_PROMPTS + NUM_CERTIFIED_PROMPTS)
        ]
        self._prompts, self._certified_prompts = drawn[:NUM_PROMPTS], drawn[NUM_PROMPTS:]

    def keep(self, message: KeepDocuments) -> int:
        """Store the documents of all prompts, in an order that no question uses; return
        their tokens.
        """
        num_tokens = 0
        with self._cached(
            LMCacheEngineConfig.from_defaults(
                remote_url=None, sidecar_socket=message.socket, tier_timeout_s=5.0
            )
        ) as cached:
            for prompt in self._prompts:
                for document in reversed(self._documents(prompt)):
                    cached.keep_document(document)
                    num_tokens += len(document)
        return num_tokens

    def ask(self, message: AskBlended) -> BlendedAnswers:
        """Certify, then answer as far as the certificate allows it."""
        config = LMCacheEngineConfig.from_defaults(
            remote_url=None,
            sidecar_socket=message.socket,
            tier_timeout_s=5.0,
            enable_blending=True,
            blend_policy=message.policy,
            blend_recompute_ratio=message.recompute_ratio,
            blend_min_tokens=MIN_TOKENS,
            blend_certificates=message.folder,
        )
        quality = self._certify(config, Path(message.folder))
        plain = CachedCausalLM(self._model, None)
        found = BlendedAnswers(quality.kl_nats, quality.top1_agreement, None, 0, 0, 0, 0, 0, 0)
        with self._cached(config) as cached:
            found.reason_against = cached.reason_against_blending
            for prompt in self._prompts:
                documents = torch.cat(self._documents(prompt))
                for question, answer in prompt.questions[:NUM_QUESTIONS]:
                    tokens = torch.cat([documents, self._encode(question)])
                    got, want = cached.generate(tokens, 1), plain.generate(tokens, 1)
                    found.num_answers += 1
                    found.num_blended += got.is_blended
                    found.num_equal += got.tokens == want.tokens
                    found.num_right += got.tokens == self._encode(answer).tolist()
                    found.num_prompt_tokens += got.num_prompt_tokens
                    found.num_reused_tokens += got.num_reused_tokens
        return found

    def _certify(self, config: LMCacheEngineConfig, folder: Path) -> Quality:
        """Measure on prompts that are not asked later, and keep the certificate."""
        profile = BlendProfile(
            config.blend_policy, config.blend_recompute_ratio, tuple(self._separator.tolist())
        )
        prompts = [self._split(prompt) for prompt in self._certified_prompts]
        quality = measure(
            self._model,
            prompts,
            lambda retriever: blending_model_of(self._model, retriever, profile),
        )
        metadata = metadata_of(self._model, MODEL_NAME, config)
        CertificateFolder(folder).save(
            BlendCertificate(
                FORMAT_VERSION,
                metadata.model_name,
                metadata.revision,
                profile,
                QualityBounds(),
                quality,
                version("lmcache-core"),
            )
        )
        return quality

    @contextmanager
    def _cached(self, config: LMCacheEngineConfig) -> Iterator[CachedCausalLM]:
        metadata = metadata_of(self._model, MODEL_NAME, config)
        engine: LMCacheEngine = LMCacheEngineBuilder.get_or_create(
            INSTANCE, config, metadata, connector_of(self._model)
        )
        try:
            cached = CachedCausalLM(self._model, engine, self._separator)
            try:
                yield cached
            finally:
                cached.close()
        finally:
            LMCacheEngineBuilder.destroy(INSTANCE)

    def _documents(self, prompt: TwoDocumentPrompt) -> list[torch.Tensor]:
        texts = (*prompt.marks, "\n".join(prompt.owners))
        return [torch.cat([self._encode(text), self._separator]) for text in texts]

    def _split(self, prompt: TwoDocumentPrompt) -> SplitPrompt:
        ending, places = encode_questions(self._tokenizer, prompt.questions)
        return SplitPrompt(self._documents(prompt), torch.tensor(ending), torch.tensor(places))

    def _encode(self, text: str) -> torch.Tensor:
        return torch.tensor(
            self._tokenizer.encode(text, add_special_tokens=False), dtype=torch.int64
        )
