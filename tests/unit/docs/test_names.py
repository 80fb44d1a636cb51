"""What the documents name is there: variables, files, metrics, calls, values of the chart,
sections.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from lmcache_broker.settings import BrokerSettings
from lmcache_core.config import OPTIONS
from lmcache_core.config.sources import CONFIG_FILE_ENV, IGNORED_ENV_NAMES
from lmcache_ctl.options import VARIABLES
from lmcache_lookup.settings import LookupSettings
from lmcache_sidecar.settings import SidecarSettings
from lmcache_storage.settings import StorageSettings
from lmcache_webhook.settings import WebhookSettings

from tests.helm.tools.describe_values import resolved
from tests.unit.docs.pages import FENCE, PAGES, ROOT, commands, name_of, spans

SETTINGS = (BrokerSettings, LookupSettings, SidecarSettings, StorageSettings, WebhookSettings)
SCHEMA = json.loads((ROOT / "helm/lmcache/values.schema.json").read_text(encoding="utf-8"))
VARIABLE = re.compile(r"\bLMCACHE_[A-Z0-9_]*[A-Z0-9]\b")
FOLDERS = (
    "docs/",
    "helm/",
    "services/",
    "libs/",
    "tests/",
    "docker/",
    "kernels/",
    "lmcache_core/",
    "ci/",
)
BASES = (ROOT, ROOT / "libs/lmcache_core/src", ROOT / "helm/lmcache")
METRIC = re.compile(r"\blmcache_[a-z0-9_]+_(?:total|bytes|seconds|info|chunks|up)\b")
CALL = re.compile(
    r"((?:GET|PUT|POST|DELETE|HEAD)(?:[ ,]+(?:GET|PUT|POST|DELETE|HEAD))*) (/v1/[^\s?]+)"
)
VALUE = re.compile(r"([a-zA-Z]+(?:\.[A-Za-z_]+)+)(?:(?:=|: )\S+)?")
QUOTED = re.compile(r'(\w+)\.md[`)]*(?:\([^)]*\))?,? \(?"([^"]+)"')
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def alternatives(text: str) -> list[str]:
    """`a/{b,c}` and `a/b|c` written out; `a[/b]` without and with its end."""
    if match := re.search(r"\{([^{}]*[,|][^{}]*)\}|(\w+(?:\|\w+)+)|\[([^\[\]]*)\]", text):
        choices = (
            ("", match[3]) if match[3] is not None else re.split(r"[,|]", match[1] or match[2])
        )
        return [
            each
            for choice in choices
            for each in alternatives(text[: match.start()] + choice + text[match.end() :])
        ]
    return [text]


def known_variables() -> set[str]:
    services = {
        f"{each.env_prefix}{name}".upper()
        for each in SETTINGS
        for name in (*each.model_fields, "config")
    }
    engine = {f"LMCACHE_{name}".upper() for name in OPTIONS}
    return {CONFIG_FILE_ENV, *IGNORED_ENV_NAMES} | services | VARIABLES | engine


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_variable_is_an_option(page: Path) -> None:
    text = re.sub(r"LMCACHE_\w*(?:<|_…|…)", "", page.read_text(encoding="utf-8"))
    assert set(VARIABLE.findall(text)) - {"LMCACHE"} <= known_variables() | {
        each.env_prefix[:-1] for each in SETTINGS
    }


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_is_there(page: Path) -> None:
    for span in (each.strip() for text in spans(page) for each in re.split(r", (?![^{]*\})", text)):
        if span.startswith(FOLDERS) and " " not in span:
            for name in alternatives(span.partition(":")[0].partition("#")[0]):
                pattern = re.sub(r"<\w+>|…", "*", name).rstrip("/")
                assert any(any(base.glob(pattern)) for base in (*BASES, page.parent)), name


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_metric_is_one_that_is_documented(page: Path) -> None:
    known = set(METRIC.findall((ROOT / "docs/metrics.md").read_text(encoding="utf-8")))
    assert {name for span in spans(page) for name in METRIC.findall(span)} <= known


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_call_is_one_of_a_service(page: Path) -> None:
    written = (ROOT / "docs/api/README.md").read_text(encoding="utf-8")
    known = {
        (method, re.sub(r"\{\w+\}", "{}", path))
        for method, path in re.findall(r"^\| `(\w+) (\S+)` \|", written, re.MULTILINE)
    }
    for span in spans(page):
        for methods, path in CALL.findall(re.sub(r"\[\?.*?\]", "", span)):
            for each in alternatives(path):
                for method in re.findall("[A-Z]+", methods):
                    assert (method, re.sub(r"\{\w+\}", "{}", each)) in known, f"{method} {each}"


def has_value(schema: dict[str, Any], parts: list[str]) -> bool:
    """Whether the schema of the chart's values lets something be set there."""
    if not parts:
        return True
    schema = resolved(SCHEMA, schema)
    several = [each for kind in ("anyOf", "oneOf", "allOf") for each in schema.get(kind, ())]
    if any(has_value(each, parts) for each in several):
        return True
    if parts[0] in schema.get("properties", {}):
        return has_value(schema["properties"][parts[0]], parts[1:])
    others = schema.get("additionalProperties")
    return others is True or (isinstance(others, dict) and has_value(others, parts[1:]))


