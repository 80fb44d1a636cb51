"""PromQL evaluated on series that a test writes down: as much of it as the chart's alerts use.
What is not known raises.
"""

from __future__ import annotations

import itertools
import operator
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import promql_parser as p

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

STALE_S: Final = 300.0
NAME: Final = "__name__"
Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]

_SERIES: Final = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?")
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')
_VALUES: Final = re.compile(
    r"(?P<first>\d+(?:\.\d+)?)(?:(?P<step>[+-]\d+(?:\.\d+)?)?x(?P<times>\d+))?|(?P<gap>_)(?:x(?P<gaps>\d+))?"
)
_COMPARISONS: Final[dict[str, Callable[[float, float], bool]]] = {
    "==": operator.eq, "!=": operator.ne, ">": operator.gt,
    "<": operator.lt, ">=": operator.ge, "<=": operator.le,
}  # fmt: skip
_ARITHMETIC: Final[dict[str, Callable[[float, float], float]]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}


@dataclass
class Series:
    """Samples by series, one each `interval_s` seconds from 0 on.

    Attributes:
        interval_s: Between two samples, and between two evaluations of a rule.
        samples: Labels, with the name among them -> time and value.
    """

    interval_s: float = 60.0
    samples: dict[Labels, list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, series: str, values: str, common: Mapping[str, str]) -> None:
        """Take one series in the notation of promtool: `name{label="value"}`, and `0+10x60 _x5
        600` for its samples.
        """
        found = _SERIES.fullmatch(series)
        assert found, series
        labels = {NAME: found["name"], **common, **dict(_LABEL.findall(found["labels"] or ""))}
        self.samples[frozenset(labels.items())] = [
            (i * self.interval_s, value)
            for i, value in enumerate(_expanded(values))
            if value is not None
        ]

    def first_firing(self, expression: str, for_s: float, until_s: float) -> dict[Labels, float]:
        """When each alert that fires by then begins to fire: what Prometheus does with `expr`
        and `for`.
        """
        tree, pending, firing = p.parse(expression), dict[Labels, float](), dict[Labels, float]()
        now = 0.0
        while now <= until_s:
            active = self._evaluate(tree, now)
            assert isinstance(active, dict), "an alert's expression is a vector"
            pending = {labels: pending.get(labels, now) for labels in map(_nameless, active)}
            for labels, since in pending.items():
                if now - since >= for_s:
                    firing.setdefault(labels, now)
            now += self.interval_s
        return firing

    def _evaluate(self, node: Any, now: float) -> Vector | float:
        if isinstance(node, p.NumberLiteral):
            return float(node.val)
        if isinstance(node, p.ParenExpr):
            return self._evaluate(node.expr, now)
        if isinstance(node, p.VectorSelector):
            assert node.offset is None
            assert node.at is None
            return {
                labels: seen[-1][1]
                for labels, seen in self._within(node, now - STALE_S, now).items()
            }
        if isinstance(node, p.AggregateExpr):
            return self._aggregated(node, now)
        if isinstance(node, p.Call):
            return self._called(node, now)
        assert isinstance(node, p.BinaryExpr), f"{type(node).__name__} is not known here"
        return _combined(node, self._evaluate(node.lhs, now), self._evaluate(node.rhs, now))

    def _within(
        self, selector: Any, begin: float, end: float
    ) -> dict[Labels, list[tuple[float, float]]]:
        found = {}
        for labels, samples in self.samples.items():
            named = dict(labels)
            if named[NAME] == selector.name and all(
                _matches(one, named.get(one.name, "")) for one in selector.matchers.matchers
            ):
                seen = [sample for sample in samples if begin < sample[0] <= end]
                if seen:
                    found[labels] = seen
        return found

    def _aggregated(self, node: Any, now: float) -> Vector:
        inner = self._evaluate(node.expr, now)
        assert isinstance(inner, dict)
        assert node.modifier is not None
        assert node.modifier.type == p.AggModifierType.By
        groups: dict[Labels, list[float]] = {}
        for labels, value in inner.items():
            groups.setdefault(_only(labels, node.modifier.labels), []).append(value)
        gather = {"sum": sum, "count": len, "max": max, "min": min}[str(node.op)]
        return {labels: float(gather(values)) for labels, values in groups.items()}

    def _called(self, node: Any, now: float) -> Vector:
        if node.func.name == "histogram_quantile":
            quantile, buckets = (self._evaluate(one, now) for one in node.args)
            assert isinstance(quantile, float)
            assert isinstance(buckets, dict)
            return _quantiles(quantile, buckets)
        (matrix,) = node.args
        assert node.func.name in ("rate", "increase"), f"{node.func.name} is not known here"
        width_s = matrix.range.total_seconds()
        grown = {}
        for labels, seen in self._within(matrix.vector_selector, now - width_s, now).items():
            if len(seen) >= 2:
                values = [value for _, value in seen]
                whole = sum(b - a if b >= a else b for a, b in itertools.pairwise(values))
                # Carried on to the edges of the range, as Prometheus does, but by no more than half
                # a step where the series begins or ends.
                spanned = seen[-1][0] - seen[0][0]
                covered = min(width_s, spanned + self.interval_s)
                grown[_nameless(labels)] = (
                    whole * covered / spanned / (width_s if node.func.name == "rate" else 1.0)
                )
        return grown


