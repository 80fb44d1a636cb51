"""Options of a connector: a mapping that its engine passes, a file, and the environment."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_core.config import LMCacheEngineConfig
from lmcache_core.config.engine_config import OPTIONS
from lmcache_core.config.options import did_you_mean
from lmcache_core.config.sources import ENV_PREFIX, read_environment
from lmcache_core.errors import ConfigError

PREFIX = "lmcache."
TEXTS = ("model_name", "revision", "config_file")
"""Options of every connector, beside those of `LMCacheEngineConfig`."""
TIER_OPTIONS = ("sidecar_socket", "max_local_cpu_size", "local_disk", "remote_url")


@dataclass(frozen=True)
class OptionReader:
    """Reads the options of one kind of connector.

    Attributes:
        place: What the engine calls the mapping, for errors.
        engine: The engine's name.
        own: The connector's own options, beside `TEXTS`.
    """

    place: str
    engine: str
    own: Sequence[str] = ()

    @property
    def known(self) -> tuple[str, ...]:
        """All options."""
        return (*self.own, *TEXTS, *OPTIONS)

    def read(self, extra: Mapping[str, Any]) -> tuple[dict[str, Any], LMCacheEngineConfig]:
        """Return the values of the connector's own options and of `TEXTS`, None if they are not
        set, and the cache's options.

        Args:
            extra: The mapping: options with or without the prefix "lmcache.".

        Raises:
            ConfigError: An option is unknown or its value is invalid.
        """
        known = self.known
        named = {
            name.removeprefix(PREFIX): value
            for name, value in extra.items()
            if name.startswith(PREFIX) or name in known
        }
        unknown = [name for name in named if name not in known]
        if unknown:
            raise ConfigError(
                f"{self.place}: {PREFIX}{unknown[0]} is no option{did_you_mean(unknown[0], known)}"
            )
        for name in extra:
            meant = self._meant(name)
            if name not in known and not name.startswith(PREFIX) and meant is not None:
                raise ConfigError(
                    f"{self.place}: {name} is no option; did you mean {PREFIX}{meant!s}?"
                )
        own = {name: named.pop(name, None) for name in (*self.own, *TEXTS)}
        for name in TEXTS:
            self.check_text(name, own[name])
        engine = self._engine_config(own["config_file"], named)
        if engine.sidecar_socket is not None and Path(engine.sidecar_socket).is_dir():
            raise ConfigError(
                f"sidecar_socket={engine.sidecar_socket!r}: is a directory; set it to the socket"
                " that the sidecar names in its log"
            )
        if engine.enable_blending:
            raise ConfigError(
                f"enable_blending=True: {self.engine} lets a connector load prefixes only; set it"
                " to false, prefixes are reused without it"
            )
        return own, engine

    def check_text(self, name: str, value: Any) -> None:
        """Raise `ConfigError` if an option is set, and not to text."""
        if value is not None and not (isinstance(value, str) and value):
            raise ConfigError(f"{self.place}: {PREFIX}{name}={value!r}: must be text, or left out")

    def _meant(self, name: str) -> str | None:
        """Return the option that a name without our prefix probably means: one with the same
        spelling or the same beginning.
        """

        def letters(text: str) -> str:
            return "".join(filter(str.isalnum, text.lower()))

        spelt = letters(name)
        bare = spelt.removeprefix("lmcache")
        for known in self.known:
            if letters(known) in (spelt, bare):
                return known
        if bare == spelt:
            return None
        return (difflib.get_close_matches(bare, self.known, n=1, cutoff=0.0) or [self.known[0]])[0]

    def _engine_config(
        self, config_file: str | None, named: Mapping[str, Any]
    ) -> LMCacheEngineConfig:
        """Return the cache's options: those of the file or the environment, overridden by the
        mapping.
        """
        if config_file:
            base = LMCacheEngineConfig.from_file(config_file)
        else:
            base = LMCacheEngineConfig.from_env()
        in_environment = {name.removeprefix(ENV_PREFIX).lower() for name in read_environment()}
        has_place = not (in_environment | set(named)).isdisjoint(TIER_OPTIONS)
        if not config_file and not has_place and "config_file" not in in_environment:
            raise ConfigError(
                f'{self.place} names no place for KV: set "{PREFIX}sidecar_socket" to the socket of'
                f' the pod\'s sidecar, or "{PREFIX}max_local_cpu_size" to some GB for a cache'
                f" inside {self.engine}"
            )
        of_base = {name: getattr(base, name) for name in OPTIONS}
        return LMCacheEngineConfig(**of_base | dict(named) | {"save_unfull_chunk": False})
