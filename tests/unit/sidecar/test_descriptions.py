"""Descriptions of how clients name KV: their order and their bounds."""

from __future__ import annotations

import pytest
from lmcache_servicekit.errors import ConflictError
from lmcache_sidecar.descriptions import MAX_DESCRIPTIONS, MAX_LEFT_BEHIND, Descriptions

from tests.fixtures.sidecar_app import describe


def names_of(descriptions: Descriptions, model: str | None = None) -> list[str]:
    return [known.model_name for known in descriptions.of(model)]


def test_client_displaces_only_its_own_descriptions() -> None:
    descriptions = Descriptions()
    descriptions.note(describe("precious"), "a")
    for number in range(3 * MAX_DESCRIPTIONS):
        descriptions.note(describe(f"flood-{number}"), "b")
    assert names_of(descriptions)[:3] == ["flood-191", "precious", "flood-190"]
    assert names_of(descriptions, "precious") == ["precious"]
    assert len(descriptions) == 1 + MAX_DESCRIPTIONS
    assert len(descriptions.said_by("b")) == len(names_of(descriptions)) == MAX_DESCRIPTIONS


def test_latest_description_comes_first_and_none_twice() -> None:
    descriptions = Descriptions()
    for client, model in ("a", "1"), ("b", "2"), ("c", "2"), ("a", "3"), ("b", "4"):
        descriptions.note(describe(model), client)
    assert names_of(descriptions) == ["4", "3", "2", "1"]
    descriptions.note(describe("1"), "a")
    assert names_of(descriptions) == ["1", "4", "2", "3"]


def test_some_descriptions_of_former_clients_are_kept() -> None:
    descriptions = Descriptions()
    descriptions.note(describe("here"), "a")
    for client in range(2 * MAX_DESCRIPTIONS // MAX_LEFT_BEHIND):
        for number in range(2 * MAX_LEFT_BEHIND):
            descriptions.note(describe(f"{client}-{number}"), client)
        descriptions.left(client)
    assert len(descriptions) == 1 + MAX_DESCRIPTIONS
    assert names_of(descriptions)[:3] == ["here", "7-31", "7-30"]
    assert "4-16" in names_of(descriptions, "4-16")
    assert descriptions.said_by(7) == ()
    with pytest.raises(
        ConflictError, match="no engine of the model '3-31' has connected; known: 'here', '7-31'"
    ):
        descriptions.of("3-31")
