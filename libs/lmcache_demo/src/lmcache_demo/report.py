"""Print what the demo has found."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lmcache_demo.blending import Way
from lmcache_demo.scenario import MAX_NEW_TOKENS, Step

MIB = 1 << 20
MILLISECONDS = 1000


def print_steps(steps: list[Step], blended: list[Way], console: Console) -> bool:
    """Print the tables and a verdict; return False when a step differs from its expectation."""

    def say(style: str, title: str, text: str = "") -> None:
        console.print(f"[{style}]{escape(title)}[/] {escape(text)}".rstrip(), highlight=False)

    console.print(_table_of_steps(steps))
    faults = [f"{step.title}: {fault}" for step in steps for fault in step.faults]
    faults += [fault for way in blended for fault in way.faults]
    for fault in faults:
        say("red", "NOT AS SAID", fault)
    if faults:
        return False
    say(
        "dim",
        "prompt, reused: tokens · MiB: + into the engine, - out of it · TTFT: ms to the first"
        " token",
    )
    console.print(_table_of_compression(steps))
    say(
        "dim",
        "MiB: raw · stored: MiB · bits: of an element · err: relative errors, the largest and"
        " root mean square",
    )
    for step in steps:
        if step.first_difference is not None:
            for who, answer in ((step.title, step.answer), ("without a cache", step.reference)):
                say("dim", f"{who} said:", repr(answer.text))
    console.print(_table_of_blending(blended))
    say(
        "dim",
        "anew: share that is recomputed · KL (nats), agree: of its certificate · as full, right:"
        " answers",
    )
    for way in blended:
        if way.answers.reason_against is not None:
            say("dim", f"{way.policy}, computed in full:", way.answers.reason_against)
    console.print(_verdict(steps, blended), highlight=False)
    return True


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table whose cells are never cut; all but the first and `from` are flush right."""
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    for number, heading in enumerate(headings):
        is_left = number == 0 or heading == "from"
        table.add_column(heading, justify="left" if is_left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _table_of_steps(steps: list[Step]) -> Table:
    rows = []
    for step in steps:
        answer, reference = step.answer, step.reference
        moved = [f"+{answer.retrieved_bytes / MIB:.0f}"] if answer.retrieved_bytes else []
        moved += [f"-{answer.stored_bytes / MIB:.0f}"] if answer.stored_bytes else []
        rows.append(
            (
                step.title,
                str(answer.num_prompt_tokens),
                str(answer.num_reused_tokens),
                step.place,
                " ".join(moved) or "0",
                f"{answer.time_to_first_token_s * MILLISECONDS:.0f}",
                f"{reference.time_to_first_token_s * MILLISECONDS:.0f}",
                "yes" if step.first_difference is None else "no" if step.may_differ else "NO",
            )
        )
    headings = ("engine, step", "prompt", "reused", "from", "MiB", "TTFT", "no cache", "equal")
    return _table("A prompt's KV, computed once", headings, rows)


def _table_of_compression(steps: list[Step]) -> Table:
    bits = steps[0].answer.kv_bits
    rows = []
    for step in steps:
        if step.compression is None:
            continue
        written, ratio = step.compression.written, step.compression.ratio
        errors = (written.max_error, written.rms_error)
        rows.append(
            (
                step.title,
                f"{written.raw_bytes / MIB:.1f}",
                f"{written.encoded_bytes / MIB:.1f}",
                f"{ratio:.2f}x",
                f"{step.answer.kv_bits / ratio:.2f}",
                *(f"{error:.1%}" if error else "0" for error in errors),
                "all equal"
                if step.first_difference is None
                else f"differ at token {step.first_difference}",
            )
        )
    headings = ("engine, serde", "MiB", "stored", "ratio", "bits", "max err", "rms err")
    title = f"The same KV, stored smaller (as it is: {bits} bits an element)"
    return _table(title, (*headings, f"{MAX_NEW_TOKENS} new tokens"), rows)


def _table_of_blending(blended: list[Way]) -> Table:
    rows = [
        (
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
        for way in blended
        for answers in (way.answers,)
    ]
    headings = ("policy", "anew", "KL", "agree", "gate", "prompts", "reused", "as full", "right")
    return _table("Documents stored one by one, read in another order", headings, rows)


def _verdict(steps: list[Step], blended: list[Way]) -> str:
    exceptions = [
        f"that of {step.title}: its KV was stored with loss"
        for step in steps
        if step.first_difference is not None
    ]
    num_answers = sum(way.answers.num_answers for way in blended)
    num_equal = sum(way.answers.num_equal for way in blended)
    if num_equal < num_answers:
        other = num_answers - num_equal
        exceptions.append(f"{other} of {num_answers} about documents in another order")
    verdict = "Every answer equals the one without a cache, token for token"
    if exceptions:
        verdict += f", but {'; and '.join(exceptions)}"
    return f"{verdict}. No process is left."
