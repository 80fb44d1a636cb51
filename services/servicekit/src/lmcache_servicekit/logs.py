"""The log format of all services, and the log level over REST. Callers never log token ids or
secrets, only chunk ids.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from math import isfinite
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter
from lmcache_core.errors import one_line
from lmcache_core.telemetry.request_context import current_request_id
from pydantic import ConfigDict, Field
from typing_extensions import override

from lmcache_servicekit.audit import AUDIT_LOGGER
from lmcache_servicekit.auth import AdminPrincipal, ClientPrincipal, GuardedRoute
from lmcache_servicekit.bodies import ApiModel
from lmcache_servicekit.errors import NotFoundError, PermissionDeniedError
from lmcache_servicekit.problems import failures

LogLevel = Literal["debug", "info", "warning", "error"]

_FIELD: Final = re.compile(r"(?:\b(?P<name>\w+)=)?%[-+ #0]*\d*(?:\.\d+)?(?P<kind>[a-zA-Z%])")
"""A place for an argument in the text of a message."""
_TEXT_FORMAT: Final = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"

_HTTP_SERVER: Final = "uvicorn.error"
# Two of these log one line per request, with its URL, at INFO; the HTTP server logs its start and
# end, as the service's own lines do.
_CHATTY: Final = ("httpx", "httpcore", "asyncio", _HTTP_SERVER)

CALLER_WARNING_INTERVAL_S: Final = 60.0


class JsonFormatter(logging.Formatter):
    """One JSON object per line: `time` in UTC, `level`, `logger`, `message`; `request_id` and
    `error` if there are any; and what the message says as `name=value`, under its names.
    """

    @override
    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := current_request_id():
            line["request_id"] = request_id
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(_values(record) | line, ensure_ascii=False)


def _values(record: logging.LogRecord) -> dict[str, object]:
    """Return the arguments of a message by the names that it gives them."""
    if not isinstance(record.args, tuple):
        return {}
    fields = [match["name"] for match in _FIELD.finditer(str(record.msg)) if match["kind"] != "%"]
    return {
        name: value if value is None or _is_number(value) else str(value)
        for name, value in zip(fields, record.args, strict=False)
        if name
    }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and isfinite(value)


class TextFormatter(logging.Formatter):
    """One line per record, whatever others have put into its message. The lines of a traceback are
    indented, so that none of them looks like a record.
    """

    def __init__(self) -> None:
        super().__init__(_TEXT_FORMAT)

    @override
    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_line(super().formatMessage(record))

    @override
    def formatException(self, ei: Any) -> str:
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"    {one_line(line)}" for line in lines)


class CallerFilter(logging.Filter):
    """Passes one warning of each kind per minute, for a library's logger that writes one for each
    caller that violates a protocol.
    """

    def __init__(self) -> None:
        super().__init__()
        self._next: dict[str, float] = {}

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        # The number of kinds is bounded: messages before their arguments are filled in.
        if record.levelno != logging.WARNING:
            return True
        if record.created < self._next.get(str(record.msg), 0.0):
            return False
        self._next[str(record.msg)] = record.created + CALLER_WARNING_INTERVAL_S
        return True


def configure_logging(level: str, log_format: str) -> None:
    """Send all loggers to standard error. Replaces the handlers of the root logger.

    The audit log goes there, too, always as JSON and at any level.

    Args:
        level: `debug`, `info`, `warning` or `error`.
        log_format: `text` or `json`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.getLogger().handlers[:] = [handler]
    logging.getLogger(_HTTP_SERVER).filters[:] = [CallerFilter()]
    audit = logging.StreamHandler(sys.stderr)
    audit.setFormatter(logging.Formatter("%(message)s"))
    audit_logger = logging.getLogger(AUDIT_LOGGER)
    audit_logger.handlers[:] = [audit]
    audit_logger.propagate = False
    audit_logger.setLevel(logging.INFO)
    set_level(level)


def set_level(level: str, name: str | None = None) -> None:
    """Set the lowest severity to log from now on.

    Args:
        level: `debug`, `info`, `warning` or `error`.
        name: Only this logger and those below it; None: the whole process, except libraries that
            log every request.
    """
    logger = logging.getLogger(name)
    logger.setLevel(level.upper())
    if name is None:
        for chatty in _CHATTY:
            logging.getLogger(chatty).setLevel(max(logging.WARNING, logger.level))


LoggerName = Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$")]


class LogLevelRequest(ApiModel):
    """The level to set, and for which logger."""

    model_config = ConfigDict(extra="forbid")

    level: LogLevel
    """The lowest severity to log from now on."""
    logger: LoggerName | None = None
    """A module or package of the process, with all below it, for example `lmcache_core.wire`; null:
    the whole process.
    """


class LogLevels(ApiModel):
    """The current levels."""

    level: str
    """The lowest severity that the process logs: `debug`, `info`, `warning` or `error`."""
    loggers: dict[str, str]
    """The same for each logger that has a level of its own, by its name."""


def create_log_router() -> APIRouter:
    """Create the routes of `/v1/admin/log-level`. A change lasts until the process ends."""
    router = APIRouter(prefix="/v1/admin", tags=["admin"], route_class=GuardedRoute)

    @router.get("/log-level")
    async def get_log_level(principal: ClientPrincipal) -> LogLevels:
        """Show log levels.

        Those of the process that answers; other replicas of a service may have others.
        """
        return _levels()

    @router.put("/log-level", responses=failures(404))
    async def set_log_level(request: LogLevelRequest, principal: AdminPrincipal) -> LogLevels:
        """Change log levels.

        Those of the process that answers, or of one of its loggers, until it ends; other replicas
        of a service keep theirs. 404: no such logger. 403 also for the audit log, which is written
        at any level.
        """
        if request.logger == AUDIT_LOGGER:
            raise PermissionDeniedError("the audit log is written at any level")
        if request.logger is not None and request.logger not in logging.root.manager.loggerDict:
            raise NotFoundError(
                f"no logger {request.logger!r}: name a module or package of the process, for"
                " example lmcache_core"
            )
        set_level(request.level, request.logger)
        return _levels()

    return router


def _levels() -> LogLevels:
    own = {
        name: logging.getLevelName(logger.level).lower()
        for name, logger in sorted(logging.root.manager.loggerDict.items())
        if isinstance(logger, logging.Logger) and logger.level
    }
    return LogLevels(level=logging.getLevelName(logging.root.level).lower(), loggers=own)
