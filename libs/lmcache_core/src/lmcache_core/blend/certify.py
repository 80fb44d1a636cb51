"""`python -m lmcache_core.blend.certify`: certify that a model may be blended.

Slices of a text become documents, whose KV is computed one by one and reused. The model predicts
the text after them, which is compared with its predictions without reuse. The certificate is kept
whether the model passed or not; engines read it, and blend only if it passed. It holds for one
name, weights, dtype, policy, ratio and separator. Exits with 1 when the model failed.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data import topics
from typing import TYPE_CHECKING, Any, Final

from lmcache_core.blend.certificate import (
    DEFAULT_BOUNDS,
    BlendCertificate,
    BlendProfile,
    CertificateFolder,
    QualityBounds,
)
from lmcache_core.config import BLEND_POLICIES
from lmcache_core.errors import ConfigError
from lmcache_core.extras import needs_extra

if TYPE_CHECKING:
    import torch

    from lmcache_core.integrations.transformers.blend_quality import SplitPrompt

EXIT_FAILED: Final = 1
EXIT_NOT_MEASURED: Final = 2
EXIT_INTERRUPTED: Final = 130


def certify(given: argparse.Namespace, progress: Callable[[int], None]) -> BlendCertificate:
    """Measure blending on a text, and judge it.

    Args:
        given: The options of the command line.
        progress: Called with the number of prompts done.

    Raises:
        ConfigError: The model or the text cannot be loaded, or does not fit the options.
    """
    import torch

    from lmcache_core.integrations.transformers import blend_quality

    text = own_text() if given.text is None else _read(given.text)
    model, tokenizer = load_model(given.model, given.dtype)

    def token_ids(text: str) -> torch.Tensor:
        found = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return torch.tensor(found, dtype=torch.int64)

    separator = token_ids(given.separator)
    if len(separator) == 0:
        raise ConfigError(f"the separator {given.separator!r} has no tokens; give one that has")
    longest = getattr(model.config, "max_position_embeddings", None)
    width = given.documents * given.document_tokens + given.ending_tokens
    if longest is not None and width > longest:
        raise ConfigError(
            f"prompts of {width} tokens, and {given.model} takes {longest}; take fewer or shorter"
            " documents"
        )
    prompts = cut_prompts(given, token_ids(text), separator)
    profile = BlendProfile(given.policy, given.ratio, tuple(separator.tolist()))
    name = given.name or _name_of(given.model)
    try:
        found = blend_quality.certify(
            model,
            name,
            prompts,
            profile,
            bounds=QualityBounds(given.max_kl, given.min_agreement, given.max_loss),
            revision=given.revision,
            progress=progress,
        )
    except ValueError as exc:
        raise ConfigError(f"{given.model} cannot be blended: {exc}") from exc
    quality = found.quality
    figures = (quality.kl_nats, quality.delta_loss_nats, quality.delta_loss_error)
    if not all(map(math.isfinite, figures)):
        dtype = str(model.dtype).removeprefix("torch.")
        raise ConfigError(
            f"{given.model} in {dtype} does not predict finite numbers; try another --dtype"
        )
    return found


def cut_prompts(
    given: argparse.Namespace, tokens: torch.Tensor, separator: torch.Tensor
) -> list[SplitPrompt]:
    """Cut prompts from across a text.

    Args:
        given: How long they are, and how many.
        tokens: Token ids of the text, `[num_tokens]`.
        separator: Token ids that end a document.

    Raises:
        ConfigError: The text is too short, or a separator leaves a document no room.
    """
    import torch

    from lmcache_core.integrations.transformers.blend_quality import SplitPrompt

    own = given.document_tokens - len(separator)
    if own < 1:
        raise ConfigError(
            f"documents of {given.document_tokens} tokens have no room after a separator of"
            f" {len(separator)}"
        )
    width = given.documents * own + given.ending_tokens
    needed = width + given.prompts - 1
    if len(tokens) < needed:
        raise ConfigError(
            f"the text has {len(tokens)} tokens; {given.prompts} prompts of {width} need at least"
            f" {needed}"
        )
    step = (len(tokens) - width) // (given.prompts - 1)
    prompts = []
    for i in range(given.prompts):
        part = tokens[i * step : i * step + width]
        documents = [
            torch.cat([part[j * own : (j + 1) * own], separator]) for j in range(given.documents)
        ]
        prompts.append(SplitPrompt(documents, part[given.documents * own :]))
    return prompts


def load_model(directory: Path, dtype: str) -> tuple[Any, Any]:
    """Load a model, in eval mode, and its tokenizer, as Hugging Face saves them. Nothing is
    downloaded, and none of its code is run.

    Raises:
        ConfigError: They cannot be loaded.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    cannot = f"cannot load a model and its tokenizer from {directory}"
    try:
        if not directory.is_dir():  # which transformers would take for a name to download
            raise ConfigError(
                f"{cannot}: it is not a directory; give one that save_pretrained wrote"
            )
        where = {"local_files_only": True, "trust_remote_code": False}
        model = AutoModelForCausalLM.from_pretrained(str(directory), dtype=dtype, **where)
        return model.eval(), AutoTokenizer.from_pretrained(str(directory), **where)
    except ConfigError:
        raise
    except (OSError, ValueError, ImportError) as exc:
        raise ConfigError(f"{cannot}: {str(exc).strip().partition(chr(10))[0]}") from exc


def own_text() -> str:
    """Return Python's own documentation, which every machine has."""
    return "\n\n".join(topics.topics[name].strip() for name in sorted(topics.topics))