def values_named(page: Path) -> Iterator[str]:
    for span in spans(page):
        match = VALUE.fullmatch(span)
        if (
            match
            and match[1].partition(".")[0] in SCHEMA["properties"]
            and not re.search(r"\.(?:crt|key|py|md|json|yaml)$", match[1])
        ):
            yield match[1]
    for line in commands(page):
        yield from re.findall(r"--set(?:-\w+)? ([\w.]+)", line)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_value_is_one_of_the_chart(page: Path) -> None:
    assert [path for path in values_named(page) if not has_value(SCHEMA, path.split("."))] == []


def test_a_value_that_there_is_not_is_found() -> None:
    assert has_value(SCHEMA, ["webhook", "tenants"])
    assert has_value(SCHEMA, ["storage", "config", "log_level"])
    assert has_value(SCHEMA, ["storage", "podLabels"])
    assert has_value(SCHEMA, ["models", "any", "service", "type"])
    assert not has_value(SCHEMA, ["webhook", "tenant"])
    assert not has_value(SCHEMA, ["storage", "config", "memory"])
    assert not has_value(SCHEMA, ["models", "any", "servise"])


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_section_that_is_quoted_is_there(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for document, title in QUOTED.findall(text):
        places = [path for path in PAGES if path.name == f"{document}.md"] or [
            ROOT / "docs" / f"{document}.md"
        ]
        titles = {
            heading
            for path in places
            for heading in HEADING.findall(path.read_text(encoding="utf-8"))
        }
        assert any(heading == title or heading.startswith(f"{title}: ") for heading in titles), (
            f"{document}.md has no section {title}"
        )
    own = " ".join(HEADING.findall(text))
    for title in re.findall(r'(?<!md` )\("([A-Z][^"\n]+)"\)', text):
        assert title in own, f"no section {title} on this page"


def chart_blocks() -> Iterator[tuple[str, str]]:
    """YAML that begins like the chart's values, by page."""
    for page in PAGES:
        for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
            heredoc = re.search(r"<<'?YAML'?\n(.*?)^\s*YAML$", block, re.MULTILINE | re.DOTALL)
            text = block if language == "yaml" else heredoc[1] if heredoc else ""
            value = yaml.safe_load(text)
            if isinstance(value, dict) and set(value) <= set(SCHEMA["properties"]):
                yield name_of(page), text


def test_every_block_of_values_is_what_the_schema_lets_in() -> None:
    validator = jsonschema.Draft7Validator(SCHEMA)
    found = list(chart_blocks())
    assert len(found) > 3
    for page, text in found:
        assert [
            f"{page}: {error.message}" for error in validator.iter_errors(yaml.safe_load(text))
        ] == []
