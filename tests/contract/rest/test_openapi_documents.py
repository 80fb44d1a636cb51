"""What services answer is what their OpenAPI documents say: generated calls to real processes,
valid and invalid ones.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from lmcache_core.lookup.messages import MSGPACK
from schemathesis import GenerationMode
from schemathesis.transport.serialization import Binary

from tests.fixtures.sample_service import ADMIN_TOKEN, write_tokens
from tests.fixtures.service_process import running_service

CALLS = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
MAX_PATH_CHARS = 32_000
RECORD = "application/vnd.lmcache.record"
SERVICES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "LOOKUP": ("lmcache_lookup", {}),
    "BROKER": ("lmcache_broker", {"TICKET_KEYS_FILE": "keys"}),
    "STORAGE": ("lmcache_storage", {"LM_PORT": "0", "MEMORY_GB": "0.03"}),
    "WEBHOOK": ("lmcache_webhook", {"SIDECAR_IMAGE": "s:1", "PAYLOAD_IMAGE": "p:1"}),
}


@pytest.fixture(scope="module", autouse=True)
def formats() -> None:
    """What documents can only name: chunk ids and records are bytes."""
    schemathesis.openapi.format("binary", st.binary(min_size=16, max_size=16))
    schemathesis.openapi.media_type(RECORD, st.binary(max_size=600))
    schemathesis.serializer(MSGPACK)(lambda context, value: msgspec.msgpack.encode(packable(value)))


def packable(value: Any) -> Any:
    """Bytes as bytes; numbers that MessagePack has not got as floats."""
    if isinstance(value, Binary):
        return value.data
    if isinstance(value, list):
        return [packable(item) for item in value]
    if isinstance(value, dict):
        return {name: packable(item) for name, item in value.items()}
    return float(value) if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64 else value


@pytest.fixture(scope="module", params=SERVICES)
def document(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """The document of a running service, as it serves it."""
    package, options = SERVICES[request.param]
    tmp_path = tmp_path_factory.mktemp(package)
    (tmp_path / "keys").write_text(f"k1:{base64.b64encode(b'k' * 32).decode()}\n")
    own = {name: value.replace("keys", str(tmp_path / "keys")) for name, value in options.items()}
    own |= {"PORT": "0", "AUTH_TOKENS_FILE": str(write_tokens(tmp_path / "tokens.yaml"))}
    environ = {f"LMCACHE_{request.param}_{name}": value for name, value in own.items()}
    with running_service(package, tmp_path, environ) as service:
        config = schemathesis.Config()
        config.projects.default.generation.update(
            with_security_parameters=False,
            allow_extra_parameters=False,
            exclude_header_characters="".join(map(chr, (*range(32), 127))),
        )
        if request.param != "LOOKUP":
            # Their documents do not say all: a key has a structure, a tier belongs to each holder.
            # Those are refused as problems, too.
            config.projects.default.checks.positive_data_acceptance.expected_statuses += [
                "400",
                "413",
                "422",
                "507",
            ]
        yield schemathesis.openapi.from_url(f"{service.url}/openapi.json", config=config)
        assert "Traceback" not in service.output


# Valid calls come last: one of them drains the service.
@pytest.mark.parametrize("mode", [GenerationMode.NEGATIVE, GenerationMode.POSITIVE])
def test_answers_are_as_documented(document: Any, mode: GenerationMode) -> None:
    num_operations = 0
    media_types: set[str | None] = set()
    # A service that drains refuses other calls with 503, rightly.
    for operation in sorted(
        (found.ok() for found in document.get_all_operations()), key=lambda one: "drain" in one.path
    ):
        if mode is GenerationMode.NEGATIVE and not (
            operation.body or operation.query or operation.path_parameters or operation.headers
        ):
            continue  # nothing of it can be wrong
        num_operations += 1

        @CALLS
        @given(case=operation.as_strategy(generation_mode=mode))
        def call(case: schemathesis.Case) -> None:
            # A longer request line is refused before any of our code hears of it, as plain text.
            assume(
                sum(len(quote(str(value))) for value in (case.path_parameters or {}).values())
                < MAX_PATH_CHARS
            )
            media_types.add(case.media_type)
            answer = case.call_and_validate(headers={"Authorization": f"Bearer {ADMIN_TOKEN}"})
            # Not only by `default`.
            assert str(answer.status_code) in case.operation.definition.raw["responses"]

        call()
    assert num_operations >= (1 if document.title == "lmcache-webhook" else 4)
    assert "application/json" in media_types
    assert (MSGPACK in media_types) == (document.title == "lmcache-lookup")
