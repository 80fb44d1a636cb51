"""Command lines of containers: whether they start vLLM's server, and what is appended to them.

They come from strangers, so each function here is linear in the length of its input. Shell scripts
are not parsed: a container that starts vLLM in one is declined.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lmcache_webhook.injection.errors import DeclinedError
from lmcache_webhook.injection.pod import Container

OPTION: Final = "--kv-transfer-config"
CONNECTOR_MODULE: Final = "lmcache_core.integrations.vllm"
MODULES: Final = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main")
_TAKEN: Final = re.compile(r"--kv[-_](transfer[-_]config|offloading[-_](size|backend))")


def runs_vllm(container: Container) -> bool:
    """Return whether a container looks as if it ran vLLM: by its command line or image."""
    return (
        names_our_connector(container)
        or _starts_server(_line(container))
        or _has_script(container)
        or _image_is_vllm(container)
    )


def plan_arguments(container: Container, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what to append to a container's `args` so that its vLLM uses the connector.

    Args:
        container: The one that runs vLLM.
        config: The value of `--kv-transfer-config`.

    Returns:
        The words; empty where the container names our connector already, and where what it runs
        is not vLLM's server itself, as in the workers of a Ray cluster.

    Raises:
        DeclinedError: The container has another connector, or starts vLLM in a shell script.
    """
    if names_our_connector(container):
        return ()
    _refuse_other_connector(container)
    if not _starts_server(_line(container)):
        if _has_script(container):
            raise DeclinedError(
                f"the container {container.name} starts vLLM in a shell script, which is never"
                " edited: write `command: [vllm, serve, MODEL, …]`, or put the option of"
                " docs/injection.md into the script"
            )
        if container.command:
            return ()
    return (OPTION, json.dumps(config, separators=(",", ":")))


def names_our_connector(container: Container) -> bool:
    """Return whether the command line, or a variable that may become a part of it, names our
    connector.
    """
    return any(CONNECTOR_MODULE in text for text in _texts(container))


def _refuse_other_connector(container: Container) -> None:
    for text in _texts(container):
        found = _TAKEN.search(text)
        if found is not None:
            raise DeclinedError(
                f"the container {container.name} is given {found.group()} already, and one vLLM has"
                " one connector: remove that to have it set here"
            )


def _line(container: Container) -> list[str]:
    return [*(container.command or ()), *(container.args or ())]


def _texts(container: Container) -> list[str]:
    return [*_line(container), *(variable.value or "" for variable in container.env or ())]


def _starts_server(line: Sequence[str]) -> bool:
    """Return whether the words start the server, also behind `tini --`, `env` and the like."""
    for word, following in itertools.pairwise(line):
        if word.rsplit("/", 1)[-1] == "vllm" and following == "serve":
            return True
        if word == "-m" and following in MODULES:
            return True
    return False


def _has_script(container: Container) -> bool:
    """Return whether one word of the command line is a script that starts the server, for
    whatever shell.
    """
    for word in _line(container):
        words = word.replace("\\\n", " ").split()
        text = " ".join(words)
        if len(words) > 1 and (
            "vllm serve" in text or any(f"-m {module}" in text for module in MODULES)
        ):
            return True
    return False


def _image_is_vllm(container: Container) -> bool:
    """Return whether the image decides what runs, and is called vllm."""
    name = (container.image or "").partition("@")[0].rsplit("/", 1)[-1].partition(":")[0]
    return not container.command and "vllm" in name
