"""Owners of concurrent work: the task supervisor, the bridge between sync callers and the event
loop, pools of threads.
"""

from lmcache_core.concurrency.bridge import LoopThread
from lmcache_core.concurrency.close_apart import close_apart
from lmcache_core.concurrency.started_pool import OwnThread, StartedPool, loop_pool
from lmcache_core.concurrency.supervisor import TaskSupervisor, cancel_and_join, run_together
from lmcache_core.concurrency.workers import Workers

__all__ = [
    "LoopThread",
    "OwnThread",
    "StartedPool",
    "TaskSupervisor",
    "Workers",
    "cancel_and_join",
    "close_apart",
    "loop_pool",
    "run_together",
]
