"""The blended step of the demo: documents that were stored one by one are read in another order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lmcache_demo.cluster import Cluster
from lmcache_demo.engines import AskBlended, BlendedAnswers, Engine, KeepDocuments
from lmcache_demo.processes import Processes

POLICY, RECOMPUTE_RATIO = "deviation", 0.25
# At the default of 15 % this small model does not keep to the bounds of a certificate;
# docs/benchmarks.md has the curve.
MIN_REUSED_SHARE, MIN_EQUAL_SHARE, MIN_RIGHT_SHARE = 0.8, 0.9, 0.9


@dataclass(frozen=True)
class Way:
    """One way to read the prompts, and its outcome.

    Attributes:
        policy: Which tokens to recompute.
        recompute_ratio: Share of them.
        answers: The outcome.
        is_good: Whether it must pass its certificate; otherwise it must fail, so that prompts are
            computed in full.
    """

    policy: str
    recompute_ratio: float
    answers: BlendedAnswers
    is_good: bool

    @property
    def faults(self) -> list[str]:
        """List what differs from the expectation."""
        answers, found = self.answers, []
        if (answers.reason_against is None) != self.is_good:
            against = answers.reason_against
            passed = "passed its certificate, and should not have"
            found.append(f"not blended: {against}" if self.is_good else passed)
        elif answers.num_blended != (answers.num_answers if self.is_good else 0):
            found.append(f"{answers.num_blended} of {answers.num_answers} prompts were blended")
        reused, of = answers.num_reused_tokens, answers.num_prompt_tokens
        if self.is_good and reused < of * MIN_REUSED_SHARE:
            found.append(f"only {reused} of {of} tokens were reused")
        least = answers.num_answers * (MIN_EQUAL_SHARE if self.is_good else 1)
        asked = f"of {answers.num_answers} answers are"
        if answers.num_equal < least:
            found.append(f"{answers.num_equal} {asked} those of full recompute")
        if answers.num_right < answers.num_answers * MIN_RIGHT_SHARE:
            found.append(f"{answers.num_right} {asked} right")
        return [f"blend, {self.policy}: {fault}" for fault in found]


def run_blended(
    processes: Processes, cluster: Cluster, directory: Path, say: Callable[[str], None]
) -> list[Way]:
    """Run the step, and end its engine and sidecars.

    Args:
        processes: Owner of the processes.
        cluster: The services, running.
        directory: For the certificates.
        say: Told what happens now.
    """
    say("engine G stores documents through sidecar G, each on its own")
    engine = Engine(processes, "engine-g")
    keeper = cluster.start_sidecar("sidecar-g")
    engine.keep_documents(KeepDocuments(str(keeper.socket)))
    cluster.wait_until_settled(keeper)
    say("engine G, now at sidecar H, reads them in another order: blended, then as is")
    reader = cluster.start_sidecar("sidecar-h")
    folder = str(directory / "certificates")
    ways = []
    # In this order: prompts that are computed in full are stored, and would be found whole; blended
    # ones are not.
    for policy, ratio in ((POLICY, RECOMPUTE_RATIO), ("none", 0.0)):
        answers = engine.ask_blended(AskBlended(str(reader.socket), folder, policy, ratio))
        ways.append(Way(policy, ratio, answers, is_good=policy != "none"))
    engine.process.end()
    for sidecar in (keeper, reader):
        sidecar.process.kill()
    return ways
