"""docs/configuration.md is what the settings of engine and services say."""

from __future__ import annotations

import pytest
from lmcache_core.config.engine_config import OPTIONS
from lmcache_servicekit.options import options_of
from lmcache_servicekit.settings import ServiceSettings

from tests.unit.docs.configuration import PAGE, SERVICES, page


def test_the_page_is_what_make_config_docs_writes() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "out of date: run `make config-docs`"


@pytest.mark.parametrize("settings", SERVICES.values(), ids=SERVICES)
def test_every_option_is_on_the_page_and_has_a_meaning(settings: type[ServiceSettings]) -> None:
    options = {option.name: option for option in options_of(settings)}
    assert options.keys() >= settings.model_fields.keys()
    text = PAGE.read_text(encoding="utf-8")
    for option in options.values():
        assert option.meaning, option.name
        assert f"| `{option.name}` |" in text


def test_what_engine_and_services_both_have_is_described_once() -> None:
    """Three names mean something else to an engine."""
    differing = {
        option.name
        for settings in SERVICES.values()
        for option in options_of(settings)
        if option.name in OPTIONS and OPTIONS[option.name].meaning not in option.meaning
    }
    assert differing == {"remote_url", "distributed_url", "tier_timeout_s"}
