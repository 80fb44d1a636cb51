"""`lmcachectl status` of a whole cluster of real services, also when one of them hangs, lies, or
wants another token.
"""

from __future__ import annotations

import os
import signal

import pytest
import yaml

from tests.fixtures.ctl import Ctl, SmallCluster
from tests.fixtures.http_server import Handler, served
from tests.fixtures.kv import CHUNK_SIZE, empty_kv, random_kv, tokens_of
from tests.fixtures.sidecar import engine_at

NUM_CHUNKS = 3
NAMES = ["lookup", "broker", "storage-0", "storage-1", "sidecar"]


def test_everything_is_shown_in_every_format(cluster: SmallCluster) -> None:
    tokens = tokens_of(NUM_CHUNKS * CHUNK_SIZE)
    with engine_at(cluster.directory / "s.sock") as engine:
        engine.store(tokens, kvcaches=random_kv(len(tokens)))
        engine.retrieve(tokens, kvcaches=empty_kv(len(tokens)))
        ctl = cluster.ctl()
        found = ctl.json("status")
        table = ctl.text("status")
    by_kind = {one["kind"] + " " + one["name"]: one for one in found["services"]}
    assert [one["state"] for one in found["services"]] == ["ok"] * len(NAMES)
    assert found["totals"] | {"used_bytes": 0, "capacity_bytes": 0} == {
        "num_services": 5,
        "num_well": 5,
        "versions": {"0.1.0": 5},
        "hit_ratio": 1.0,
        "hit_ratio_by_tier": {"memory": 1.0},
        "used_bytes": 0,
        "capacity_bytes": 0,
    }
    sidecar = by_kind["sidecar sidecar"]
    assert sidecar["traffic"]["num_wanted"] == sidecar["traffic"]["num_found"] >= NUM_CHUNKS
    assert sidecar["facts"] == {"engines": "1", "registered": "yes", "models": "org/model"}
    assert sidecar["tiers"][0]["name"] == "memory"
    assert sidecar["tiers"][0]["num_chunks"] == NUM_CHUNKS
    assert abs(sidecar["clock_skew_s"]) <= 1.5
    assert found["totals"]["capacity_bytes"]["storage/disk"] > 0
    [broker] = [one for one in found["services"] if one["kind"] == "broker"]
    assert sorted(link["id"] for link in broker["links"]) == ["sidecar", "storage-0", "storage-1"]
    assert "services   5 of 5 are healthy" in table
    assert "100.0%" in table
    assert yaml.safe_load(ctl.text("status", "-o", "yaml"))["totals"]["versions"] == {"0.1.0": 5}


def test_names_are_as_commands_take_them(cluster: SmallCluster) -> None:
    named = cluster.ctl().text("status", "-o", "name").splitlines()
    assert [name.partition("/")[0] for name in named[:2]] == ["lookup", "broker"]
    assert sorted(named[2:-1]) + named[-1:] == [
        "storage/storage-0",
        "storage/storage-1",
        "sidecar/sidecar",
    ]
    assert "hit" in cluster.ctl().text("status", "-o", "wide")


def test_a_hanging_replica_delays_no_other(cluster: SmallCluster) -> None:
    pid = cluster.services["storage-1"].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        found = cluster.ctl().json("status", "--timeout", "5", code=1)
    finally:
        os.kill(pid, signal.SIGCONT)
    states = {one["name"]: (one["state"], one["problem"]) for one in found["services"]}
    assert states["storage-0"][0] == "ok"
    hung = [one for one in found["services"] if one["state"] != "ok"]
    assert [one["kind"] for one in hung] == ["storage"]
    assert hung[0]["problem"] == (
        "no answer within 5 s: it hangs, or the network drops its packets; its address is from"
        " --storage-url"
    )


def test_a_wrong_token_is_reported_and_not_shown(cluster: SmallCluster) -> None:
    told = cluster.ctl("wrong-token").text("status", code=1)
    assert told.count("it refuses the token") == len(NAMES)
    assert "services   5 of 5 are healthy" in told, (
        "a token of ours says nothing about their health"
    )
    assert "nobody-knows" not in told
    found = cluster.ctl("wrong-token").json("status", code=1)
    assert {one["state"] for one in found["services"]} == {"ok"}, (
        "whether it is well needs no token"
    )


def without_token(cluster: SmallCluster, **environ: str) -> Ctl:
    ctl = cluster.ctl(environ=environ)
    return Ctl(
        [option for option in ctl.options if not option.startswith("--token-file")], ctl.environ
    )


def test_health_needs_no_token_and_the_rest_names_it(cluster: SmallCluster) -> None:
    ctl = without_token(cluster)
    found = ctl.json("status")
    assert [(one["state"], one["problem"], one["needs_token"]) for one in found["services"]] == [
        ("ok", "", True)
    ] * len(NAMES)
    assert found["totals"]["num_well"] == len(NAMES)
    table = " ".join(ctl.text("status").split())
    assert "services 5 of 5 are healthy" in table
    assert "5 of 5 services require a token" in table
    assert "--token-file FILE or LMCACHE_CTL_TOKEN" in table
    assert "refuses" not in table
    diagnosis = ctl.json("doctor")
    [told] = [one for one in diagnosis["findings"] if one["check"] == "token"]
    assert (diagnosis["num_errors"], told["level"], told["where"]) == (
        0,
        "warning",
        "5 of 5 services",
    )


