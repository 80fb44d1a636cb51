"""Options of the sidecar."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

from lmcache_core.addresses import is_loopback
from lmcache_core.config import DISK_SERDES
from lmcache_core.config.engine_config import OPTIONS
from lmcache_core.config.options import REMOTE_URL, did_you_mean
from lmcache_core.errors import ConfigError
from lmcache_core.storage.remote import check_remote_scheme
from lmcache_core.storage.remote.members import hosts_of
from lmcache_node.settings import DistributedUrlText, NodeSettings
from lmcache_servicekit.settings import Port
from pydantic import AfterValidator, Field, field_validator, model_validator
from typing_extensions import override

ARENA_MODE = re.compile("0?[67][0-7]{2}")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (made private before use)
TEMPORARY = "/tmp"  # noqa: S108 (the same)
OWN_DIRECTORY = "set socket_path and arena_path to a directory of your own"


def default_run_directory() -> Path:
    """Return the default directory of the socket; see `make_private`."""
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError:
        # Nothing is writable, as in a container with a read-only root. That is an error only if
        # this path is used.
        temporary = TEMPORARY
    return Path(temporary) / f"lmcache-{os.getuid()}"


def default_arena_directory() -> Path:
    """Return the default directory of the arena: in memory if the system has a place for that,
    since a file mapped from a disk is written back to it.
    """
    return (
        SHARED_MEMORY / f"lmcache-{os.getuid()}"
        if SHARED_MEMORY.is_dir()
        else default_run_directory() / "arena"
    )


def known_serde(value: str) -> str:
    """Return the name of a serde.

    Raises:
        ValueError: It is not one of `DISK_SERDES`.
    """
    if value not in DISK_SERDES:
        raise ValueError(
            f"{value!r} is not an encoding that a sidecar has{did_you_mean(value, DISK_SERDES)}"
        )
    return value


def _accepts_handover(values: dict[str, Any]) -> bool:
    """Accept handovers only from authenticated peers; otherwise any user of the machine could store
    KV under an engine's names over loopback.
    """
    return values.get("auth_tokens_file") is not None


Serde = Annotated[str, AfterValidator(known_serde)]


class SidecarSettings(NodeSettings):
    """Options that only the sidecar has; sizes are in GB (2^30 bytes)."""

    about = (
        "Keeps the KV of the engines of its pod in shared memory and on disk, and shares "
        "it with other pods."
    )
    env_prefix = "LMCACHE_SIDECAR_"

    port: Port = 8083
    """REST for people and probes inside the pod."""
    socket_path: Path = Field(
        default_factory=lambda: default_run_directory() / "sidecar.sock",
        json_schema_extra={"default": "<temporary directory>/lmcache-<uid>/sidecar.sock"},
    )
    """Unix socket for the pod's engines; at most 107 bytes."""
    arena_path: Path = Field(
        default_factory=default_arena_directory,
        json_schema_extra={"default": "/dev/shm/lmcache-<uid>"},  # noqa: S108 (made private)
    )
    """Directory of the shared memory, on an in-memory volume that engines mount too."""
    arena_gb: float = Field(default=1.0, gt=0, le=65536)
    """Size of the shared memory."""
    arena_wait_s: float = Field(default=0.0, ge=0, le=86400)
    """How long to wait for room while engines still map the memory of an earlier start."""
    arena_mode: str = "0660"
    """Permissions of the shared-memory file, octal, in quotes."""
    arena_huge_pages: Literal["auto", "off", "advise"] = "auto"
    """Whether to ask for transparent huge pages; `auto`: where the kernel allows them on the volume
    of `arena_path`.
    """
    arena_recover: bool = True
    """Serve the shared memory's chunks again after a restart, once checked."""
    remote_url: str | None = None
    """Remote tier, for example `lm://cache-storage:65432`; also `redis://`, `redis-sentinel://` and
    `file://`.
    """
    remote_serde: Serde = Field(default="naive", description=OPTIONS["remote_serde"].meaning)
    disk_serde: Serde = "naive"
    """Encoding for the disk."""
    peer_serde: Serde = "naive"
    """Encoding for peers that can read it; a lossy one also accepts loss from peers."""
    lm_port: Port = 65433
    distributed_url: DistributedUrlText | None = None
    """Where peers reach this sidecar, `lm://host:port`; None: `lm_host` and `lm_port`."""
    peer_transport: Literal["lm", "nixl"] = "lm"
    """How peers' chunks come: `nixl`: by the mover wherever that is faster than `lm`."""
    mover_socket: Path | None = None
    """Unix socket of the mover, with `peer_transport: nixl`."""
    ticket_keys_file: Path | None = None
    """Keys of the broker's tickets."""
    salt_file: Path | None = None
    """The tenant's salt, handed to engines; chunks of other salts are not found."""
    verify_hot: Literal["auto", "always", "sampled", "never"] = Field(
        default="auto",
        description=f"{OPTIONS['verify_hot'].meaning} `auto`: 1 in 16 with KV on a GPU, else each.",
    )
    accept_handover: bool = Field(
        default_factory=_accepts_handover,
        json_schema_extra={"default": "whether auth_tokens_file is set"},
    )
    """Accept chunks of peers that end. By default only from peers with tokens: these chunks decide
    what engines load.
    """

    @property
    @override
    def only_tenant(self) -> str:
        return self.tenant

    @field_validator("arena_mode", mode="before")
    @classmethod
    def _check_arena_mode(cls, value: object) -> object:
        if not isinstance(value, str) or ARENA_MODE.fullmatch(value) is None:
            raise ValueError(
                f"{value!r}: three octal digits in quotes, of which the first lets the owner read"
                " and write, such as '0660'"
            )
        return value

    @field_validator("remote_url")
    @classmethod
    def _check_remote_url(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                check_remote_scheme(value)
                if value.startswith(("lm://", "lm+tls://")):
                    hosts_of(value)
            except ConfigError as exc:
                raise ValueError(str(exc)) from None
            if not REMOTE_URL.fits(value):
                advice = REMOTE_URL.advice(value)
                raise ValueError(f"must be {REMOTE_URL.wanted}" + (f"; {advice}" if advice else ""))
        return value

    @model_validator(mode="after")
    def _check_contradictions(self) -> SidecarSettings:
        if (self.lookup_url is None) != (self.broker_url is None):
            raise ValueError(
                "lookup_url and broker_url go together: peers are found through both; set both or"
                " none"
            )
        if self.remote_serde != "naive" and self.remote_url is None:
            raise ValueError(
                f"remote_serde={self.remote_serde!r}, but there is no remote tier to encode for:"
                " set remote_url or leave it out"
            )
        if self.disk_serde != "naive" and self.disk_path is None:
            raise ValueError(
                f"disk_serde={self.disk_serde!r}, but there is no disk to encode for: set disk_path"
                " or leave it out"
            )
        if (
            self.accept_handover
            and self.ticket_keys_file is not None
            and self.auth_tokens_file is None
        ):
            raise ValueError(
                "accept_handover=true, but with ticket_keys_file alone no peer may put anything:"
                " set auth_tokens_file too, or leave it out"
            )
        if (
            not is_loopback(self.lm_host)
            and self.auth_tokens_file is None
            and self.ticket_keys_file is None
            and not self.allow_anonymous
        ):
            raise ValueError(
                f"lm_host={self.lm_host!r} is reachable from other machines, but neither"
                " ticket_keys_file nor auth_tokens_file is set: set one, or set"
                " allow_anonymous=true if a NetworkPolicy is all the protection you want"
            )
        if (self.peer_transport == "nixl") != (self.mover_socket is not None):
            raise ValueError(
                f"peer_transport={self.peer_transport!r} and"
                f" mover_socket={str(self.mover_socket) if self.mover_socket else None!r}: a mover"
                " needs both: set peer_transport=nixl and the socket of lmcache-mover, or neither"
            )
        self.refuse_plaintext("lm_host", self.lm_host)
        self.check_scheme("distributed_url", self.distributed_url)
        return self

    def default_directories(self) -> list[Path]:
        """Return the default directories that these settings use; they must be private."""
        used = (*self.socket_path.parents, self.arena_path, *self.arena_path.parents)
        return [one for one in (default_run_directory(), default_arena_directory()) if one in used]

    def directory_problems(self) -> list[str]:
        """Return why the sidecar refuses default directories that are there already."""
        return list(filter(None, map(privacy_problem, self.default_directories())))


def make_default_directories(settings: SidecarSettings) -> None:
    """Create the default directories that these settings use.

    Raises:
        ConfigError: A directory cannot be created, is a link, belongs to another user, or is open
            to others.
    """
    for directory in settings.default_directories():
        make_private(directory)


def make_private(directory: Path) -> None:
    """Create a directory that only this user may enter, or check an existing one: in a shared
    temporary directory another user may have created it first, to put a socket or memory there.
    """
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"{directory}: {exc.strerror}; {OWN_DIRECTORY}") from exc
    if problem := privacy_problem(directory):
        raise ConfigError(f"{problem}; {OWN_DIRECTORY}")


def privacy_problem(directory: Path) -> str:
    """Return why a directory is not private to this user, "" if it is, or if nothing is there."""
    try:
        status = directory.lstat()
    except FileNotFoundError:
        return ""
    except OSError as exc:
        return f"{directory}: {exc.strerror}"
    if (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.getuid()
        and not stat.S_IMODE(status.st_mode) & 0o077
    ):
        return ""
    return (
        f"{directory} is not a directory that belongs to this user and that no other user may enter"
    )
