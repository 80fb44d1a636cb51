"""The tables of options in the services' READMEs, with the defaults that the services take."""

from __future__ import annotations

import re

import pytest
from lmcache_broker.settings import BrokerSettings
from lmcache_lookup.settings import LookupSettings
from lmcache_servicekit.settings import ServiceSettings
from lmcache_storage.settings import StorageSettings
from pydantic_core import PydanticUndefined

from tests.unit.docs.pages import ROOT

SERVICES: dict[str, type[ServiceSettings]] = {
    "cache_storage": StorageSettings,
    "lookup": LookupSettings,
    "p2p_broker": BrokerSettings,
}
ROW = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \| (.*?) ?\|.*\|$", re.MULTILINE)


def listed(service: str) -> dict[str, str]:
    """Options and defaults as the page has them; several may share a line."""
    section = (
        (ROOT / "services" / service / "README.md")
        .read_text(encoding="utf-8")
        .partition("\n## Options\n")[2]
    )
    found = {}
    for names, defaults in ROW.findall(section):
        options = re.findall(r"`(\w+)`", names)
        values = [each.strip() for each in defaults.split(",")] if defaults else [""]
        assert len(values) in (1, len(options)), names
        found |= dict(
            zip(
                options,
                values if len(values) == len(options) else values * len(options),
                strict=True,
            )
        )
    return found


def spelt(value: object) -> str:
    if value in (None, "", PydanticUndefined):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) and value < 1e6 else str(value)


@pytest.mark.parametrize("service", SERVICES)
def test_defaults_are_those_that_the_service_takes(service: str) -> None:
    fields = SERVICES[service].model_fields
    for name, default in listed(service).items():
        assert name in fields, f"{service} has no option {name}"
        if not default.startswith("`lm://<"):  # worked out of others at the start
            assert default.strip("`") == spelt(fields[name].default), name


@pytest.mark.parametrize("service", SERVICES)
def test_every_option_of_its_own_is_listed(service: str) -> None:
    own = set(SERVICES[service].model_fields) - set(ServiceSettings.model_fields)
    assert own - set(listed(service)) == set()
