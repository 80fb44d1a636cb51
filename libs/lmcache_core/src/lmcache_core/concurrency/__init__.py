"""Owners of concurrent work: the task supervisor and the bridge between sync callers and the event loop."""

from lmcache_core.concurrency.bridge import LoopThread
from lmcache_core.concurrency.supervisor import TaskSupervisor

__all__ = ["LoopThread", "TaskSupervisor"]
