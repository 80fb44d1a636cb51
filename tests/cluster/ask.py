"""Ask a vLLM server for a completion, and time it. Standard library only: it also runs inside pods.

Usage: python ask.py URL MODEL SEED [NUM_TOKENS], which prints one line of JSON. The same seed is
the same prompt.
"""

from __future__ import annotations

import http.client
import json
import random
import sys
import time
import urllib.request
from dataclasses import asdict, dataclass

TIMEOUT_S = 120.0
NUM_TOKENS = 4000
FIRST_TOKEN, NUM_WORDS = 16, 4000
"""Token ids of words, in any vocabulary of at least this size."""


@dataclass(frozen=True)
class Answer:
    """A completion.

    Attributes:
        text: What the model wrote.
        num_prompt: Tokens of the prompt.
        num_cached: Tokens of the prompt whose KV was not computed for this request.
        took_ms: From the request to the whole answer.
    """

    text: str
    num_prompt: int
    num_cached: int
    took_ms: float


def prompt(seed: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    """Return a prompt as token ids; two seeds share no prefix worth caching."""
    return random.Random(seed).choices(range(FIRST_TOKEN, FIRST_TOKEN + NUM_WORDS), k=num_tokens)


def complete(url: str, model: str, tokens: list[int], timeout_s: float = TIMEOUT_S) -> Answer:
    """Ask for 8 tokens.

    Args:
        url: Base URL of the server.
        model: Its served name.
        tokens: The prompt.
        timeout_s: Limit on the request.

    Raises:
        OSError: No answer in time, or one that is not a success.
        ValueError: The answer is not a completion.
    """
    body = {"model": model, "prompt": tokens, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), headers, method="POST"
    )
    begin = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            answer = json.load(response)
    except http.client.HTTPException as exc:
        raise OSError(f"{type(exc).__name__}: {exc}") from exc
    took_ms = 1000 * (time.monotonic() - begin)
    try:
        usage = answer["usage"]
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            answer["choices"][0]["text"],
            usage["prompt_tokens"],
            details.get("cached_tokens") or 0,
            took_ms,
        )
    except (KeyError, IndexError, TypeError) as exc:
        raise ValueError(f"not a completion: {json.dumps(answer)[:500]}") from exc


if __name__ == "__main__":
    url, model, seed, *rest = sys.argv[1:]
    try:
        answer = complete(url, model, prompt(int(seed), *map(int, rest)))
    except (OSError, ValueError) as exc:
        sys.exit(f"ask.py: {url}: {exc}")
    print(json.dumps(asdict(answer)))
