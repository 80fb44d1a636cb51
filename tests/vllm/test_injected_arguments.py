"""What the injection webhook puts into a command line is what this vLLM takes for the
connector's configuration.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.fixtures.pods import CONNECTOR_IN_A_SCRIPT, EVENTS_IN_A_SCRIPT

WEBHOOK = Path(__file__).resolve().parents[2] / "services" / "webhook" / "src"


@pytest.fixture(autouse=True)
def webhook(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not installed beside vLLM, and nothing of it needs to be."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(WEBHOOK)])


def parsed(words: list[str]) -> Any:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    return parser.parse_args(["--model", "m", *words])


def without_its_id(config: Any) -> dict[str, Any]:
    """Of each configuration the same, but for what vLLM draws for each."""
    return {name: value for name, value in vars(config).items() if name != "engine_id"}


@pytest.mark.smoke
def test_the_words_for_scripts_and_the_argument_are_the_same() -> None:
    from lmcache_webhook.injection.command_line import plan_arguments
    from lmcache_webhook.injection.pod import Container
    from lmcache_webhook.injection.sidecar import SOCKET_PATH, transfer_config

    arguments = plan_arguments(
        Container(name="vllm", command=["vllm", "serve", "m"]), transfer_config()
    )
    in_json = parsed(list(arguments)).kv_transfer_config
    in_words = parsed(CONNECTOR_IN_A_SCRIPT.split()).kv_transfer_config
    assert without_its_id(in_json) == without_its_id(in_words)
    assert in_words.kv_connector == "LMCacheConnector"
    assert in_words.kv_connector_module_path == "lmcache_core.integrations.vllm"
    assert in_words.kv_load_failure_policy == "recompute"
    assert in_words.kv_connector_extra_config == {"sidecar_socket": SOCKET_PATH}


@pytest.mark.smoke
def test_words_for_scripts_make_vllm_publish() -> None:
    """At its own port, and the connector is told so as a boolean."""
    arguments = parsed([*CONNECTOR_IN_A_SCRIPT.split(), *EVENTS_IN_A_SCRIPT])
    assert arguments.kv_transfer_config.kv_connector_extra_config["kv_events"] is True
    events = arguments.kv_events_config
    assert (events.enable_kv_cache_events, events.publisher) == (True, "zmq")
    assert events.endpoint == "tcp://*:5557"
