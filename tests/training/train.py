"""Trains the demonstration's models: ``python -m tests.training.train --out FOLDER``.

``--task two-documents`` continues with the shipped model and teaches it prompts whose answers need
two documents. A killed run continues from its last checkpoint with ``--resume``; a finished one
leaves the model in ``FOLDER/export``.
"""

import argparse
import copy
import dataclasses
import logging
import multiprocessing
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from lmcache_demo.model import MODEL_DIR, load_tokenizer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from tests.training.batches import BatchSampler, Sampler
from tests.training.corpus import Document, collect_corpus
from tests.training.recipe import (
    MAX_POSITIONS,
    TWO_DOCUMENT_RECIPE,
    VOCAB_SIZE,
    Recipe,
    build_config,
)
from tests.training.tokenizer import encode_documents, save_tokenizer, train_tokenizer
from tests.training.trainer import NUM_EXTRA_VALUES, MeanExchange, Trainer
from tests.training.two_documents import TwoDocumentSampler

logger = logging.getLogger(__name__)

CHECKPOINT_NAME: Final = "checkpoint.pt"
CHECKPOINT_INTERVAL_S: Final = 120.0
LOG_INTERVAL_STEPS: Final = 20
LOG_FORMAT: Final = "%(asctime)s %(message)s"
# Merges are learned from a sample: 2,048 tokens need no more.
MAX_TOKENIZER_CHARS: Final = 8_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """What every training process is given.

    Attributes:
        folder: Where the checkpoint, the tokenizer and the export are.
        recipe: The schedule.
        sampler: The training sequences.
        exchange: Where the processes meet.
        limit_s: Wall time after which the run stops and saves, in seconds.
        start: Folder of the model to go on with; None trains a new one.
    """

    folder: Path
    recipe: Recipe
    sampler: Sampler
    exchange: MeanExchange
    limit_s: float
    start: Path | None


def prepare_tokenizer(documents: Sequence[Document], folder: Path) -> Tokenizer:
    """Loads the run's tokenizer, or trains and saves it where there is none yet."""
    path = folder / "tokenizer.json"
    if path.exists():
        return Tokenizer.from_file(str(path))
    texts, size = [], 0
    for doc in documents:
        if doc.kind != "test" and size < MAX_TOKENIZER_CHARS:
            texts.append(doc.text)
            size += len(doc.text)
    tokenizer = train_tokenizer(texts, VOCAB_SIZE)
    save_tokenizer(tokenizer, folder, MAX_POSITIONS)
    return tokenizer


def work(rank: int, job: Job) -> None:
    """Train in one process; the first one shows the progress, saves checkpoints and exports."""
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    torch.set_num_threads(1)
    trainer = Trainer(job.recipe, job.sampler, rank, job.start)
    checkpoint = job.folder / CHECKPOINT_NAME
    if checkpoint.exists():
        trainer.load(checkpoint)
    if rank == 0:
        lead(trainer, job, checkpoint)
        return
    stopped = False
    while trainer.progressed.step < job.recipe.num_steps and not stopped:
        stopped = trainer.train_step(job.exchange, stop=False)


def lead(trainer: Trainer, job: Job, checkpoint: Path) -> None:
    """Train until the recipe's last step or the time limit, with a progress bar and regular
    checkpoints.
    """
    started = saved_at = time.monotonic()
    done, num_steps = trainer.progressed, job.recipe.num_steps
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    stopped = False
    with Progress(*columns, TextColumn("{task.fields[note]}")) as progress:
        task = progress.add_task("training", total=num_steps, completed=done.step, note="")
        while done.step < num_steps and not stopped:
            late = time.monotonic() - started > job.limit_s
            stopped = trainer.train_step(job.exchange, stop=late or _is_orphaned())
            rate = done.num_tokens / done.wall_s
            note = (
                f"loss {done.loss:.3f} nats/token, {rate:,.0f} tokens/s, length"
                f" {job.recipe.length_at(done.step)}"
            )
            progress.update(task, completed=done.step, note=note)
            if done.step % LOG_INTERVAL_STEPS == 0:
                logger.info(
                    "step %d, %s, %.0f s, %.0f CPU-s", done.step, note, done.wall_s, done.cpu_s
                )
            if time.monotonic() - saved_at > CHECKPOINT_INTERVAL_S:
                trainer.save(checkpoint)
                saved_at = time.monotonic()
    trainer.save(checkpoint)
    if done.step >= num_steps:
        folder = export_model(trainer.model, job.folder / "tokenizer.json", job.folder / "export")
        logger.info("exported to %s: %s", folder, done)


