"""What the demo prints when it has run."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lmcache_demo.blending import Way
from lmcache_demo.scenario import MAX_NEW_TOKENS, Compression, Step

MIB = 1 << 20
MILLISECONDS = 1000


def print_steps(steps: list[Step], blended: list[Way], console: Console) -> bool:
    """Print the tables and what they come to; False when a step is not as it should be."""
    console.print(_table(steps))
    faults = [f"{step.title}: {fault}" for step in steps for fault in step.faults]
    faults += [fault for way in blended for fault in way.faults]
    for fault in faults:
        console.print(f"[red]NOT AS SAID[/] {escape(fault)}", highlight=False)
    if faults:
        return False
    console.print(
        "[dim]prompt, reused: tokens · MiB: + into the engine, - out of it · TTFT: ms to the first"
        " token[/]"
    )
    console.print(_compression_table(steps))
    console.print(
        "[dim]MiB: raw · stored: MiB · bits: of an element · err: relative errors, the largest and"
        " root mean square[/]"
    )
    for step in steps:
        if step.first_difference is not None:
            for who, answer in ((step.title, step.answer), ("without a cache", step.reference)):
                console.print(
                    f"[dim]{escape(who)} said:[/] {escape(repr(answer.text))}", highlight=False
                )
    console.print(_blended_table(blended))
    console.print(
        "[dim]anew: share computed anew · KL (nats), agree: of its certificate · as full, right:"
        " answers[/]"
    )
    for way in blended:
        if way.answers.reason_against is not None:
            console.print(
                f"[dim]{escape(way.policy)}, computed in full:[/]"
                f" {escape(way.answers.reason_against)}",
                highlight=False,
            )
    console.print(_verdict(steps, blended), highlight=False)
    return True


def _table(steps: list[Step]) -> Table:
    table = Table(
        title="A prompt's KV, computed once",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("engine, step", no_wrap=True)
    for heading in ("prompt", "reused", "from", "MiB", "TTFT", "no cache", "equal"):
        table.add_column(heading, justify="left" if heading == "from" else "right", no_wrap=True)
    for step in steps:
        answer, reference = step.answer, step.reference
        table.add_row(
            step.title,
            str(answer.num_prompt_tokens),
            str(answer.num_reused_tokens),
            step.place,
            _moved(answer.retrieved_bytes, answer.stored_bytes),
            f"{answer.time_to_first_token_s * MILLISECONDS:.0f}",
            f"{reference.time_to_first_token_s * MILLISECONDS:.0f}",
            "yes" if step.first_difference is None else "no" if step.may_differ else "NO",
        )
    return table


def _compression_table(steps: list[Step]) -> Table:
    bits = steps[0].answer.kv_bits
    title = f"The same KV, stored smaller (as it is: {bits} bits an element)"
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    table.add_column("engine, serde", no_wrap=True)
    for heading in (
        "MiB",
        "stored",
        "ratio",
        "bits",
        "max err",
        "rms err",
        f"{MAX_NEW_TOKENS} new tokens",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for step in steps:
        if step.compression is not None:
            table.add_row(
                step.title,
                *_compression_cells(step.compression, step.answer.kv_bits),
                _equality(step),
            )
    return table


def _compression_cells(compression: Compression, bits: int) -> list[str]:
    written = compression.written
    errors = [f"{error:.1%}" if error else "0" for error in (written.max_error, written.rms_error)]
    sizes = [f"{size / MIB:.1f}" for size in (written.raw_bytes, written.encoded_bytes)]
    return [*sizes, f"{compression.ratio:.2f}x", f"{bits / compression.ratio:.2f}", *errors]


def _blended_table(blended: list[Way]) -> Table:
    title = "Documents stored one by one, read in another order"
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    table.add_column("policy", no_wrap=True)
    for heading in ("anew", "KL", "agree", "gate", "prompts", "reused", "as full", "right"):
        table.add_column(heading, justify="right", no_wrap=True)
    for way in blended:
        answers = way.answers
        table.add_row(
            way.policy,
            f"{way.recompute_ratio:.0%}",
            f"{answers.kl_nats:.3f}",
            f"{answers.top1_agreement:.0%}",
            "passed" if answers.reason_against is None else "failed",
            str(answers.num_prompt_tokens),
            str(answers.num_reused_tokens),
            f"{answers.num_equal} of {answers.num_answers}",
            str(answers.num_right),
        )
    return table


def _equality(step: Step) -> str:
    return (
        "all equal" if step.first_difference is None else f"differ at token {step.first_difference}"
    )


def _verdict(steps: list[Step], blended: list[Way]) -> str:
    exceptions = [
        f"that of {step.title}: its KV was stored with loss"
        for step in steps
        if step.first_difference is not None
    ]
    num_other = sum(way.answers.num_answers - way.answers.num_equal for way in blended)
    if num_other:
        exceptions.append(
            f"{num_other} of {sum(way.answers.num_answers for way in blended)} about documents in"
            " another order"
        )
    verdict = "Every answer equals the one without a cache, token for token"
    if exceptions:
        verdict += f", but {'; and '.join(exceptions)}"
    return f"{verdict}. No process is left."


def _moved(retrieved: int, stored: int) -> str:
    parts = [f"+{retrieved / MIB:.0f}"] if retrieved else []
    parts += [f"-{stored / MIB:.0f}"] if stored else []
    return " ".join(parts) or "0"
