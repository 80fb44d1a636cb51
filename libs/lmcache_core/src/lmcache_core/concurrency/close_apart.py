"""Closing from anywhere: a signal handler or a finalizer interrupts whatever its thread does."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future

from lmcache_core.concurrency.started_pool import OwnThread, ThreadWork

logger = logging.getLogger(__name__)


def close_apart(close: Callable[[], None], wait_s: float) -> None:
    """Close something in another thread, and wait for that.

    The caller may have interrupted code of its own thread that holds a lock which `close` needs.
    `close` then ends in the background, after the caller has returned. A thread of the cache does
    not wait at all, since `close` may wait for that thread. Where no thread can be started, as at
    the interpreter's end, the caller's thread closes.

    Args:
        close: Thread-safe and idempotent.

    Raises:
        BaseException: What `close` raised in time.
    """
    if sys.is_finalizing():  # a new thread would never run, and its start would wait for that
        close()
        return
    closing = ThreadWork(close)
    closed = closing.future
    try:
        threading.Thread(target=closing.run, name="lmcache-close", daemon=True).start()
    except RuntimeError:
        close()
        return
    if not isinstance(threading.current_thread(), OwnThread):
        try:
            closed.result(wait_s)
        except TimeoutError:
            if closed.done():
                raise
            logger.warning("closing continues in the background: waited_s=%g", wait_s)
        else:
            return
    closed.add_done_callback(_log_failure)


def _log_failure(closed: Future[None]) -> None:
    if (failure := closed.exception()) is not None:
        logger.error("closing failed", exc_info=failure)
