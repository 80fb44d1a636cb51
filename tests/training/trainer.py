"""One process's share of a training run: a replica of the model, its optimizers and how far they
have come.
"""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import time
from pathlib import Path
from typing import Final

import torch
import torch.multiprocessing  # teaches pickling to hand tensors in shared memory to another process
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from tests.training.batches import Sampler
from tests.training.recipe import Recipe, build_config

# Values that travel with the gradients: the loss, the CPU time of the step, and whether to stop.
NUM_EXTRA_VALUES = 3


@dataclasses.dataclass(slots=True)
class Progressed:
    """How far a run has come, over all its resumptions.

    Attributes:
        step: Steps done.
        num_tokens: Tokens trained on.
        wall_s: Wall time spent in training steps, in seconds.
        cpu_s: CPU time spent in training steps, over all processes, in seconds.
        loss: Running mean of the training loss, in nats per token.
    """

    step: int = 0
    num_tokens: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    loss: float = float("nan")


class Trainer:
    """A replica of the run; all replicas hold the same weights after every step."""

    def __init__(
        self, recipe: Recipe, sampler: Sampler, rank: int, start: Path | None = None
    ) -> None:
        """Build the untrained model of the recipe's seed, or load one to continue with.

        Args:
            rank: This process, from 0.
            start: Folder of a trained model of the same architecture.
        """
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.progressed = Progressed()
        self.model = (LlamaForCausalLM(build_config()) if start is None else _load(start)).train()
        self._sampler = sampler
        self._rank = rank
        self._parameters = list(self.model.parameters())
        matrices = [
            p for name, p in self.model.named_parameters() if p.ndim == 2 and "embed" not in name
        ]
        others = [p for name, p in self.model.named_parameters() if p.ndim != 2 or "embed" in name]
        muon = torch.optim.Muon(
            matrices,
            lr=recipe.matrix_lr,
            weight_decay=recipe.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        adamw = torch.optim.AdamW(others, lr=recipe.vector_lr, betas=(0.9, 0.97), weight_decay=0.0)
        self._optimizers: tuple[tuple[torch.optim.Optimizer, float], ...] = (
            (muon, recipe.matrix_lr),
            (adamw, recipe.vector_lr),
        )

    def train_step(self, exchange: MeanExchange, *, stop: bool) -> bool:
        """Do one step together with the other processes; return whether any of them wants the run
        to stop after it.
        """
        started, cpu_started = time.perf_counter(), time.process_time()
        recipe, done = self.recipe, self.progressed
        length = recipe.length_at(done.step)
        num_rows = recipe.tokens_per_step // length
        rows = self._sampler.draw(done.step, num_rows, length)
        own = slice(self._rank, None, exchange.num_workers)
        tokens = torch.from_numpy(rows.tokens[own])
        seen = rows.mask()
        mask = None if seen is None else torch.from_numpy(seen[own])[:, None]
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(
                input_ids=tokens[:, :-1], attention_mask=mask, use_cache=False
            ).logits
        losses = F.cross_entropy(
            logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        )
        if rows.weights is None:
            loss = losses.mean()
        else:
            weights = torch.from_numpy(rows.weights[own]).flatten()
            # A share of rows without a single weight teaches nothing; it must not make the weights
            # NaN.
            loss = (losses * weights).sum() / weights.sum().clamp_min(
                torch.finfo(weights.dtype).tiny
            )
        torch.autograd.backward(loss)
        extra = torch.tensor([loss.item(), time.process_time() - cpu_started, float(stop)])
        flat = torch.cat(
            [
                parameter.grad.flatten()
                for parameter in self._parameters
                if parameter.grad is not None
            ]
            + [extra]
        )
        mean = exchange.average(self._rank, flat)
        self._update(mean[:-NUM_EXTRA_VALUES])
        value, cpu_s, any_stop = mean[-NUM_EXTRA_VALUES:].tolist()
        done.step += 1
        done.num_tokens += num_rows * length
        done.loss = value if math.isnan(done.loss) else 0.97 * done.loss + 0.03 * value
        done.wall_s += time.perf_counter() - started
        done.cpu_s += cpu_s * exchange.num_workers
        return bool(any_stop)

    def _update(self, gradient: torch.Tensor) -> None:
        """Clips the mean gradient, shape ``[num_parameters]``, and lets the optimizers apply it."""
        sizes = [parameter.numel() for parameter in self._parameters]
        for parameter, part in zip(self._parameters, torch.split(gradient, sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        torch.nn.utils.clip_grad_norm_(self._parameters, self.recipe.max_grad_norm)
        scale = self.recipe.lr_scale_at(self.progressed.step)
        for optimizer, peak_lr in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak_lr * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def save(self, path: Path) -> None:
        """Writes the state next to ``path`` and moves it there, so that a kill leaves the old one
        or the new one.
        """
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer, _ in self._optimizers],
            "progressed": dataclasses.asdict(self.progressed),
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Restores the state that :meth:`save` wrote."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for (optimizer, _), saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progressed = Progressed(**state["progressed"])


def _load(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True)


MAX_WAIT_S: Final = 600.0


class MeanExchange:
    """A table in shared memory with a row per process; passed to the processes when they are
    started.
    """

    def __init__(self, num_workers: int, num_values: int) -> None:
        self.num_workers = num_workers
        self._rows: torch.Tensor = torch.zeros(num_workers, num_values).share_memory_()  # type: ignore[no-untyped-call]
        self._barrier = multiprocessing.get_context("spawn").Barrier(num_workers)

    def average(self, rank: int, values: torch.Tensor) -> torch.Tensor:
        """Wait for all processes' vectors, float32 ``[num_values]``; return their mean, bit for bit
        the same in every process.

        Raises:
            threading.BrokenBarrierError: Another process has not come within ten minutes.
        """
        self._rows[rank].copy_(values)
        self._barrier.wait(MAX_WAIT_S)
        mean: torch.Tensor = self._rows.mean(dim=0)
        self._barrier.wait(MAX_WAIT_S)
        return mean
