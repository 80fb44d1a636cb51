"""The section `blend-time` of docs/benchmarks.md: what a blended prefill costs in floating-point
operations and in time to the first token, in turn with transformers' own full prefill.

In the time of a blended prompt its documents are looked up in host memory, loaded, moved and
repaired. Models have random weights: neither time nor operations depend on these.
"""

from __future__ import annotations

import gc
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Self

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
from lmcache_core.engine import LMCacheEngine
from lmcache_core.integrations.transformers import CachedCausalLM, connector_of, metadata_of
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.bench.engines import running_engine
from tests.bench.measure import OtherLoad, Run, median_ratio
from tests.bench.report import ON_CORES, Findings, Section

NUM_THREADS = 2
NUM_ROUNDS = 3
GOAL_RATIO, GOAL_TIMES = 0.15, 2.2
FULL = "all: full recompute"

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
"""Of nothing that was measured: only the time of a model with random weights counts."""


@dataclass(frozen=True)
class Shape:
    """A model with random weights, and what is measured on it.

    Attributes:
        options: Of its configuration.
        ratios: For each length of a prompt, the shares that are recomputed.
    """

    name: str
    options: Mapping[str, int]
    ratios: Mapping[int, Sequence[float]]


SMALL = Shape(
    "0.1 B",
    {
        "num_hidden_layers": 12,
        "hidden_size": 768,
        "intermediate_size": 2_048,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "vocab_size": 32_000,
    },
    {4_096: (GOAL_RATIO, 0.25), 8_192: (GOAL_RATIO,)},
)
LARGE = Shape(  # layers, widths and vocabulary of Qwen2.5-0.5B
    "0.5 B",
    {
        "num_hidden_layers": 24,
        "hidden_size": 896,
        "intermediate_size": 4_864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
    },
    {4_096: (GOAL_RATIO, 0.25), 8_192: (GOAL_RATIO,)},
)


def measure(run: Run) -> Findings:
    """Measure everything; takes about eight minutes on two cores, with `NUM_THREADS` torch
    threads.
    """
    rows: list[tuple[str, ...]] = []
    with _threads(NUM_THREADS), OtherLoad() as others:
        for shape in (SMALL, LARGE):
            model = made_model(shape.options, torch.bfloat16)
            for num_tokens, ratios in shape.ratios.items():
                prompt = Prompt.made(num_tokens, model.config.vocab_size)
                arms = measure_prompt(run, shape.name, model, prompt, ratios)
                rows += table_rows(shape.name, num_tokens, arms)
                gc.collect()
    headings = (
        "model",
        "tokens",
        "recomputed",
        "share of full",
        "first token, s",
        "times faster",
        "note",
    )
    title = "Blend: first token of a prompt whose documents are in host memory"
    remark = (
        f"bfloat16, {NUM_THREADS} torch threads, medians of {NUM_ROUNDS} rounds. {others.remark}"
    )
    machine = f"Machine: {platform.machine()}, {ON_CORES}"
    return Findings([Section(title, headings, rows)], [remark], machine)


@dataclass(frozen=True)
class Took:
    """What one way to the first token of a prompt took.

    Attributes:
        name: What is recomputed.
        flops: Of one time.
        seconds: Of each round.
    """

    name: str
    flops: int
    seconds: Sequence[float]


def table_rows(model: str, num_tokens: int, arms: Sequence[Took]) -> list[tuple[str, ...]]:
    """Return the rows of one prompt; the first arm recomputes everything. Speed-ups are medians
    over the rounds, in each of which all arms were measured in turn.
    """
    full = arms[0]
    return [
        (
            model,
            f"{num_tokens:,}",
            arm.name,
            f"{arm.flops / full.flops:.2f}",
            f"{statistics.median(arm.seconds):.2f}",
            f"{median_ratio(full.seconds, arm.seconds):.2f}",
            f"goal: {GOAL_TIMES:g} times" if arm.name == f"{GOAL_RATIO:.0%}" else "",
        )
        for arm in arms
    ]


def measure_prompt(
    run: Run, name: str, model: LlamaForCausalLM, prompt: Prompt, ratios: Sequence[float]
) -> list[Took]:
    """Take every way once in each round: a full prefill, and blended ones.

    Args:
        name: Of the model.
        ratios: Of the blended ways.
    """
    what = f"blend: {name}, {len(prompt.tokens):,} tokens"
    with blending_models(model, prompt, ratios) as blending:
        arms = {FULL: lambda: full_first_token(model, prompt)}
        for one, ratio in zip(blending, ratios, strict=True):
            arms[f"{ratio:.0%}"] = lambda one=one: blended_first_token(one, prompt)
        flops = {}
        for arm, call in arms.items():
            flops[arm] = run(f"{what}, counting {arm}", lambda: counted(call))  # noqa: B023 (run at once)
        seconds: dict[str, list[float]] = {arm: [] for arm in arms}
        for number in range(NUM_ROUNDS):
            for arm, call in arms.items():
                began = time.perf_counter()
                run(f"{what}, round {number + 1} of {NUM_ROUNDS}, {arm}", call)
                seconds[arm].append(time.perf_counter() - began)
    return [Took(arm, flops[arm], seconds[arm]) for arm in arms]


