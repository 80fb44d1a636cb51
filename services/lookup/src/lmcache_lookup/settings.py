"""The lookup service's options."""

from __future__ import annotations

from lmcache_servicekit.redis_settings import RedisSettings
from lmcache_servicekit.settings import Port
from pydantic import Field, model_validator


class LookupSettings(RedisSettings):
    """Options of `lmcache-lookup`, apart from those that say where Redis is; variables are
    `LMCACHE_LOOKUP_…`. The index lies in Redis if `redis_url` is set, else in this process.
    """

    about = (
        "Knows which instance holds which chunk of KV. It sees hashes and addresses, "
        "never tokens or KV."
    )
    env_prefix = "LMCACHE_LOOKUP_"

    port: Port = 8081
    redis_timeout_ms: int = Field(default=100, ge=1, le=60_000)
    """Longest wait of a lookup for the index; after it the answer is `degraded`."""
    redis_write_timeout_ms: int = Field(default=800, ge=1, le=60_000)
    """The same for leases and events."""
    max_chunks: int = Field(default=1_000_000, ge=1)
    """Entries in an index in this process: a chunk counts once for each instance and tier that
    holds it. Beyond it the largest tenant's oldest chunk goes.
    """
    max_chunks_per_tenant: int = Field(default=1_000_000, ge=1)
    """Entries of one tenant; beyond it its oldest chunk goes, in Redis one of the same bucket."""
    max_instances: int = Field(default=4096, ge=1, le=65_536)
    """Instances with a lease."""
    max_instances_per_tenant: int = Field(default=1024, ge=1, le=65_536)
    """Instances of one tenant with a lease."""
    default_ttl_ms: int = Field(default=15_000, ge=1)
    """Lease of an instance that asks for none."""
    min_ttl_ms: int = Field(default=1_000, ge=1)
    """Shortest lease."""
    max_ttl_ms: int = Field(default=300_000, ge=1)
    """Longest lease."""
    sweep_interval_s: float = Field(default=0.25, gt=0, le=3600)
    """Pause between two steps that clear ended leases."""

    @model_validator(mode="after")
    def _check_ttls(self) -> LookupSettings:
        if not self.min_ttl_ms <= self.default_ttl_ms <= self.max_ttl_ms:
            given = (
                f"min_ttl_ms={self.min_ttl_ms}, default_ttl_ms={self.default_ttl_ms},"
                f" max_ttl_ms={self.max_ttl_ms}"
            )
            raise ValueError(f"{given}: put them in ascending order")
        return self

    def granted_ttl_ms(self, asked_ttl_ms: int | None) -> int:
        """Return the lease granted to an instance that asks for `asked_ttl_ms`."""
        return min(max(asked_ttl_ms or self.default_ttl_ms, self.min_ttl_ms), self.max_ttl_ms)
