"""What blended prompts are measured with: models with random weights, prompts of documents, and
engines that keep these.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from math import prod
from pathlib import Path

import torch
from lmcache_core.blend.certificate import (
    FORMAT_VERSION,
    BlendCertificate,
    BlendProfile,
    CertificateFolder,
    Quality,
    QualityBounds,
)
from lmcache_core.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache_core.engine import LMCacheEngine
from lmcache_core.integrations.transformers import CachedCausalLM, connector_of, metadata_of
from lmcache_core.memory import HostMemoryAllocator
from lmcache_core.token_database import ChunkedTokenDatabase
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

QUESTION_TOKENS = 64
TOKENS_A_DOCUMENT = 512
"""Of a document and its share of the question: 8 documents of 504 tokens and a question of 64
are 4,096.
"""
SEPARATOR_TOKENS = 2
SPARE_ROOM = 1.25
"""Host memory over what the documents' KV takes."""
PERFECT = Quality(
    num_prompts=2,
    num_tokens=2,
    kl_nats=0.0,
    top1_agreement=1.0,
    delta_loss_nats=0.0,
    delta_loss_error=0.0,
    reused_share=1.0,
)
"""Of nothing that was measured: a model with random weights says nothing, and only its time is
looked at.
"""


@dataclass(frozen=True)
class Prompt:
    """Documents, and a prompt that has them in another order with a question behind.

    Attributes:
        documents: Token ids of each, the separator at its end.
        tokens: Token ids of the prompt.
        separator: Token ids that no text has.
    """

    documents: Sequence[torch.Tensor]
    tokens: torch.Tensor
    separator: torch.Tensor

    @property
    def num_in_documents(self) -> int:
        """Tokens of the prompt that can be retrieved."""
        return len(self.tokens) - QUESTION_TOKENS


def made_prompt(num_tokens: int, vocab_size: int, num_documents: int | None = None) -> Prompt:
    """A prompt of random tokens; its documents are as long as each other.

    Args:
        num_tokens: Of the prompt.
        vocab_size: Of the model; its last `SEPARATOR_TOKENS` are the separator.
        num_documents: None takes one for each `TOKENS_A_DOCUMENT`.

    Raises:
        ValueError: The tokens cannot be shared out so.
    """
    number = num_documents or num_tokens // TOKENS_A_DOCUMENT
    length, rest = divmod(num_tokens - QUESTION_TOKENS, number)
    if rest or length <= SEPARATOR_TOKENS:
        raise ValueError(
            f"{num_tokens} tokens, {QUESTION_TOKENS} of them the question, are not {number}"
            " documents of one length"
        )
    num_words = vocab_size - SEPARATOR_TOKENS
    separator = torch.arange(num_words, vocab_size)
    generator = torch.Generator().manual_seed(num_tokens)
    own = torch.randint(0, num_words, (number, length - SEPARATOR_TOKENS), generator=generator)
    documents = [torch.cat([text, separator]) for text in own]
    question = torch.randint(0, num_words, (QUESTION_TOKENS,), generator=generator)
    return Prompt(documents, torch.cat([*reversed(documents), question]), separator)


def made_model(options: Mapping[str, int], dtype: torch.dtype) -> LlamaForCausalLM:
    """A Llama with random weights, in eval mode.

    Args:
        options: Of its configuration.
        dtype: Of its weights.
    """
    torch.manual_seed(0)
    config = LlamaConfig(**options, max_position_embeddings=16_384, tie_word_embeddings=True)
    model: LlamaForCausalLM = AutoModelForCausalLM.from_config(
        config, dtype=dtype
    )  # a cast later would round its rotations too
    return model.eval()


@contextmanager
def blending_models(
    model: LlamaForCausalLM, prompt: Prompt, ratios: Sequence[float]
) -> Iterator[list[CachedCausalLM]]:
    """The model in front of engines that keep the documents in host memory, each as a prompt of its
    own.

    A ratio is an option of an engine, so there is one for each; the first has the documents
    computed, the others get copies.

    Args:
        model: In eval mode, on the CPU.
        prompt: Whose documents are kept.
        ratios: Of each engine.
    """
    with ExitStack() as stack:
        certificates = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="lmcache-bench-"))
        )
        engines = [
            stack.enter_context(_engine(model, prompt, ratio, certificates)) for ratio in ratios
        ]
        cached = [
            stack.enter_context(closing(CachedCausalLM(model, engine, prompt.separator)))
            for engine in engines
        ]
        for document in prompt.documents:
            cached[0].keep_document(document)
            _copy(document, engines)
        yield cached


@contextmanager
def _engine(
    model: LlamaForCausalLM, prompt: Prompt, ratio: float, certificates: Path
) -> Iterator[LMCacheEngine]:
    config = LMCacheEngineConfig.from_defaults(
        remote_url=None,
        save_unfull_chunk=True,
        enable_blending=True,
        blend_recompute_ratio=ratio,
        blend_certificates=str(certificates),
    )
    metadata = metadata_of(model, "bench/random", config, revision="random")
    profile = BlendProfile(config.blend_policy, ratio, tuple(prompt.separator.tolist()))
    CertificateFolder(certificates).save(
        BlendCertificate(
            FORMAT_VERSION,
            metadata.model_name,
            metadata.revision,
            profile,
            QualityBounds(),
            PERFECT,
            version("lmcache-core"),
        )
    )
    num_chunks = sum(-(-len(document) // config.chunk_size) for document in prompt.documents)
    allocator = HostMemoryAllocator(int(num_chunks * _chunk_bytes(metadata) * SPARE_ROOM))
    engine = LMCacheEngine(
        config, metadata, allocator, ChunkedTokenDatabase(config, metadata), connector_of(model)
    )
    engine.open()
    with closing(engine):
        yield engine


def _chunk_bytes(metadata: LMCacheEngineMetadata) -> int:
    return prod(metadata.kv_shape) * getattr(torch, metadata.kv_dtype_name).itemsize


def _copy(document: torch.Tensor, engines: Sequence[LMCacheEngine]) -> None:
    first, *others = engines
    num_layers, _, _, num_heads, head_size = first.metadata.kv_shape
    dtype = getattr(torch, first.metadata.kv_dtype_name)
    layers = tuple(
        tuple(layer)
        for layer in torch.empty((num_layers, 2, len(document), num_heads, head_size), dtype=dtype)
    )
    if not first.retrieve(document, kvcaches=layers).all():
        raise RuntimeError("a document that was just kept is not found in host memory")
    for engine in others:
        engine.store(document, kvcaches=layers)
