"""An engine of the demo, in a process of its own: `lmcache_core.open` puts a small model in front
of a sidecar.

Each line of standard input is a JSON list, the name of a worker's method and its arguments; what
the method returns is answered as a line of standard output.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lmcache_core
import msgspec
import numpy as np
import torch
from lmcache_core.blend.certificate import BlendProfile, CertificateFolder, Quality
from lmcache_core.integrations.transformers.blend_quality import SplitPrompt, certify
from lmcache_core.telemetry import (
    RETRIEVED_BYTES_TOTAL,
    RETRIEVED_TOKENS_TOTAL,
    STORED_BYTES_TOTAL,
)

from lmcache_demo.model import load_model, load_two_document_model
from lmcache_demo.model.two_documents import (
    SEPARATOR,
    TwoDocumentPrompt,
    Vocabulary,
    draw_prompt,
    encode_questions,
)
from lmcache_demo.report import Answer, BlendedAnswers

MODEL_NAME = "lmcache-demo-llama"
TWO_DOCUMENT_MODEL_NAME = "lmcache-demo-two-documents"
TIER_TIMEOUT_S = 5.0
NUM_PROMPTS, NUM_CERTIFIED_PROMPTS, NUM_QUESTIONS = 6, 40, 4
NUM_OWNERS, NUM_THINGS = 10, 20
BLEND_MIN_TOKENS = 64
SEED = 7


class TextWorker:
    """The model that continues a text, without a cache until `attach`."""

    def __init__(self) -> None:
        self._model, self._tokenizer = load_model()
        self._cache = lmcache_core.CachedCausalLM(self._model, None)
        self._cache.generate(torch.arange(1, 65), 2)  # the first forward pass of a process is slow

    def attach(self, sidecar: str | None) -> None:
        """Put the model in front of the sidecar at that socket; None: of no cache."""
        self._cache.close()
        if sidecar is None:
            self._cache = lmcache_core.CachedCausalLM(self._model, None)
        else:
            self._cache = lmcache_core.open(
                self._model, sidecar=sidecar, name=MODEL_NAME, tier_timeout_s=TIER_TIMEOUT_S
            )

    def ask(self, prompt: str, max_new_tokens: int) -> Answer:
        """Generate greedily, as many tokens as that."""
        before = self._counters()
        generation = self._cache.generate(
            torch.tensor(self._tokenizer(prompt).input_ids), max_new_tokens, eos_token_id=()
        )
        moved = {key: value - before.get(key, 0) for key, value in self._counters().items()}

        def by_tier(counter: str) -> dict[str, int]:
            return {
                tier: count for (name, tier), count in moved.items() if name == counter and count
            }

        return Answer(
            tokens=generation.tokens,
            text=self._tokenizer.decode(generation.tokens),
            num_prompt_tokens=generation.num_prompt_tokens,
            num_reused_tokens=generation.num_reused_tokens,
            reused_by_tier=by_tier(RETRIEVED_TOKENS_TOTAL),
            retrieved_bytes=sum(by_tier(RETRIEVED_BYTES_TOTAL).values()),
            stored_bytes=sum(by_tier(STORED_BYTES_TOTAL).values()),
            time_to_first_token_s=generation.time_to_first_token_s,
            kv_bits=8 * self._model.dtype.itemsize,
        )

    def _counters(self) -> dict[tuple[str, str], int]:
        return {} if self._cache.engine is None else self._cache.engine.counters.snapshot()


class DocumentWorker:
    """The model that answers from two documents, and its prompts, computed with one thread."""

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

    def keep(self, sidecar: str) -> None:
        """Store the documents of all prompts, each on its own, in an order that no question
        uses.
        """
        with self._open(sidecar) as cache:
            for prompt in self._prompts:
                for document in reversed(self._documents(prompt)):
                    cache.keep_document(document)

    def ask(
        self, sidecar: str, certificates: str, policy: str, recompute_ratio: float
    ) -> BlendedAnswers:
        """Certify a way to blend, then ask all questions as far as the certificate allows it.

        Args:
            sidecar: Socket of the sidecar to read the documents through.
            certificates: Folder of the certificates.
            policy: Which tokens are recomputed.
            recompute_ratio: Share of them.
        """
        profile = BlendProfile(policy, recompute_ratio, tuple(self._separator.tolist()))
        quality = self._certify(profile, certificates)
        plain = lmcache_core.CachedCausalLM(self._model, None)
        found = BlendedAnswers(policy, recompute_ratio, quality.kl_nats, quality.top1_agreement)
        with self._open(
            sidecar,
            separator=self._separator,
            enable_blending=True,
            blend_policy=policy,
            blend_recompute_ratio=recompute_ratio,
            blend_min_tokens=BLEND_MIN_TOKENS,
            blend_certificates=certificates,
        ) as cache:
            found.reason_against = cache.reason_against_blending
            for prompt in self._prompts:
                for question, answer in prompt.questions[:NUM_QUESTIONS]:
                    tokens = torch.cat([*self._documents(prompt), self._encode(question)])
                    got, want = cache.generate(tokens, 1), plain.generate(tokens, 1)
                    found.num_answers += 1
                    found.num_blended += got.is_blended
                    found.num_equal += got.tokens == want.tokens
                    found.num_right += got.tokens == self._encode(answer).tolist()
                    found.num_prompt_tokens += got.num_prompt_tokens
                    found.num_reused_tokens += got.num_reused_tokens
        return found

    def _certify(self, profile: BlendProfile, folder: str) -> Quality:
        """Measure on prompts that are not asked later, and keep the certificate."""
        prompts = []
        for prompt in self._certified_prompts:
            ending, places = encode_questions(self._tokenizer, prompt.questions)
            prompts.append(
                SplitPrompt(self._documents(prompt), torch.tensor(ending), torch.tensor(places))
            )
        certificate = certify(self._model, TWO_DOCUMENT_MODEL_NAME, prompts, profile)
        CertificateFolder(Path(folder)).save(certificate)
        return certificate.quality

    def _open(self, sidecar: str, **options: Any) -> lmcache_core.CachedCausalLM:
        return lmcache_core.open(
            self._model,
            sidecar=sidecar,
            name=TWO_DOCUMENT_MODEL_NAME,
            tier_timeout_s=TIER_TIMEOUT_S,
            **options,
        )

    def _documents(self, prompt: TwoDocumentPrompt) -> list[torch.Tensor]:
        texts = (*prompt.marks, "\n".join(prompt.owners))
        return [torch.cat([self._encode(text), self._separator]) for text in texts]

    def _encode(self, text: str) -> torch.Tensor:
        return torch.tensor(
            self._tokenizer.encode(text, add_special_tokens=False), dtype=torch.int64
        )


WORKERS = {"text": TextWorker, "documents": DocumentWorker}


def main() -> None:
    """Call methods of the worker that the command line names, until standard input ends."""
    worker = WORKERS[sys.argv[1]]()
    for line in sys.stdin.buffer:
        method, *arguments = msgspec.json.decode(line)
        answer = getattr(worker, method)(*arguments)
        sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
