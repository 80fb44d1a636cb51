"""KV events of a pod's vLLM, by which routers learn what it has and what its sidecar has."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lmcache_webhook.injection.command_line import is_plain, names_our_connector, words_of
from lmcache_webhook.injection.pod import Container, PodSpec
from lmcache_webhook.injection.sidecar import PORTS

if TYPE_CHECKING:
    from lmcache_webhook.settings import WebhookSettings

OPTION: Final = "--kv-events-config"
WORDS: Final = (OPTION, "--kv_events_config")
VLLM_PORT: Final = 5557
"""Where vLLM publishes unless told otherwise."""
_GIVEN: Final = re.compile(r"--kv[-_]events[-_]config")


@dataclass(frozen=True, slots=True)
class EventsPlan:
    """How a container's vLLM publishes events.

    Attributes:
        is_told: Whether the connector publishes. Without vLLM's publisher vLLM would not start.
        config: The value of `OPTION` that the container gets; None: none, or it has one.
        ports: Where it then listens.
        said: About it, for the pod's status.
    """

    is_told: bool = False
    config: Mapping[str, Any] | None = None
    ports: tuple[int, ...] = ()
    said: str = ""


def plan_events(
    settings: WebhookSettings, spec: PodSpec, engine: Container, *, is_in_script: bool
) -> EventsPlan:
    """Return how a container's vLLM publishes events. What it is given already is never changed.

    Args:
        is_in_script: Whether its arguments go through a script, which takes plain words only.
    """
    if settings.kv_events_port is None or names_our_connector(engine):
        return EventsPlan()
    line = [*(engine.command or ()), *(engine.args or ())]
    variables = [variable.value or "" for variable in engine.env or ()]
    if any(map(_GIVEN.search, [*line, *variables])):
        given = _given(line)
        if given is None:
            return _silent(f"its {OPTION} cannot be read here")
        is_zmq = given.get("publisher") in (None, "zmq")
        if given.get("enable_kv_cache_events") is not True or not is_zmq:
            return _silent(f"its {OPTION} does not publish by zmq")
        return EventsPlan(True, said="; routers learn of its cache where it publishes already")
    wanted = (settings.kv_events_port, settings.kv_events_replay_port)
    ports = tuple(port for port in wanted if port is not None)
    there = {port.containerPort for one in spec.all_containers for port in one.ports or ()}
    for port in ports:
        if port in there or port in PORTS:
            return _silent(f"the pod has a port {port} already")
    config: dict[str, Any] = {"enable_kv_cache_events": True, "publisher": "zmq"}
    if settings.kv_events_port != VLLM_PORT:
        config["endpoint"] = f"tcp://*:{settings.kv_events_port}"
    if settings.kv_events_replay_port is not None:
        config["replay_endpoint"] = f"tcp://*:{settings.kv_events_replay_port}"
    if is_in_script and not all(map(is_plain, words_of(OPTION, config))):
        return _silent(f"its script takes no ports but vLLM's own, {VLLM_PORT} without replay")
    return EventsPlan(True, config, ports, f"; routers learn of its cache at port {ports[0]}")


def _silent(reason: str) -> EventsPlan:
    return EventsPlan(said=f"; routers learn nothing of its cache: {reason}")


def _given(words: list[str]) -> dict[str, Any] | None:
    """Return the configuration that a command line has as JSON, once."""
    found = []
    for word, following in itertools.pairwise([*words, ""]):
        option, is_whole, value = word.partition("=")
        if option in WORDS:
            found.append(value if is_whole else following)
    try:
        (config,) = map(json.loads, found)
    except (ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) else None