def _name_of(model: Path) -> str:
    """Return the directory's name as given: a link's own name, not its target's."""
    name = model.absolute().name
    return name if name != ".." else model.resolve().name


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read the text {path}: {exc}") from exc


def check_can_be_kept(certificates: Path) -> None:
    """Refuse an unwritable folder before minutes are spent; create nothing yet.

    Raises:
        ConfigError: No certificate can be written there.
    """
    wanted = certificates.absolute()
    cannot = f"cannot keep the certificate in {certificates}"
    try:
        there = next(path for path in (wanted, *wanted.parents) if path.exists())
        is_directory = there.is_dir()
    except OSError as exc:
        raise ConfigError(f"{cannot}: {exc.strerror}") from exc
    if not is_directory or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{cannot}: {there} is not a directory that may be written to")


def _number(low: float, high: float = math.inf, kind: type = float) -> Callable[[str], Any]:
    """Return what reads a number in these bounds."""

    def read(text: str) -> Any:
        value = kind(text)
        if not low <= value <= high:
            bound = f"at least {low:g}" if high == math.inf else f"in {low:g}..{high:g}"
            raise argparse.ArgumentTypeError(f"{text}: must be {bound}")
        return value

    read.__name__ = "number"  # argparse says it of what is none
    return read


def parser() -> argparse.ArgumentParser:
    """Return the options of this command line."""
    options = argparse.ArgumentParser(
        prog="python -m lmcache_core.blend.certify",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    model = options.add_argument_group("what is certified").add_argument
    model(
        "--model",
        type=Path,
        required=True,
        help="a Hugging Face model's directory, with its tokenizer",
    )
    model(
        "--separator",
        required=True,
        help="text that ends each document; engines are given its token ids",
    )
    model(
        "--certificates",
        type=Path,
        default=Path("lmcache-certificates"),
        help="folder for the certificate: blend_certificates of engines",
    )
    model("--name", help="name under which the model's KV is shared, if not the directory's")
    model("--revision", help="revision of the weights, where engines name one")
    model(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="dtype of the weights in the engine; auto: as they are stored",
    )
    model(
        "--policy",
        choices=BLEND_POLICIES,
        default=BLEND_POLICIES[0],
        help="which tokens are recomputed",
    )
    model(
        "--ratio", type=_number(0, 1), default=0.15, help="share of the reused tokens to recompute"
    )
    text = options.add_argument_group("what it is measured on").add_argument
    text("--text", type=Path, help="held-out text, UTF-8, if not Python's documentation")
    for name, low, default, what in (
        ("prompts", 2, 50, "prompts to measure on"),
        ("documents", 1, 3, "documents in each prompt"),
        ("document-tokens", 2, 256, "tokens of each document, the separator included"),
        ("ending-tokens", 2, 64, "tokens after the documents, which are predicted"),
    ):
        text(f"--{name}", type=_number(low, kind=int), default=default, help=what)
    bound = options.add_argument_group("what it must keep to").add_argument
    bound(
        "--max-kl",
        type=_number(0),
        default=DEFAULT_BOUNDS.max_kl_nats,
        help="largest mean divergence, in nats",
    )
    bound(
        "--min-agreement",
        type=_number(0, 1),
        default=DEFAULT_BOUNDS.min_top1_agreement,
        help="least share of equal choices",
    )
    bound(
        "--max-loss",
        type=_number(0),
        default=DEFAULT_BOUNDS.max_delta_loss_nats,
        help="largest growth of the loss, nats a token",
    )
    return options


def told(found: BlendCertificate) -> str:
    """Return what was measured and its bounds, and why the model failed if it did."""
    quality, bounds = found.quality, found.bounds
    lines = [
        f"{found.model_name}: {found.profile}; {quality.num_prompts} prompts,"
        f" {quality.reused_share:.0%} of their tokens reused",
        f"divergence of the next token: {quality.kl_nats:.4f} nats, at most {bounds.max_kl_nats:g}",
        f"same first choice: {quality.top1_agreement:.1%}, at least"
        f" {bounds.min_top1_agreement:.0%}",
        f"growth of the loss: {quality.delta_loss_nats:+.4f} ± {quality.delta_loss_error:.4f} nats,"
        f" at most {bounds.max_delta_loss_nats:g}, with twice its error",
        *(f"FAILED: {reason}" for reason in found.reasons),
    ]
    return "\n".join(lines if found.reasons else [*lines, "passed"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Certify the model that the command line names; return the exit code."""
    given = parser().parse_args(arguments)

    def progress(num_done: int) -> None:
        if sys.stderr.isatty():
            end = "\n" if num_done == given.prompts else ""
            sys.stderr.write(f"\rprompts {num_done}/{given.prompts}{end}")

    try:
        check_can_be_kept(given.certificates)
        with needs_extra("transformers"):
            found = certify(given, progress)
        path = CertificateFolder(given.certificates).save(found)
    except (ConfigError, ModuleNotFoundError) as exc:
        sys.stderr.write(f"{exc}\n")
        return EXIT_NOT_MEASURED
    except OSError as exc:
        sys.stderr.write(f"cannot keep the certificate in {given.certificates}: {exc}\n")
        return EXIT_NOT_MEASURED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    sys.stdout.write(f"{told(found)}\nkept as {path}\n")
    return EXIT_FAILED if found.reasons else 0


if __name__ == "__main__":
    sys.exit(main())
