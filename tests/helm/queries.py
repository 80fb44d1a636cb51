"""PromQL expressions taken apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import promql_parser

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

GRAFANA = {"$__rate_interval": "5m", "$__range": "1h", "$release": "inference/cache"}


@dataclass(frozen=True)
class Selected:
    """One series selector.

    Attributes:
        metric: Its metric.
        matchers: Label -> the value or pattern that is wanted.
    """

    metric: str
    matchers: Mapping[str, str]


def without_variables(expression: str) -> str:
    """An expression of a dashboard as Prometheus gets it."""
    for variable, value in GRAFANA.items():
        expression = expression.replace(variable, value)
    return expression


def selectors(expression: str) -> list[Selected]:
    """All series that an expression asks for; raises ValueError where it is no PromQL."""
    return list(_walk(promql_parser.parse(expression)))


def _walk(node: object) -> Iterator[Selected]:
    if isinstance(node, promql_parser.VectorSelector):
        yield Selected(
            node.name or "", {matcher.name: matcher.value for matcher in node.matchers.matchers}
        )
        return
    for name in ("expr", "lhs", "rhs", "param", "vector_selector"):
        child = getattr(node, name, None)
        if child is not None:
            yield from _walk(child)
    for child in getattr(node, "args", None) or ():
        yield from _walk(child)