def _expanded(values: str) -> list[float | None]:
    found: list[float | None] = []
    for part in values.split():
        one = _VALUES.fullmatch(part)
        assert one, part
        if one["gap"]:
            found += [None] * int(one["gaps"] or 1)
        else:
            found += [
                float(one["first"]) + i * float(one["step"] or 0)
                for i in range(int(one["times"] or 0) + 1)
            ]
    return found


def _matches(matcher: Any, value: str) -> bool:
    if matcher.op in (p.MatchOp.Equal, p.MatchOp.NotEqual):
        return bool((matcher.value == value) == (matcher.op == p.MatchOp.Equal))
    return (re.fullmatch(matcher.value, value) is not None) == (matcher.op == p.MatchOp.Re)


def _nameless(labels: Labels) -> Labels:
    return frozenset(one for one in labels if one[0] != NAME)


def _only(labels: Labels, names: Sequence[str]) -> Labels:
    return frozenset(one for one in labels if one[0] in names)


def _combined(node: Any, left: Vector | float, right: Vector | float) -> Vector | float:
    op, matching = str(node.op), node.modifier.matching if node.modifier else None
    if op in ("and", "or"):
        assert isinstance(left, dict)
        assert isinstance(right, dict)
        there = {_key(labels, matching) for labels in (left if op == "or" else right)}
        if op == "and":
            return {
                labels: value for labels, value in left.items() if _key(labels, matching) in there
            }
        return left | {
            labels: value for labels, value in right.items() if _key(labels, matching) not in there
        }
    if isinstance(left, float) and isinstance(right, float):
        return _computed(op, left, right)
    if isinstance(left, float):
        assert isinstance(right, dict)
        assert op not in _COMPARISONS
        return {_nameless(labels): _computed(op, left, value) for labels, value in right.items()}
    pairs = (
        [(labels, value, right) for labels, value in left.items()]
        if isinstance(right, float)
        else _paired(left, right, matching)
    )
    if op in _COMPARISONS:
        return {labels: a for labels, a, b in pairs if _COMPARISONS[op](a, b)}
    return {_nameless(labels): _computed(op, a, b) for labels, a, b in pairs}


def _paired(left: Vector, right: Vector, matching: Any) -> list[tuple[Labels, float, float]]:
    others = {_key(labels, matching): value for labels, value in right.items()}
    assert len(others) == len(right), "several series on the right for one on the left"
    assert len({_key(labels, matching) for labels in left}) == len(left), (
        "several series on the left for one on the right"
    )
    return [
        (labels, value, others[_key(labels, matching)])
        for labels, value in left.items()
        if _key(labels, matching) in others
    ]


def _key(labels: Labels, matching: Any) -> Labels:
    if matching is None:
        return _nameless(labels)
    assert matching.type == p.LabelModifierType.Include, "ignoring() is not known here"
    return _only(labels, matching.labels)


def _computed(op: str, left: float, right: float) -> float:
    if op == "/":
        return left / right if right else float("nan")
    return _ARITHMETIC[op](left, right)


def _quantiles(quantile: float, buckets: Vector) -> Vector:
    """By straight lines within buckets; no more than the last bound that is finite."""
    by_series: dict[Labels, list[tuple[float, float]]] = {}
    for labels, value in buckets.items():
        bound = float(dict(labels)["le"].replace("+Inf", "inf"))
        by_series.setdefault(frozenset(one for one in labels if one[0] != "le"), []).append(
            (bound, value)
        )
    found = {}
    for labels, counted in by_series.items():
        counted.sort()
        wanted = quantile * counted[-1][1]
        i = next(i for i, (_, value) in enumerate(counted) if value >= wanted)
        low, below = counted[i - 1] if i else (0.0, 0.0)
        high, upto = counted[i]
        found[labels] = (
            low
            if high == float("inf") or upto == below
            else low + (high - low) * (wanted - below) / (upto - below)
        )
    return found
