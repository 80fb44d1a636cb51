"""The entry point of all services."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shutil
import signal
import socket
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TypeVar

import uvicorn
from fastapi import FastAPI
from lmcache_core.errors import ConfigError, LMCacheError
from lmcache_core.security.handshakes import BoundedContext
from lmcache_core.wire.listener import limit_accept_errors
from starlette.types import Message, Receive, Scope, Send
from typing_extensions import override

from lmcache_servicekit.http_protocol import BoundedHttpProtocol
from lmcache_servicekit.listening import bind, naming_listener
from lmcache_servicekit.logs import configure_logging
from lmcache_servicekit.options import options_of
from lmcache_servicekit.settings import ServiceSettings, load_settings, render_settings
from lmcache_servicekit.state import ServiceState, service_state, version_of

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=ServiceSettings)

EXIT_BAD_CONFIG = 2
EXIT_BY_SIGNAL = 128
MIN_COLUMNS = 60


def run_service(
    name: str,
    settings_cls: type[S],
    create_app: Callable[[S], FastAPI],
    argv: Sequence[str] | None = None,
) -> int:
    """Run a service until SIGTERM or SIGINT.

    Args:
        name: Command and distribution, for example `lmcache-lookup`.
        argv: Arguments instead of the process's.

    Returns:
        The exit code: 0 after a graceful end; 2 for bad settings, including a port that is
            taken and errors that only the lifespan can detect; 3 if the lifespan cannot start for
            another reason. A second signal ends the process immediately, with 128 and the signal's
            number: 143, 130.
    """
    options = _parse(name, settings_cls, argv)
    try:
        settings = load_settings(settings_cls, options.config)
        if options.print_config:
            sys.stdout.write(render_settings(settings))
            create_app(settings)  # reads the files that settings name
            return 0
        _check_port_file(options.port_file)
        configure_logging(settings.log_level, settings.log_format)
        app = create_app(settings)
        with naming_listener("host", settings.host, "port", settings.port):
            listener = bind(settings.host, settings.port)
    except ConfigError as exc:
        _complain(name, str(exc))
        return EXIT_BAD_CONFIG
    with listener:
        return _serve(app, Address(name, settings, listener, options.port_file))


def _check_port_file(path: Path | None) -> None:
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"--port-file {str(path)!r} is a directory; name a file")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(
            f"--port-file {str(path)!r}: {path.parent} is not a writable directory;"
            " choose another path"
        )


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a service, and the file that publishes its port.

    Attributes:
        listener: Bound, not listening.
    """

    name: str
    settings: ServiceSettings
    listener: socket.socket
    port_file: Path | None

    def announce(self, more: Mapping[str, int]) -> None:
        """Log and write where the service listens.

        Args:
            more: Ports other than that of REST, by option.
        """
        number = self.listener.getsockname()[1]
        ports = {"port": number, **more}
        hosts = self.settings.listeners()
        logger.info(
            "listening: service=%s version=%s %s",
            self.name,
            version_of(self.name),
            " ".join(
                f"{option.removesuffix('port')}address={_address(hosts[option][0], port)}"
                for option, port in ports.items()
            ),
        )
        if self.port_file is not None:
            # Replaced atomically: a reader never sees half of it.
            temporary = self.port_file.with_name(f"{self.port_file.name}.{os.getpid()}.tmp")
            temporary.write_text(json.dumps(ports) + "\n")
            temporary.replace(self.port_file)

    def retract(self) -> None:
        """Remove the port file: the service no longer listens."""
        if self.port_file is not None:
            self.port_file.unlink(missing_ok=True)


