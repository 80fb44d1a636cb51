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

from lmcache_core.config.engine_config import OPTIONS
from lmcache_core.config.sources import ENV_PREFIX, values_of_environment
from lmcache_core.errors import ConfigError

from lmcache_webhook.injection.plan import CONTAINER
from lmcache_webhook.injection.pod import Container, DeclinedError, PodSpec

OPTION: Final = "--kv-transfer-config"
CONNECTOR_MODULE: Final = "lmcache_core.integrations.vllm"
MODULES: Final = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main")
_TAKEN: Final = re.compile(r"--kv[-_](transfer[-_]config|offloading[-_](size|backend))")


def runs_vllm(container: Container) -> bool:
    """Return whether a container looks as if it ran vLLM: by its command line or image."""
    name = (container.image or "").partition("@")[0].rsplit("/", 1)[-1].partition(":")[0]
    return (
        names_our_connector(container)
        or _starts_server(_line(container))
        or _has_script(container)
        # The image decides what runs, and is called vllm.
        or (not container.command and "vllm" in name)
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
    """Return whether the words start the server, also after `tini --`, `env` and the like."""
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


MAX_OPTION_CHARS: Final = 16 << 10
"""Of all variables LMCACHE_… of a container: reading them takes up to 10 µs a character."""


def find_engine(spec: PodSpec, name: str | None) -> tuple[int, Container]:
    """Return the container that runs vLLM.

    Args:
        spec: Of the pod.
        name: Of that container; None: the one that looks as if it did.

    Returns:
        Its place among the containers, and itself.

    Raises:
        DeclinedError: There is none, or more than one, or it cannot use the cache as it is.
    """
    containers = list(enumerate(spec.containers))
    if name is not None:
        found = [(index, one) for index, one in containers if one.name == name]
        if not found:
            names = ", ".join(one.name for _, one in containers)
            raise DeclinedError(
                f"the pod has no container {name!r}, which {CONTAINER} names: it has {names}"
            )
    else:
        found = [(index, one) for index, one in containers if runs_vllm(one)]
        if not found:
            raise DeclinedError(
                "no container of this pod looks as if it ran vLLM: name the one that does in"
                f" {CONTAINER}"
            )
        if len(found) > 1:
            names = " and ".join(one.name for _, one in found)
            raise DeclinedError(
                f"the containers {names} look as if they ran vLLM: name one of them in {CONTAINER}"
            )
    _check_options(found[0][1])
    return found[0]


def _check_options(container: Container) -> None:
    """A variable that the connector takes for one of its options, and cannot read, would end
    vLLM when it starts.
    """
    variables = {
        variable.name: variable
        for variable in container.env or ()
        if variable.name.startswith(ENV_PREFIX)
    }
    texts = {
        name: variable.value or "" for name, variable in variables.items() if not variable.valueFrom
    }
    length = sum(map(len, texts.values()))
    if length > MAX_OPTION_CHARS:
        raise DeclinedError(
            f"the variables {ENV_PREFIX}… of the container {container.name} have {length}"
            f" characters together, above the {MAX_OPTION_CHARS} that are read: remove what the"
            " connector does not need"
        )
    try:
        values_of_environment(texts, OPTIONS)
    except ConfigError as exc:
        raise DeclinedError(
            f"the container {container.name} has a variable that the connector cannot read ({exc})"
        ) from exc