def test_versions_of_all_and_of_none(cluster: SmallCluster) -> None:
    found = without_token(cluster).json("version")
    assert found["client"].startswith("0.")
    assert [one["version"] for one in found["services"]] == [found["client"]] * len(NAMES)
    nothing, plain = (
        "http://127.0.0.1:9",
        f"https://127.0.0.1:{cluster.services['lookup'].ports['port']}",
    )
    assert "cannot connect" in Ctl([f"--lookup-url={nothing}"]).text("version", code=1)
    assert "it answers without TLS" in Ctl([f"--lookup-url={plain}"]).text("version", code=1)


def test_a_command_without_its_token_names_the_options(cluster: SmallCluster) -> None:
    told = without_token(cluster).text("lookup", "status", code=1)
    assert "it requires a token: give one with --token-file FILE or LMCACHE_CTL_TOKEN" in told


def test_a_variable_may_hold_the_token_itself(cluster: SmallCluster) -> None:
    token = (cluster.directory / "token").read_text().strip()
    found = without_token(cluster, LMCACHE_CTL_TOKEN=token).json("status")
    assert not any(one["needs_token"] for one in found["services"])
    wrong = cluster.ctl(environ={"LMCACHE_CTL_TOKEN": "nobody-knows-0123456789"})
    assert wrong.json("status")["totals"]["num_well"] == len(NAMES), (
        "an option stands before a variable"
    )
    bad = without_token(cluster, LMCACHE_CTL_TOKEN="nobody knows").text("status", code=2)
    assert "nobody knows" not in bad


def test_a_service_of_another_kind_is_not_taken_for_one(cluster: SmallCluster) -> None:
    [found] = Ctl([f"--storage-url={cluster.services['lookup'].url}"]).json("status", code=1)[
        "services"
    ]
    assert (found["state"], found["problem"]) == (
        "not ours",
        "it is lmcache-lookup: ask for a storage elsewhere",
    )


class Elsewhere(Handler):
    """An HTTP server that is none of ours."""

    def do_GET(self) -> None:
        self.send_error(404)


def test_another_http_server_is_not_ours() -> None:
    with served(Elsewhere) as url:
        [found] = Ctl([f"--storage-url={url}"]).json("status", code=1)["services"]
    assert found["state"] == "not ours"
    assert (
        found["problem"]
        == "something else listens there: it does not know /readyz; correct the address"
    )


def storage_that_answers(status: int) -> type[Handler]:
    """A cache_storage in good health whose other paths answer with that status."""
    bodies = {
        "/readyz": b'{"status": "ok", "checks": {}}',
        "/metrics": b'lmcache_build_info{service="lmcache-storage",version="0.1.0"} 1\n',
    }

    class Answers(Handler):
        def do_GET(self) -> None:
            body = bodies.get(self.path, b'{"title": "boom", "detail": "internal error"}')
            self.answer(200 if self.path in bodies else status, body)

    return Answers


@pytest.mark.parametrize(
    "environ", [{}, {"LMCACHE_CTL_TOKEN": "a-token-0123456789"}], ids=["no token", "a token"]
)
@pytest.mark.parametrize("status", [500, 404])
def test_a_service_that_fails_is_not_taken_for_one_that_wants_a_token(
    status: int, environ: dict[str, str]
) -> None:
    with served(storage_that_answers(status)) as url:
        ctl = Ctl([f"--storage-url={url}"], environ)
        told = ctl.text("status", code=1)
        [found] = ctl.json("status", code=1)["services"]
        diagnosis = ctl.json("doctor", code=1)
    assert (found["state"], found["problem"], found["needs_token"]) == (
        "degraded",
        "internal error",
        False,
    )
    assert "0 of 1 are healthy" in told
    assert "token" not in told
    errors = [
        (one["check"], one["what"]) for one in diagnosis["findings"] if one["level"] == "error"
    ]
    assert errors == [("ready", "internal error")]


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_of_a_caller_without_a_token_is_no_defect(status: int) -> None:
    with served(storage_that_answers(status)) as url:
        [found] = Ctl([f"--storage-url={url}"]).json("status")["services"]
        wrong = Ctl([f"--storage-url={url}"], {"LMCACHE_CTL_TOKEN": "a-token-0123456789"})
        told = wrong.json("status", code=1)["services"]
        diagnosis = wrong.json("doctor", code=1)
    assert (found["state"], found["problem"], found["needs_token"]) == ("ok", "", True)
    assert (told[0]["state"], told[0]["needs_token"]) == ("ok", False)
    assert [one["check"] for one in diagnosis["findings"] if one["level"] == "error"] == ["token"]


def test_nothing_at_the_default_ports_hints_at_the_cluster() -> None:
    told = " ".join(Ctl(["--timeout=1"]).text("status", code=1).split())
    assert "nothing answers at the default ports of this machine" in told
    assert "those of a cluster by --kubeconfig" in told