class _Start:
    """The app. An expected failure to start is reported in its own words instead of a traceback."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self.failure: BaseException | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_short(message: Message) -> None:
            if message["type"] == "lifespan.startup.failed":
                self.failure = sys.exc_info()[1]
                if isinstance(self.failure, LMCacheError):
                    # Reported like bad settings: uvicorn's own lines would only hide it.
                    logging.getLogger("uvicorn.error").disabled = True
                    message = {**message, "message": ""}
            await send(message)

        await self.app(scope, receive, send_short if scope["type"] == "lifespan" else send)


class _Server(uvicorn.Server):
    """Announces that it listens, prepares its stop while it still answers, and ends immediately at
    a second signal.

    Attributes:
        has_ended: The last request and the lifespan have.
    """

    def __init__(self, config: uvicorn.Config, address: Address, state: ServiceState) -> None:
        super().__init__(config)
        self.has_ended = False
        self._address = address
        self._state = state

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the lifespan, then listen, then announce."""
        limit_accept_errors(asyncio.get_running_loop())
        await super().startup(sockets=sockets)
        if self.started:
            self._address.announce(self._state.ports)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Prepare, then stop listening, then end the lifespan."""
        logger.info("stopping")
        for prepare in self._state.before_stop:
            await prepare()
        await super().shutdown(sockets=sockets)
        self.has_ended = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End gracefully at the first signal, immediately at the second: work underway may hang."""
        if self.should_exit:
            # Logging is not safe inside a handler.
            os.write(2, b"a second signal: ending at once\n")
            os._exit(EXIT_BY_SIGNAL + sig)
        super().handle_exit(sig, frame)


def _serve(app: FastAPI, address: Address) -> int:
    """Serve until a signal; return the exit code."""
    config = uvicorn.Config(
        start := _Start(app),
        http=BoundedHttpProtocol,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="on",
        ws="none",
        timeout_graceful_shutdown=address.settings.shutdown_grace_s,
    )
    config.load()
    tls = service_state(app).tls
    config.ssl = None if tls is None else BoundedContext(tls)
    # uvicorn raises the signal again after its shutdown; by default that would turn a graceful end
    # into "killed".
    for handled in (signal.SIGTERM, signal.SIGINT):
        signal.signal(handled, lambda number, frame: sys.exit(0))
    server = _Server(config, address, service_state(app))
    try:
        server.run(sockets=[address.listener])
    except SystemExit:
        if isinstance(start.failure, LMCacheError):
            _complain(address.name, str(start.failure))
        if not isinstance(start.failure, ConfigError):
            raise
        return EXIT_BAD_CONFIG
    except (RuntimeError, MemoryError):
        # An event loop starts a thread when it is closed, for which there may be no room.
        if not server.has_ended:
            raise
    finally:
        logging.getLogger("uvicorn.error").disabled = False
        address.retract()
    return 0


class _Parser(argparse.ArgumentParser):
    """Lists the settings below the arguments, once help is asked for."""

    settings_cls: type[ServiceSettings]

    @override
    def format_help(self) -> str:
        prefix = self.settings_cls.env_prefix
        indented = partial(
            textwrap.fill,
            width=max(shutil.get_terminal_size().columns - 2, MIN_COLUMNS),
            initial_indent=" " * 6,
            subsequent_indent=" " * 6,
            break_on_hyphens=False,
        )
        lines = [f"settings, of the file or of {prefix}<SETTING> variables, which win:"]
        for option in options_of(self.settings_cls):
            default = "required" if option.is_required else f"default: {option.default}"
            values = f"; {option.values}" if option.values else ""
            lines.append(f"  {option.name} ({default}{values})")
            if option.meaning:
                lines.append(indented(option.meaning))
        return f"{super().format_help()}\n" + "\n".join(lines) + "\n"


def _parse(
    name: str, settings_cls: type[ServiceSettings], argv: Sequence[str] | None
) -> argparse.Namespace:
    prefix = settings_cls.env_prefix
    parser = _Parser(
        prog=name,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=settings_cls.about,
    )
    parser.settings_cls = settings_cls
    parser.add_argument(
        "--config",
        type=Path,
        metavar="PATH",
        help=f"settings file (default: the one that {prefix}CONFIG names)",
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the effective settings, secrets masked, check the files they name, and exit",
    )
    parser.add_argument(
        "--port-file",
        type=Path,
        metavar="PATH",
        help='write {"port": N} there once the service listens',
    )
    parser.add_argument("--version", action="version", version=f"{name} {version_of(name)}")
    return parser.parse_args(argv)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _complain(name: str, text: str) -> None:
    for line in text.splitlines():
        sys.stderr.write(f"{name}: {line}\n")
