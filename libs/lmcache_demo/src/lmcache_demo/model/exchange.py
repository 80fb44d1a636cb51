"""Averages values between training processes through shared memory.

One single-threaded process per core is as fast as one process of many threads on an idle machine,
and far faster on a busy one: the processes wait for each other once a step, threads at every
operator.
"""

import multiprocessing
from typing import Final

import torch
import torch.multiprocessing  # teaches pickling to hand tensors in shared memory to another process

MAX_WAIT_S: Final = 600.0


class MeanExchange:
    """A table in shared memory with a row per process; passed to the processes when they are
    started.
    """

    def __init__(self, num_workers: int, num_values: int) -> None:
        """Allocates the table.

        Args:
            num_workers: Number of processes that will take part in every exchange.
            num_values: Length of the vectors to average.
        """
        self.num_workers = num_workers
        self._rows: torch.Tensor = torch.zeros(num_workers, num_values).share_memory_()  # type: ignore[no-untyped-call]
        self._barrier = multiprocessing.get_context("spawn").Barrier(num_workers)

    def average(self, rank: int, values: torch.Tensor) -> torch.Tensor:
        """Returns the mean of all processes' vectors; blocks until all have come.

        Args:
            rank: The calling process, from 0.
            values: Its vector, shape ``[num_values]``, dtype float32.

        Returns:
            The mean, same shape, bit for bit the same in every process; owned by the caller.

        Raises:
            threading.BrokenBarrierError: If another process has not come within ten minutes.
        """
        self._rows[rank].copy_(values)
        self._barrier.wait(MAX_WAIT_S)
        mean: torch.Tensor = self._rows.mean(dim=0)
        self._barrier.wait(MAX_WAIT_S)
        return mean
