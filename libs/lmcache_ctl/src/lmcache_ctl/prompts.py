"""Read a prompt: token ids from a file, or text and messages that vLLM turns into token ids."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from lmcache_core.keys import MAX_TOKEN_ID

from lmcache_ctl.asking import tls_context
from lmcache_ctl.errors import CtlError, UsageError
from lmcache_ctl.kube.access import asks_cluster
from lmcache_ctl.options import CtlSettings

STANDARD_INPUT: Final = Path("-")
EXPLAIN_PATH: Final = "/v1/admin/explain"
"""Where a sidecar tells the chunks of token ids, and where they are."""
VLLM_PORT: Final = 8000
"""vLLM's default, and that of the chart's pods."""
CHAT_FIELDS: Final = (
    *("messages", "tools", "chat_template", "chat_template_kwargs", "mm_processor_kwargs"),
    *("add_generation_prompt", "continue_final_message", "add_special_tokens"),
)
"""What of a chat request decides about its tokens."""
_SEPARATORS = re.compile(r"[\s,]+")
_TOKEN_ID = re.compile(r"[0-9]{1,20}")  # Python refuses to read thousands of digits


class TokensAnswer(msgspec.Struct):
    """The part of vLLM's answer that matters."""

    tokens: list[int]


def read_text(path: Path) -> str:
    """Return the text of a file, or of standard input for `-`.

    Raises:
        UsageError: It cannot be read; what is in it is not repeated.
    """
    try:
        return sys.stdin.read() if path == STANDARD_INPUT else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        why = getattr(exc, "strerror", None) or "it is not text"
        raise UsageError(f"cannot read {path}: {why}") from exc


def read_token_ids(path: Path) -> list[int]:
    """Read token ids: a JSON list, or numbers separated by commas or blanks.

    Raises:
        UsageError: The file cannot be read, is empty or holds something else; what that is, is not
            repeated.
    """
    inside = read_text(path).strip().removeprefix("[").removesuffix("]").strip()
    if not inside:
        raise UsageError(
            f"{path} is empty: write token ids as numbers, separated by commas or blanks"
        )
    words = _SEPARATORS.split(inside)
    if not all(_TOKEN_ID.fullmatch(word) and int(word) <= MAX_TOKEN_ID for word in words):
        raise UsageError(
            f"{path} holds something other than token ids: write numbers separated by commas or"
            " blanks"
        )
    return [int(word) for word in words]


def read_prompt(path: Path) -> dict[str, Any]:
    """Return the question to `/tokenize` for a prompt of text, as `/v1/completions` takes it. One
    trailing newline is the editor's and is removed.

    Raises:
        UsageError: The file cannot be read or is empty.
    """
    text = read_text(path).removesuffix("\n")
    if not text:
        raise UsageError(f"{path} is empty: write the prompt into it")
    return {"prompt": text}


def read_messages(path: Path) -> dict[str, Any]:
    """Return the question to `/tokenize` for a chat: a JSON list of messages, or the whole body of
    a chat request, whose other fields are left out.

    Raises:
        UsageError: The file cannot be read or holds neither.
    """
    try:
        body = msgspec.json.decode(read_text(path))
    except (msgspec.DecodeError, RecursionError) as exc:
        raise UsageError(f"{path} is not JSON: write the messages, or a chat request") from exc
    if isinstance(body, list):
        body = {"messages": body}
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise UsageError(f'{path} has no messages: write [{{"role": …, "content": …}}, …]')
    return {name: body[name] for name in CHAT_FIELDS if name in body}


def tokenize(settings: CtlSettings, url: str, question: Mapping[str, Any]) -> list[int]:
    """Return the token ids of a prompt or chat, as vLLM makes them. No token of this cache is sent.

    Args:
        url: vLLM's address, `http(s)://host:port`.
        question: The body for `/tokenize`.

    Raises:
        CtlError: vLLM does not answer, or refuses.
    """
    import httpx

    verify = tls_context(settings.tls) if url.startswith("https:") else True
    try:
        with httpx.Client(trust_env=False, timeout=settings.timeout_s, verify=verify) as client:
            answer = client.post(f"{url.rstrip('/')}/tokenize", json=question)
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        why = str(exc) or type(exc).__name__
        raise CtlError(f"vLLM does not answer at {url} ({why}): name it with --vllm-url") from exc
    if answer.status_code != httpx.codes.OK:
        raise CtlError(f"{url}/tokenize: {_refusal(answer)}")
    try:
        return msgspec.json.decode(answer.content, type=TokensAnswer).tokens
    except msgspec.DecodeError as exc:
        raise CtlError(
            f"{url} is not vLLM: /tokenize answers without token ids; correct --vllm-url"
        ) from exc


@contextlib.contextmanager
def vllm_at(settings: CtlSettings, url: str | None, pod: str) -> Iterator[str]:
    """Yield the address of vLLM: the given one, else that of a pod in a cluster, else this
    machine's.
    """
    if url is not None:
        yield url
    elif asks_cluster(settings):
        from lmcache_ctl.kube.forward import forwarded

        with forwarded(settings, pod, VLLM_PORT) as address:
            yield f"http://{address}"
    else:
        yield f"http://127.0.0.1:{VLLM_PORT}"


def _refusal(answer: Any) -> str:
    """Return what vLLM says, or the status."""
    try:
        told = answer.json()
    except ValueError:
        told = None
    error = told.get("error", told) if isinstance(told, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    if answer.status_code == 404 and not message:
        return "there is no such path; is it vLLM's address?"
    return str(message) if message else f"it answers with status {answer.status_code}"
