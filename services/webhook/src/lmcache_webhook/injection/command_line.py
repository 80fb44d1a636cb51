"""Command lines of containers: whether they start vLLM's server, and where its arguments go."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lmcache_webhook.injection.errors import DeclinedError
from lmcache_webhook.injection.pod import Container
from lmcache_webhook.injection.shell import add_to_servers

OPTION: Final = "--kv-transfer-config"
SHELLS: Final = frozenset({"sh", "bash", "dash", "ash", "zsh"})
MODULES: Final = frozenset({"vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main"})
_COMMAND_FLAG: Final = re.compile(r"-[a-z]*c")
_FLAG_WITH_VALUE: Final = re.compile(r"[-+][a-z]*[oO]|--rcfile|--init-file")
_TAKEN: Final = re.compile(r"--kv[-_](transfer[-_]config|offloading[-_](size|backend))")
_VLLM_IMAGE: Final = re.compile(r"(?:.*/)?[\w.-]*vllm[\w.-]*(?:[:@].*)?")


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of a container's command line.

    Attributes:
        field: `command` or `args`.
        index: Which of its items is replaced; None: `items` are appended.
        items: What is put there.
    """

    field: str
    index: int | None
    items: tuple[str, ...]


def runs_vllm(container: Container) -> bool:
    """Whether a container looks as if it ran vLLM: by its command line, or by its image's name where that decides what runs."""
    line = _line(container)
    script = _script_at(line)
    if script is not None and add_to_servers(line[script], ()) is not None:
        return True
    return _starts_server(line) or (not container.command and _VLLM_IMAGE.fullmatch(container.image or "") is not None)


def plan_arguments(container: Container, config: Mapping[str, Any]) -> list[Edit]:
    """How a container's command line gets the connector's configuration.

    Args:
        container: That runs vLLM.
        config: The value of `--kv-transfer-config`; of its leaves only plain words.

    Returns:
        The changes; none where what the container runs is not vLLM's server itself, as in the workers of a Ray cluster.

    Raises:
        DeclinedError: The container has a connector of its own.
    """
    line = _line(container)
    refuse_other_connector(container)
    script = _script_at(line)
    if script is not None:
        changed = add_to_servers(line[script], dotted(config))
        if changed is None:
            return []
        num_command = len(container.command or ())
        field, index = ("command", script) if script < num_command else ("args", script - num_command)
        return [Edit(field, index, (changed,))]
    if container.command and not _starts_server(line):
        return []
    return [Edit("args", None, (OPTION, json.dumps(config, separators=(",", ":"))))]


def refuse_other_connector(container: Container) -> None:
    """Leave a container alone that has been told how to cache, also where a variable is to become a part of the command line.

    Raises:
        DeclinedError: It has.
    """
    texts = [*_line(container), *(variable.value or "" for variable in container.env or ())]
    for text in texts:
        found = _TAKEN.search(text)
        if found is not None:
            raise DeclinedError(
                f"the container {container.name} is given {found.group()} already, and one vLLM has one connector: "
                "remove that to have it set here"
            )


def dotted(config: Mapping[str, Any]) -> list[str]:
    """The same configuration as words that need no quotes: vLLM takes `--option.key=value` for a member of a JSON option."""
    return [f"{OPTION}.{path}={value}" for path, value in _leaves(config, "")]


def _leaves(config: Mapping[str, Any], above: str) -> Iterable[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _line(container: Container) -> list[str]:
    return [*(container.command or ()), *(container.args or ())]


def _starts_server(line: Sequence[str]) -> bool:
    """Also behind `tini --`, `env` and the like."""
    for word, following in itertools.pairwise(line):
        if _base(word) == "vllm" and following == "serve":
            return True
        if word == "-m" and following in MODULES:
            return True
    return False


def _script_at(line: Sequence[str]) -> int | None:
    """Where the script of `sh -c SCRIPT` is, whatever stands before it."""
    for index, word in enumerate(line[:-1]):
        if _base(word) not in SHELLS:
            continue
        place = index + 1
        while place < len(line) - 1 and line[place].startswith(("-", "+")):
            if _COMMAND_FLAG.fullmatch(line[place]):
                return place + 1
            place += 2 if _FLAG_WITH_VALUE.fullmatch(line[place]) else 1
    return None


def _base(word: str) -> str:
    return word.rsplit("/", 1)[-1]
