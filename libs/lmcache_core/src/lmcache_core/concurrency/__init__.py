"""Owners of concurrent work: the task supervisor, the bridge between sync callers and the event
loop, threads for digests.
"""

from lmcache_core.concurrency.bridge import LoopThread
from lmcache_core.concurrency.supervisor import TaskSupervisor, cancel_and_join, run_together
from lmcache_core.concurrency.workers import Workers

__all__ = ["LoopThread", "TaskSupervisor", "Workers", "cancel_and_join", "run_together"]
