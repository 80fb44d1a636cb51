"""Speeds, break-even, tables and plot, from figures written by hand."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from tests.bench import codec_report, report
from tests.bench.codec_break_even import break_even, gain
from tests.bench.codec_plot import draw
from tests.bench.codec_quality import Change, QualityRow
from tests.bench.codec_sizes import SizeRow
from tests.bench.codec_speed import Pace, SpeedRow, Subject, measure

SVG = "{http://www.w3.org/2000/svg}"


def pace(rate, first=None):
    seconds = tuple(1.0 / (rate * factor) for factor in (0.9, 1.0, 1.2))
    return Pace(10**9, seconds, (0.1, 0.1, 0.1), seconds if first is None else first.seconds)


def row(name="coder", encode=0.5, decode=2.0, ratio=4.0, threads=1):
    return SpeedRow(name, threads, ratio, pace(encode), pace(decode))


def test_a_pace_is_a_median_and_its_shares_are_of_pairs():
    single, double = pace(1.0), pace(1.8, pace(1.0))
    assert single.rate == pytest.approx(1.0)
    assert single.spread == pytest.approx((0.9, 1.2))
    assert single.copy_share == pytest.approx(0.1)
    assert double.scaling == pytest.approx(1.8)
    assert single.scaling == 1.0


def test_subjects_are_timed_in_turn_and_the_first_round_does_not_count():
    calls = []
    subjects = [
        Subject(
            "a",
            threads,
            1000,
            250,
            lambda threads=threads: calls.append(("encode", threads)),
            lambda: calls.append(("decode", 0)),
        )
        for threads in (1, 2)
    ]
    rows = measure(subjects, rounds=2)
    assert calls[:6] == [("encode", 1), ("encode", 2)] * 3
    assert [len(found.encode.seconds) for found in rows] == [2, 2]
    assert [(found.num_threads, found.ratio) for found in rows] == [(1, 4.0), (2, 4.0)]
    assert rows[0].encode.seconds == rows[1].encode.first


def test_at_the_break_even_a_load_takes_as_long_as_raw():
    coder = row()
    at = break_even(coder)
    assert at.load == pytest.approx(1.5)
    assert gain(coder, at.load, is_pipelined=False) == pytest.approx(1.0)
    assert at.load_pipelined == pytest.approx(2.0)
    assert gain(coder, at.load_pipelined, is_pipelined=True) == pytest.approx(1.0)
    assert gain(coder, 0.001, is_pipelined=True) == pytest.approx(4.0)
    assert gain(coder, 1.0, is_pipelined=False) < gain(coder, 1.0, is_pipelined=True)
    # 1 / B = 1 / (4 B) + 1 / 0.5 + 1 / 2
    assert at.transfer == pytest.approx(0.75 / 2.5)
    assert at.transfer_pipelined == pytest.approx(0.5)


def test_what_does_not_shrink_never_pays():
    at = break_even(row(ratio=1.0))
    assert (at.load, at.load_pipelined, at.transfer, at.transfer_pipelined) == (0.0, 0.0, 0.0, 0.0)


def test_the_plot_is_svg_with_two_curves_a_row_and_a_dot_at_each_break_even():
    rows = [row("one & all"), row("two", decode=0.001)]
    text = draw(rows, "title <here>")
    tree = ElementTree.fromstring(text)
    assert len(tree.findall(f"{SVG}polyline")) == 4
    assert len(tree.findall(f"{SVG}circle")) == 2  # the second row's lie outside
    words = [element.text for element in tree.iter(f"{SVG}text")]
    assert "title <here>" in words
    assert "one & all: 4.00 times smaller" in words
    assert text == draw(rows, "title <here>")
    with pytest.raises(ValueError, match="7 curves"):
        draw([row()] * 7, "too many")


def test_tables_have_a_cell_for_each_heading():
    yardstick = row("yardstick", encode=0.05, decode=0.1)
    speeds = [
        row(),
        SpeedRow("coder", 2, 4.0, pace(0.9, pace(0.5)), pace(3.0, pace(2.0))),
        yardstick,
    ]
    quality = QualityRow("coder", 2.5, 1.09, Change(0.0123, 0.001), 0.004, 0.97)
    sections = [
        codec_report.quality([quality], {"coder": "payload"}),
        codec_report.sizes([SizeRow("made up", 7, 1000, {"coder": 0.25, "other": 5.0})]),
        codec_report.speeds(speeds, [yardstick]),
        codec_report.break_evens(speeds),
    ]
    for section in sections:
        assert all(len(cells) == len(section.headings) for cells in section.rows)
    assert sections[0].rows[0] == (
        "coder",
        "2.500",
        "1.0900",
        "+1.230 ± 0.100",
        "0.00400",
        "97.00%",
        "payload",
    )
    assert sections[1].rows[0] == ("7", "1,000", "0.250", "5.000", "made up")
    assert [cells[-2:] for cells in sections[2].rows] == [
        ("10.0 / 20.0", ""),
        ("18.0 / 30.0", "1.80 / 1.50"),
        ("", ""),
    ]
    assert sections[3].rows[0][2:4] == ("12.00", "16.00")


def test_only_the_named_section_is_rewritten(tmp_path):
    document = tmp_path / "figures.md"
    document.write_text(
        "a\n<!-- one: begin -->\nold\n<!-- one: end -->\nb\n<!-- two: begin -->\nkept\n<!-- two:"
        " end -->\nc\n"
    )
    report.rewrite(document, "one", "machine", ["table"])
    assert (
        document.read_text()
        == "a\n<!-- one: begin -->\nmachine\n\ntable\n<!-- one: end -->\nb\n<!-- two: begin"
        " -->\nkept\n<!-- two: end -->\nc\n"
    )
    with pytest.raises(ValueError, match="three"):
        report.rewrite(document, "three", "machine", [])
