"""Options of the webhook."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from lmcache_core.security import validate_tenant
from lmcache_servicekit.settings import Port, ServiceSettings
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from lmcache_webhook.injection.plan import Connector
from lmcache_webhook.injection.pod import amount_of

MAX_GB = 65_536
MAX_TENANTS = 1024
MAX_OPTIONS = 128
NAMESPACES_PATTERN = r"^(\*|[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)$"

_ObjectName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?$")]
_LabelValue = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
_NamespaceName = Annotated[str, StringConstraints(pattern=NAMESPACES_PATTERN)]
_OptionName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,62}$")]
_Image = Annotated[
    str, StringConstraints(pattern=r"^[\w.-][\w./:@-]*$", min_length=1, max_length=500)
]
_Quantity = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]{1,3})?m?$")]

_OWN_OPTIONS = re.compile(
    r"(host|port|health_.*|lm_(host|port)|arena_(gb|path)|disk_(gb|path)|socket_path|instance_id|distributed_url|tenant)|.*token.*"
)


class TenantEntry(BaseModel):
    """The namespaces whose pods may belong to a tenant, and the Secrets of their sidecars, in the
    pod's namespace.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, use_attribute_docstrings=True
    )

    name: Annotated[str, AfterValidator(validate_tenant)] = "default"
    """The tenant."""
    namespaces: list[_NamespaceName] = Field(default=["*"], min_length=1, max_length=MAX_TENANTS)
    """Names of namespaces; `*` is every namespace."""
    credentials_secret: _ObjectName | None = None
    """Secret with `tokens.yaml` and `sidecar-token`; None: no tokens."""
    keys_secret: _ObjectName | None = None
    """Secret with `ticket-keys` and `salt`; None: no tickets."""
    tls_secret: _ObjectName | None = None
    """Secret with `tls.crt`, `tls.key` and `ca.crt` of sidecars; None: unencrypted."""


class WebhookSettings(ServiceSettings):
    """Options of the webhook; sizes are in GB (2^30 bytes)."""

    about = "Adds the sidecar and the connector to pods of vLLM that are labelled for it."
    env_prefix = "LMCACHE_WEBHOOK_"

    port: Port = 8443
    """`/mutate`, over https:// for API servers."""
    sidecar_image: _Image
    """Image of `lmcache-sidecar`."""
    payload_image: _Image
    """Image with the files that go into vLLM's process."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """Of both images."""
    sidecar_template_file: Path | None = None
    """YAML file merged into the sidecar's container (docs/injection.md), read once."""
    sidecar_options: dict[_OptionName, str | bool | int | float] = Field(
        default_factory=dict, max_length=MAX_OPTIONS
    )
    """Options of `lmcache-sidecar`, for example `lookup_url`; not those that the webhook sets for
    each pod.
    """
    arena_gb: float = Field(default=8.0, ge=0.0625, le=MAX_GB)
    """Shared memory of a pod that names no size."""
    max_arena_gb: float = Field(default=1024.0, ge=0.0625, le=MAX_GB)
    """Most that a pod may ask for."""
    disk_gb: float = Field(default=0.0, ge=0, le=MAX_GB)
    """Disk of a pod that names no size; 0: none."""
    max_disk_gb: float = Field(default=1024.0, ge=0, le=MAX_GB)
    """Most that a pod may ask for."""
    connector: Connector = "lmcache"
    """`lmcache` or `offloading-tier` (docs/vllm.md), in a pod that names none."""
    host_memory_gb: float = Field(default=8.0, ge=0.0625, le=MAX_GB)
    """vLLM's host memory with `offloading-tier`, in a pod that names no size."""
    kv_events_port: int | None = Field(default=None, ge=1, le=65_535)
    """Port at which vLLM publishes KV events for routers (docs/routing.md); None: it publishes
    none.
    """
    kv_events_replay_port: int | None = Field(default=None, ge=1, le=65_535)
    """Port at which routers ask for events that they missed; None: none."""
    memory_overhead_mb: int = Field(default=512, ge=128, le=1 << 20)
    """Memory of the sidecar in addition to its arena and its page tables (a 256th of the arena)."""
    payload_resources: dict[Literal["requests", "limits"], dict[str, str | int | float]] = Field(
        default={"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "128Mi"}}
    )
    """Requests and limits of the container that copies the payload."""
    sidecar_cpu: _Quantity | None = None
    """CPU request of the sidecar, a Kubernetes quantity; None: 750m for each GPU of vLLM's
    container and at least 500m, up to the template's limit.
    """
    run_as_user: int | None = Field(default=10001, ge=1, le=2**31 - 1)
    """User of the sidecar if neither pod nor annotation says which user vLLM has; None: the
    cluster's choice.
    """
    tenants: list[TenantEntry] = Field(
        default=[TenantEntry()], min_length=1, max_length=MAX_TENANTS
    )
    """The first entry that fits the namespace, and the tenant that the pod names, if any, applies.
    """
    kubernetes_service: _LabelValue | None = None
    """Service by whose endpoints the broker finds sidecars (the broker's `kubernetes_service`).
    Pods of `kubernetes_namespace` get its label if they are of the first tenant there. None:
    sidecars register by themselves.
    """
    kubernetes_namespace: _LabelValue | None = None
    """Namespace of that Service."""
    max_reviews_per_s: float = Field(default=200.0, gt=0, le=100_000)
    """Reviews per second of each caller's address; further pods pass unchanged."""

    @field_validator("sidecar_options")
    @classmethod
    def _refuse_own_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        for name in options:
            if _OWN_OPTIONS.fullmatch(name):
                raise ValueError(f"{name} is decided by the webhook for each pod: leave it out")
        return options

    @field_validator("payload_resources")
    @classmethod
    def _check_payload_resources(cls, resources: dict[str, Any]) -> dict[str, Any]:
        requests, limits = resources.get("requests", {}), resources.get("limits", {})
        for name, quantity in (requests | limits).items():
            asked, most = amount_of(requests.get(name, quantity)), amount_of(quantity)
            if asked is None or most is None:
                raise ValueError(f"{name} is not a quantity: write 500m or 64Mi")
            if asked > most:
                raise ValueError(
                    f"the request of {name} is above its limit: lower the one or raise the other"
                )
        return resources

    @model_validator(mode="after")
    def _check_discovery(self) -> Self:
        if (self.kubernetes_service is None) != (self.kubernetes_namespace is None):
            raise ValueError(
                "kubernetes_service and kubernetes_namespace go together: set the other one too, or"
                " leave both out"
            )
        return self

    @model_validator(mode="after")
    def _check_events(self) -> Self:
        replay = self.kv_events_replay_port
        if replay is not None and self.kv_events_port in (None, replay):
            raise ValueError(
                f"kv_events_replay_port={replay} needs a kv_events_port, which is another one"
            )
        return self

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        for default, most in (("arena_gb", "max_arena_gb"), ("disk_gb", "max_disk_gb")):
            if getattr(self, default) > getattr(self, most):
                raise ValueError(
                    f"{default}={getattr(self, default):g} is above {most}={getattr(self, most):g}:"
                    " lower it or raise the other"
                )
        return self
