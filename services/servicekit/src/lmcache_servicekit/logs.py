"""One log line format for all services. What is logged is the caller's duty: never token ids,
never secrets, chunk ids only.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Final, Literal

from lmcache_core.telemetry.request_context import current_request_id
from typing_extensions import override

from lmcache_servicekit.audit import AUDIT_LOGGER

LogLevel = Literal["debug", "info", "warning", "error"]

_TEXT_FORMAT: Final = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"

# They log one line a request, with its URL, at INFO.
_CHATTY: Final = ("httpx", "httpcore", "asyncio")

CALLER_WARNING_INTERVAL_S: Final = 60.0
_HTTP_SERVER: Final = "uvicorn.error"


class JsonFormatter(logging.Formatter):
    """One JSON object a line, with `time` in UTC, `level`, `logger`, `message`; `request_id` and
    `error` where there is one.
    """

    @override
    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := current_request_id():
            line["request_id"] = request_id
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class CallerFilter(logging.Filter):
    """Lets through one warning a minute of each kind, on a logger of a library that writes one
    for each caller who breaks a protocol.
    """

    def __init__(self) -> None:
        super().__init__()
        self._next: dict[str, float] = {}

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        # Kinds are bounded: messages before their arguments are filled in.
        if record.levelno != logging.WARNING:
            return True
        if record.created < self._next.get(str(record.msg), 0.0):
            return False
        self._next[str(record.msg)] = record.created + CALLER_WARNING_INTERVAL_S
        return True


def configure_logging(level: str, log_format: str) -> None:
    """Send all loggers to standard error. Replaces the handlers of the root logger.

    The audit log goes there too, in lines that are JSON whatever the format and are written
    whatever the level.

    Args:
        level: `debug`, `info`, `warning` or `error`.
        log_format: `text` or `json`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter() if log_format == "json" else logging.Formatter(_TEXT_FORMAT)
    )
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
    """Log from now on what is at least so severe.

    Args:
        level: `debug`, `info`, `warning` or `error`.
        name: Only this logger and those below it; None: the whole process, but for libraries that
            log every request.
    """
    logger = logging.getLogger(name)
    logger.setLevel(level.upper())
    if name is None:
        for chatty in _CHATTY:
            logging.getLogger(chatty).setLevel(max(logging.WARNING, logger.level))