@torch.inference_mode()
def full_first_token(model: LlamaForCausalLM, prompt: Prompt) -> int:
    """Compute what transformers does by itself."""
    output = model(input_ids=prompt.tokens[None], use_cache=True, logits_to_keep=1)
    return int(output.logits[0, -1].argmax())


def blended_first_token(model: CachedCausalLM, prompt: Prompt) -> int:
    """Do what a user does.

    Raises:
        RuntimeError: The prompt was not blended, or not all of its documents were found.
    """
    answer = model.generate(prompt.tokens, 1)
    if not answer.is_blended or answer.num_reused_tokens != prompt.num_in_documents:
        raise RuntimeError(
            f"of {prompt.num_in_documents} tokens of documents {answer.num_reused_tokens} were"
            f" found, blended: {answer.is_blended}"
        )
    return int(answer.tokens[0])


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- Floating-point operations --------------------------------------------------------------------

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def counted(work: Callable[[], object]) -> int:
    """Do the work on the CPU, and return the floating-point operations of the matrix products that
    it asks for: two for each multiplication and addition.

    A causal attention multiplies each query with the keys up to its own; one with a mask multiplies
    all pairs, also those that it then masks.
    """
    counter = FlopCounterMode(display=False, custom_mapping={ATTENTION: _attention_flops})
    counter.mod_tracker = _NoModules()
    with counter:
        work()
    return counter.get_total_flops()


class _NoModules(ModuleTracker):
    """Counts everything as one: hooks in every module would keep a model from the cache."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


def _attention_flops(
    q: torch.Size,
    k: torch.Size,
    v: torch.Size,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **others: object,
) -> int:
    num_sequences, num_heads, num_queries, head_size = q
    pairs = num_queries * (num_queries + 1) // 2 if is_causal else num_queries * k[2]
    return 2 * num_sequences * num_heads * pairs * (head_size + v[3])


# --- Models and prompts ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompt:
    """Documents, and a prompt that has them in another order with a question at its end.

    Attributes:
        documents: Token ids of each, the separator at its end.
        separator: Token ids that no text has.
    """

    documents: Sequence[torch.Tensor]
    tokens: torch.Tensor
    separator: torch.Tensor

    @classmethod
    def made(cls, num_tokens: int, vocab_size: int, num_documents: int | None = None) -> Prompt:
        """Return a prompt of random tokens and documents of one length.

        Args:
            vocab_size: Of the model; its last `SEPARATOR_TOKENS` are the separator.
            num_documents: None: one for each `TOKENS_A_DOCUMENT`.

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
        dice = torch.Generator().manual_seed(num_tokens)
        own = torch.randint(0, num_words, (number, length - SEPARATOR_TOKENS), generator=dice)
        documents = [torch.cat([text, separator]) for text in own]
        question = torch.randint(0, num_words, (QUESTION_TOKENS,), generator=dice)
        return cls(documents, torch.cat([*reversed(documents), question]), separator)

    @property
    def num_in_documents(self) -> int:
        """Tokens of the prompt that can be retrieved."""
        return len(self.tokens) - QUESTION_TOKENS


def made_model(options: Mapping[str, int], dtype: torch.dtype) -> LlamaForCausalLM:
    """Return a Llama with random weights, in eval mode."""
    torch.manual_seed(0)
    config = LlamaConfig(**options, max_position_embeddings=16_384, tie_word_embeddings=True)
    # Not cast later: that would round its rotations too.
    model: LlamaForCausalLM = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


@contextmanager
def blending_models(
    model: LlamaForCausalLM, prompt: Prompt, ratios: Sequence[float]
) -> Iterator[list[CachedCausalLM]]:
    """Put the model in front of engines that keep the documents in host memory, each as a prompt of
    its own. A ratio is an option of an engine, so there is one for each.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lmcache-bench-"))
        cached = []
        for ratio in ratios:
            engine = stack.enter_context(_engine(model, prompt, ratio, Path(folder)))
            one = stack.enter_context(closing(CachedCausalLM(model, engine, prompt.separator)))
            for document in prompt.documents:
                one.keep_document(document)
            cached.append(one)
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
    chunk_bytes = prod(metadata.kv_shape) * getattr(torch, metadata.kv_dtype_name).itemsize
    arena_bytes = int(num_chunks * chunk_bytes * SPARE_ROOM)
    with running_engine(config, metadata, connector_of(model), arena_bytes) as engine:
        yield engine
