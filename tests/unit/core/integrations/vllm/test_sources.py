"""Where a hit came from, in vLLM's words."""

from __future__ import annotations

import importlib

from lmcache_core.record import StagedFrom

from tests.fixtures.fake_vllm import NEW, OLD, imported_connector

NAME = "lmcache_core.integrations.vllm.stats"


def test_tiers_have_vllms_names() -> None:
    with imported_connector(NEW):
        sources = importlib.import_module(NAME)
        assert sources.HIT_SOURCE.value == "host"
        origins = {
            StagedFrom.HOT: 8,
            StagedFrom.DISK: 16,
            StagedFrom.PEER: 24,
            StagedFrom.REMOTE: 32,
            StagedFrom.OTHER: 40,
        }
        told = {source.value: count for source, count in sources.hit_sources(origins).items()}
        assert told == {"host": 8, "disk": 16, "p2p": 24, "external_unspecified": 72}
        assert sources.hit_sources({}) == {}


def test_a_source_of_a_later_sidecar_has_no_name() -> None:
    """One unknown number in an answer must not end the engine."""
    with imported_connector(NEW):
        sources = importlib.import_module(NAME)
        told = {
            source.value: count
            for source, count in sources.hit_sources({6: 8, 255: 8, 1: 4}).items()
        }
        assert told == {"external_unspecified": 16, "host": 4}


def test_before_032_there_are_none() -> None:
    with imported_connector(OLD):
        assert importlib.import_module(NAME).HIT_SOURCE is None
