"""One log line format for all services. What is logged is the caller's duty: never token ids, never secrets, chunk ids only."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Final

_TEXT_FORMAT: Final = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"

# They log one line a request, with its URL, at INFO.
_CHATTY: Final = ("httpx", "httpcore", "asyncio")


class JsonFormatter(logging.Formatter):
    """One JSON object a line, with `time` in UTC, `level`, `logger`, `message` and, after a failure, `error`."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one record."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure_logging(level: str, log_format: str) -> None:
    """Send all loggers to standard error. Replaces the handlers of the root logger.

    Args:
        level: `debug`, `info`, `warning` or `error`.
        log_format: `text` or `json`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(_TEXT_FORMAT))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
