"""What the doctor says of the states of services, looked at together, and of a Redis server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lmcache_ctl.doctor import machine
from lmcache_ctl.doctor.configuration import ConfigFile, Loaded
from lmcache_ctl.doctor.findings import Level
from lmcache_ctl.doctor.machine import check_machine
from lmcache_ctl.doctor.redis_server import check_info
from lmcache_ctl.doctor.running import check_services
from lmcache_ctl.services import Kind
from lmcache_ctl.states import Check, Link, ServiceStatus, State, Tier
from lmcache_sidecar.settings import SidecarSettings


def state(kind: Kind, name: str, **more: Any) -> ServiceStatus:
    known: dict[str, Any] = {
        "state": State.OK,
        "version": "0.1.0",
        "latency_ms": 1.0,
        "clock_skew_s": 0.0,
        "facts": {"a": "b"},
    }
    return ServiceStatus(kind, name, f"http://{name}", **(known | more))


def wrong(*states: ServiceStatus) -> list[tuple[Level, str, str]]:
    return [
        (one.level, one.check, one.what)
        for one in check_services(states)
        if one.level is not Level.OK
    ]


def test_nothing_is_wrong() -> None:
    assert wrong(state(Kind.LOOKUP, "l"), state(Kind.STORAGE, "s", clock_skew_s=1.0)) == []


@pytest.mark.parametrize(
    ("versions", "level"),
    [
        (("0.1.0", "0.1.3"), Level.WARNING),
        (("0.1.0", "0.2.0"), Level.WARNING),
        (("0.1.0", "0.2.0", "0.3.0"), Level.ERROR),
        (("0.9.0", "1.0.0"), Level.ERROR),
        (("0.1.0", "unknown"), Level.ERROR),
    ],
)
def test_versions_apart(versions: tuple[str, ...], level: Level) -> None:
    [(found, check, what)] = wrong(
        *(
            state(Kind.STORAGE, f"s{number}", version=version)
            for number, version in enumerate(versions)
        )
    )
    assert (found, check) == (level, "versions")
    assert all(version in what for version in versions)


def test_clocks_apart() -> None:
    slow, fast = (
        state(Kind.STORAGE, "slow", clock_skew_s=-3.0),
        state(Kind.STORAGE, "fast", clock_skew_s=4.0),
    )
    assert wrong(slow, fast) == [
        (Level.WARNING, "clock", "storage fast is 7 s before storage slow")
    ]
    assert wrong(state(Kind.STORAGE, "one", clock_skew_s=-300.0)) == [], (
        "the clock of the asking machine does not count"
    )


def test_a_slow_answer_is_no_clock_that_is_off() -> None:
    """The header may have been written at any time while the answer was waited for."""
    here, slow = (
        state(Kind.STORAGE, "here"),
        state(Kind.STORAGE, "slow", clock_skew_s=3.0, latency_ms=4000.0),
    )
    assert wrong(here, slow) == []
    off = state(Kind.STORAGE, "off", clock_skew_s=9.0, latency_ms=4000.0)
    assert wrong(here, off) == [(Level.WARNING, "clock", "storage off is 9 s before storage here")]


def test_a_broker_that_does_not_know_a_sidecar() -> None:
    link = Link("a", "sidecar", "lm://h:1", "", "", 0.0, False, 0)
    sidecars = [state(Kind.SIDECAR, name, facts={"registered": "yes"}) for name in "ab"]
    [(level, check, what)] = wrong(state(Kind.BROKER, "b", links=[link]), *sidecars)
    assert (level, check, what) == (Level.WARNING, "peers", "does not know b")


STORAGE, PEERS = Tier("storage"), Tier("peers")


def engines(
    name: str, *roles: str, tiers: tuple[Tier, ...] = (), model: str = "m"
) -> ServiceStatus:
    """Return a sidecar whose engines have these roles, with these tiers besides its memory."""
    return state(Kind.SIDECAR, name, roles={model: list(roles)}, tiers=[Tier("memory"), *tiers])


def broker(name: str, *peers: str) -> ServiceStatus:
    links = [Link(peer, "sidecar", "lm://h:1", "", "", 0.0, False, 0) for peer in peers]
    return state(Kind.BROKER, name, links=links)


@pytest.mark.parametrize("of_prefill", [(), (STORAGE,), (PEERS,)])
@pytest.mark.parametrize("role", ["kv_producer", "kv_both"])
def test_prefill_and_decode_without_a_common_tier(role: str, of_prefill: tuple[Tier, ...]) -> None:
    prefill, decode = engines("p", role, tiers=of_prefill), engines("d", "kv_consumer")
    what = "engines here decode m and compute every prompt themselves: no tier in common with p"
    assert wrong(prefill, decode) == [(Level.WARNING, "hand-over", what)]


@pytest.mark.parametrize("tier", [STORAGE, PEERS])
def test_prefill_and_decode_with_a_common_tier(tier: Tier) -> None:
    prefill, decode = (
        engines(name, role, tiers=(tier,))
        for name, role in (("p", "kv_producer"), ("d", "kv_consumer"))
    )
    assert wrong(prefill, decode) == []
    assert wrong(prefill, decode, broker("b", "p", "d")) == []
    apart = wrong(prefill, decode, broker("b", "p"), broker("c", "d"))
    assert len(apart) == (tier is PEERS), "peers are found through a broker that knows both"


def test_prefill_and_decode_of_different_models() -> None:
    prefill, decode = engines("p", "kv_producer"), engines("d", "kv_consumer", model="other")
    assert wrong(prefill, decode) == []
    assert wrong(decode) == [], "prefill engines may be where doctor was not sent"


def test_prefill_and_decode_at_one_sidecar() -> None:
    """Without a tier in common, a request finds its prompt only if both its engines are of one
    sidecar.
    """
    roles = ("kv_consumer", "kv_producer")
    assert wrong(engines("a", *roles)) == []
    found = wrong(engines("a", *roles), engines("b", *roles))
    assert found == [
        (
            Level.WARNING,
            "hand-over",
            f"engines here decode m and find nothing of what {other} computes: no tier in common",
        )
        for other in "ba"
    ]
    assert wrong(*(engines(name, *roles, tiers=(PEERS,)) for name in "ab")) == []


def test_what_is_not_ready() -> None:
    redis = [Check("index", False, "no answer within 1 s")]
    assert wrong(state(Kind.LOOKUP, "l", state=State.UNREADY, checks=redis))[0][:2] == (
        Level.ERROR,
        "ready",
    )
    assert wrong(state(Kind.LOOKUP, "l", state=State.DEGRADED, checks=redis))[0][:2] == (
        Level.WARNING,
        "ready",
    )
    assert wrong(state(Kind.SIDECAR, "s", facts={"registered": "no"}))[0][:2] == (
        Level.WARNING,
        "ready",
    )


FINE: dict[str, Any] = {
    "redis_version": "7.0.15",
    "role": "master",
    "maxmemory": 1000,
    "used_memory": 10,
    "maxmemory_policy": "noeviction",
}


def levels(**info: Any) -> list[tuple[Level, str]]:
    return [
        (one.level, one.what)
        for one in check_info("here", FINE | info)
        if one.level is not Level.OK
    ]


def test_a_redis_server_that_is_fine() -> None:
    assert levels() == []


@pytest.mark.parametrize(
    ("info", "level", "said"),
    [
        ({"redis_version": "6.0.16"}, Level.ERROR, "version 6.0.16"),
        ({"role": "slave"}, Level.ERROR, "it is a slave"),
        ({"maxmemory_policy": "allkeys-lru"}, Level.ERROR, "maxmemory-policy is allkeys-lru"),
        ({"maxmemory": 0}, Level.WARNING, "maxmemory is not set"),
        ({"used_memory": 950}, Level.WARNING, "95% of maxmemory"),
        ({"aof_enabled": 1}, Level.NOTE, "appendonly"),
        (
            {"rdb_last_bgsave_status": "err", "rdb_changes_since_last_save": 3},
            Level.ERROR,
            "snapshot failed",
        ),
    ],
)
def test_a_redis_server_that_is_not(info: dict[str, Any], level: Level, said: str) -> None:
    [(found, what)] = levels(**info)
    assert found is level
    assert said in what


def rdma_ports(root: Path, **states: str) -> None:
    """Devices as the kernel shows them: a port each, and whether it has a GID."""
    for device, state in states.items():
        port = root / device / "ports" / "1"
        (port / "gids").mkdir(parents=True)
        (port / "state").write_text(f"4: {state.removesuffix('-')}\n")
        gid = "0000:0000:0000:0000" if state.endswith("-") else "fe80:0000:0000:0001"
        (port / "gids" / "0").write_text(f"{gid}\n")


def levels_of_mover(tmp_path: Path) -> list[str]:
    """What is wrong with the machine for a sidecar that has a mover."""
    settings = SidecarSettings(
        arena_gb=1.0, peer_transport="nixl", mover_socket=tmp_path / "mover.sock"
    )
    found = check_machine([Loaded(ConfigFile("sidecar", tmp_path / "s.yaml"), settings)])
    return [one.level for one in found if one.check == "mover" and one.level is not Level.OK]


@pytest.mark.parametrize(
    ("states", "levels"),
    [
        ({}, ["warning"]),
        ({"mlx5_0": "ACTIVE"}, []),
        ({"mlx5_0": "ACTIVE", "mlx5_1": "DOWN"}, ["warning"]),
        ({"mlx5_0": "ACTIVE-"}, ["error"]),
    ],
)
def test_ports_of_a_mover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: dict[str, str], levels: list[str]
) -> None:
    monkeypatch.setattr(machine, "RDMA_DEVICES", tmp_path / "infiniband")
    monkeypatch.setattr(machine, "_may_lock", lambda: True)
    rdma_ports(tmp_path / "infiniband", **states)
    assert levels_of_mover(tmp_path) == levels


@pytest.mark.parametrize("may_lock", [False, True])
def test_memory_that_a_mover_may_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_lock: bool
) -> None:
    monkeypatch.setattr(machine, "RDMA_DEVICES", tmp_path / "infiniband")
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (1 << 16, 1 << 16))
    status = tmp_path / "status"
    status.write_text(f"Name:\tx\nCapEff:\t{(1 << 14) * may_lock:016x}\n")
    monkeypatch.setattr(machine, "STATUS", status)
    rdma_ports(tmp_path / "infiniband", mlx5_0="ACTIVE")
    assert levels_of_mover(tmp_path) == ["error"] * (not may_lock)
