"""The connector that fits this process' vLLM: ours, or one that does nothing.

The webhook cannot see which vLLM an image has if the tag does not tell, and a new release may
change what it calls. Such an engine starts and serves, without the cache.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any, Final

from lmcache_core.errors import ConfigError
from lmcache_core.integrations.vllm.releases import Release, too_old

FORWARDED: Final = ("vllm_config", "role", "kv_cache_config")
"""What our connectors pass on to the constructor of their base."""
_POSITIONAL: Final = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def fitting_connector(module: str, name: str, least: Release) -> Any:
    """Return a connector's class, or the one that does nothing and the reason in the log.

    Args:
        module: Module of ours; it imports vLLM.

    Raises:
        ImportError: There is no vLLM, or one that has no connectors at all.
    """
    import vllm

    version = str(getattr(vllm, "__version__", ""))
    reason = too_old(version, least)
    if not reason:
        try:
            ours = getattr(importlib.import_module(module), name)
        except (ImportError, SyntaxError, AttributeError, TypeError, ConfigError) as exc:
            reason = f"{type(exc).__name__}: {exc}"
        else:
            reason = misfit(ours)
            if not reason:
                return ours
        reason = f"{name} does not fit vLLM {version}: {reason}"
    from lmcache_core.integrations.vllm.idle import idle_connector

    return idle_connector(reason)


def misfit(connector: Any) -> str:
    """Return how a connector differs from what this vLLM calls, "" if it does not."""
    unknown = sorted(connector.__abstractmethods__)
    if unknown:
        return f"it lacks {', '.join(unknown)}"
    base = connector.__mro__[1]
    found = _refusal(base.__init__, [None, *FORWARDED])
    for name in vars(connector):
        theirs = getattr(base, name, None)
        if found or not inspect.isroutine(theirs):
            continue
        passed = inspect.signature(theirs).parameters.values()
        positional = [one.name for one in passed if one.kind in _POSITIONAL]
        keywords = [one.name for one in passed if one.kind is inspect.Parameter.KEYWORD_ONLY]
        found = _refusal(getattr(connector, name), positional, *keywords)
    return found


def _refusal(function: Any, positional: list[Any], *keywords: str) -> str:
    try:
        inspect.signature(function).bind(*positional, **dict.fromkeys(keywords))
    except TypeError as exc:
        return f"{function.__qualname__}: {exc}"
    return ""
