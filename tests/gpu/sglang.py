"""Two real SGLangs at one sidecar: how long the first token takes, computed and found. KV that was
loaded is compared with what was computed, byte by byte.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.gpu.copies import LOADS, STORES, require_pinned
from tests.gpu.facts import SHARED_MEMORY
from tests.gpu.report import Report, WrongBytes
from tests.gpu.vllm import CONFIG, DRY_CONFIG
from tests.sglang.engines import PAGE_SIZE, engine_options, linked, set_environment, start

DIGESTS = "LMC_DIGESTS"
"""Environment variable: a directory, common to both engines, with a digest of each page, and
whether each thread's last copy was of pinned memory.
"""
PINNED = "pinned"
LINKER = "tests.gpu.sglang_linker:CheckedLinker"
ANSWER_S = 60.0
NUM_NEW = 4


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        length: Of a prompt.
        rounds: Of first tokens, behind one that warms up.
        arena_gb: The sidecar's memory.
        options: Of the engines.
    """

    length: int
    rounds: int
    arena_gb: float
    options: Mapping[str, Any]

    @property
    def num_pages(self) -> int:
        """Pages that the second engine loads in all rounds: the last token is always computed."""
        return (self.rounds + 1) * ((self.length - 1) // PAGE_SIZE)


SIZES = Sizes(
    *(8193, 5, 8.0),
    {
        "device": "cuda",
        "dtype": "bfloat16",
        "attention_backend": None,
        "sampling_backend": None,
        "disable_overlap_schedule": False,
        "disable_cuda_graph": True,
        "mem_fraction_static": 0.3,
        "context_length": 8448,
        "chunked_prefill_size": 8192,
    },
)
DRY_SIZES = Sizes(1000, 1, 0.1, {})


def run(report: Report) -> None:
    """Measure a pair of engines."""
    if importlib.util.find_spec("sglang") is None:
        report.note("left out", text="SGLang is not installed for this Python")
        return
    from tests.vllm.models import make_model
    from tests.vllm.processes import Owner

    set_environment()
    sizes = DRY_SIZES if report.is_dry else SIZES
    with (
        tempfile.TemporaryDirectory(prefix="lmcache-gpu-") as place,
        tempfile.TemporaryDirectory(prefix="lmcache-gpu-", dir=SHARED_MEMORY) as shared,
    ):
        model, digests = Path(place) / "model", Path(place) / "digests"
        make_model(model, DRY_CONFIG if report.is_dry else CONFIG, seed=0)
        digests.mkdir()
        with Owner(Path(place)) as owner:
            _measure(report, owner, model, Path(shared), digests, sizes)
        loaded = (digests / "loaded").read_text().split()
        if not report.is_dry:
            threads = (STORES, LOADS)
            require_pinned({one: (digests / one).read_text() == PINNED for one in threads})
    if "other" in loaded:
        raise WrongBytes(f"{loaded.count('other')} of {len(loaded)} pages that SGLang loaded")
    report.note("pages", loaded=len(loaded), of=sizes.num_pages)
    if len(loaded) < sizes.num_pages:
        raise AssertionError(f"{len(loaded)} of {sizes.num_pages} pages were loaded")


def _measure(
    report: Report, owner: Any, model: Path, shared: Path, digests: Path, sizes: Sizes
) -> None:
    from tests.vllm.engines import Ask
    from tests.vllm.references import prompt
    from tests.vllm.sidecars import await_calm, sidecar, socket_of

    service = sidecar(owner, arena_gb=sizes.arena_gb, arena_path=shared / "arena")
    options = engine_options(model, **linked(socket_of(owner), LINKER), **sizes.options)
    first, second = (
        start(owner, name, options, {DIGESTS: str(digests)}) for name in ("first", "second")
    )
    computed, found = list[float](), list[float]()
    for number in range(sizes.rounds + 1):
        ask = Ask(tuple(prompt(number + 1, sizes.length)), NUM_NEW)
        computed.append(first.call(ANSWER_S, do="first_token", ask=asdict(ask)))
        (expected,) = first.generate([ask])
        await_calm(service)
        found.append(second.call(ANSWER_S, do="first_token", ask=asdict(ask)))
        (again,) = second.generate([ask])
        report.note(f"round {number}", are_tokens_equal=again.tokens == expected.tokens)
    ms = {"cold": computed[1:], "found": found[1:]}
    medians = {what: round(statistics.median(each) * 1e3, 3) for what, each in ms.items()}
    report.note("ours", ms=medians)
