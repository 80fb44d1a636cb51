"""Which container runs vLLM."""

from __future__ import annotations

from typing import Final

from lmcache_core.config.engine_config import OPTIONS
from lmcache_core.config.sources import ENV_PREFIX, values_of_environment
from lmcache_core.errors import ConfigError

from lmcache_webhook.injection.command_line import runs_vllm
from lmcache_webhook.injection.errors import DeclinedError
from lmcache_webhook.injection.pod import Container, PodSpec
from lmcache_webhook.injection.wishes import CONTAINER

MAX_OPTION_CHARS: Final = 16 << 10
"""Of all variables LMCACHE_… of a container: reading them takes up to 10 µs a character."""


def find_engine(spec: PodSpec, name: str | None) -> tuple[int, Container]:
    """The container that runs vLLM.

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