def _is_orphaned() -> bool:
    """Whether the program that started this process has been killed."""
    parent = multiprocessing.parent_process()
    return parent is not None and not parent.is_alive()


def start(job: Job) -> None:
    """Runs a job's processes and waits for them.

    Raises:
        RuntimeError: If one of them fails; the others are ended, and the last checkpoint stands.
    """
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=work, args=(rank, job), daemon=True)
        for rank in range(job.exchange.num_workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        while process.is_alive() and all(other.exitcode in (None, 0) for other in processes):
            process.join(timeout=1.0)
    if any(process.exitcode != 0 for process in processes):
        for process in processes:
            process.terminate()
        msg = f"training processes ended with {[process.exitcode for process in processes]}"
        raise RuntimeError(msg)


def prepare(task: str, documents: Sequence[Document], folder: Path) -> tuple[Recipe, Sampler]:
    """Returns a task's schedule and sequences, and leaves the tokenizer in the run's folder."""
    if task == "text":
        recipe, tokenizer = Recipe(), prepare_tokenizer(documents, folder)
        return recipe, BatchSampler(
            documents, encode_documents(tokenizer, [doc.text for doc in documents]), recipe.seed
        )
    recipe = TWO_DOCUMENT_RECIPE
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(MODEL_DIR / name, folder / name)
    texts = encode_documents(
        Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")), [doc.text for doc in documents]
    )
    return recipe, TwoDocumentSampler(load_tokenizer(), texts, recipe.seed)


def main() -> None:
    """Command line of the training run."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.training.train", description="Trains the demonstration model."
    )
    parser.add_argument(
        "--task",
        choices=("text", "two-documents"),
        default="text",
        help="what to teach (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="folder for the checkpoint, the tokenizer and the export",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=60.0,
        help="stop and save after this wall time (default: %(default)s)",
    )
    parser.add_argument("--steps", type=int, help="steps in all (default: the task's own number)")
    parser.add_argument(
        "--workers",
        type=int,
        default=2,
        help="processes of one thread each: 1 or 2 (default: %(default)s)",
    )
    parser.add_argument("--resume", action="store_true", help="go on from the folder's checkpoint")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    if (args.out / CHECKPOINT_NAME).exists() and not args.resume:
        parser.error(
            f"{args.out / CHECKPOINT_NAME} exists: add --resume to go on, or choose another folder"
        )
    args.out.mkdir(parents=True, exist_ok=True)

    documents = collect_corpus().training
    recipe, sampler = prepare(args.task, documents, args.out)
    logger.info("%d documents, %d tokens", len(documents), sampler.num_tokens)
    num_parameters = sum(
        parameter.numel() for parameter in LlamaForCausalLM(build_config()).parameters()
    )
    job = Job(
        folder=args.out,
        recipe=dataclasses.replace(recipe, num_steps=args.steps or recipe.num_steps),
        sampler=sampler,
        exchange=MeanExchange(args.workers, num_parameters + NUM_EXTRA_VALUES),
        limit_s=args.minutes * 60,
        start=MODEL_DIR if args.task == "two-documents" else None,
    )
    start(job)


if __name__ == "__main__":
    main()


def export_model(model: LlamaForCausalLM, tokenizer_path: Path, folder: Path) -> Path:
    """Export weights as bfloat16 safetensors, with the configuration and the tokenizer next to
    them; return the folder.

    Args:
        tokenizer_path: The run's ``tokenizer.json``; ``tokenizer_config.json`` is next to it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    half = copy.deepcopy(model).eval().to(torch.bfloat16)
    half.generation_config.do_sample = False
    half.save_pretrained(str(folder))
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer_path.with_name(name), folder / name)
    return folder
