import base64
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmcache_core.errors import AuthenticationError, ConfigError
from lmcache_core.security import (
    Ticket,
    TicketKeyFile,
    TicketSigner,
    TicketVerifier,
    parse_ticket_keys,
    read_ticket_keys,
)

from tests.fixtures.held_clock import HeldClock, watch_files_by

KEYS = {"k1": b"1" * 32, "k2": b"2" * 32}
NOW = 1_700_000_000_000
SECRET = base64.b64encode(b"s" * 32).decode()
KEY_TEXTS = {key_id: base64.b64encode(secret).decode() for key_id, secret in KEYS.items()}


def clock_at(now_ms: int) -> Callable[[], int]:
    return lambda: now_ms


def make(active: str = "k1", instance: str = "peer-a", expires: int = NOW + 10_000) -> str:
    return TicketSigner({active: KEYS[active]}).sign(
        instance=instance, requester="peer-b", tenant="prod", expires_unix_ms=expires
    )


def verifier(now_ms: int = NOW, **options: int) -> TicketVerifier:
    return TicketVerifier(KEYS, "peer-a", clock_at(now_ms), **options)


def test_golden_ticket_is_signed_and_read() -> None:
    assert verifier().verify(make()) == Ticket("k1", "peer-a", "peer-b", "prod", NOW + 10_000)
    assert (
        make()
        == "v1.laJrMaZwZWVyLWGmcGVlci1ipHByb2TPAAABi8_ljxA.qRou_emqshTEsaglpaXSFXREGGUqtnRmjHCI1dz0aeg"  # noqa: E501
    )


CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_+/=.~ \n\0é"


def test_every_replaced_character_is_refused() -> None:
    """Also one that only changes unused bits of base64."""
    text, check = make(), verifier()
    for at in range(len(text)):
        for char in CHARACTERS:
            if char != text[at]:
                with pytest.raises(AuthenticationError):
                    check.verify(text[:at] + char + text[at + 1 :])


@given(
    st.text(max_size=200)
    | st.binary(max_size=100).map(lambda b: "v1." + base64.urlsafe_b64encode(b).decode() + ".x")
)
def test_hostile_text_is_refused(text: str) -> None:
    with pytest.raises(AuthenticationError):
        verifier().verify(text)


def test_expired_ticket_is_refused_behind_the_skew() -> None:
    text = make(expires=NOW)
    assert verifier(NOW + 1_999).verify(text)
    with pytest.raises(AuthenticationError, match="expired"):
        verifier(NOW + 2_000).verify(text)
    with pytest.raises(AuthenticationError, match="expired"):
        verifier(NOW, skew_ms=0).verify(text)


def test_ticket_for_another_instance_is_refused() -> None:
    with pytest.raises(AuthenticationError, match="another instance"):
        verifier().verify(make(instance="peer-c"))


@pytest.mark.parametrize(
    ("field", "value"),
    [("instance", "a/b"), ("requester", ""), ("tenant", "Prod"), ("expires_unix_ms", 0)],
)
def test_signer_refuses_malformed_fields(field: str, value: str | int) -> None:
    fields = {"instance": "a", "requester": "b", "tenant": "t", "expires_unix_ms": NOW} | {
        field: value
    }
    with pytest.raises(ValueError):
        TicketSigner(KEYS).sign(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "keys",
    [{}, {"k1": b"short"}, {"k 1": b"1" * 32}, {f"k{i}": b"1" * 32 for i in range(17)}],
    ids=["none", "short", "id", "too many"],
)
def test_keys_out_of_bounds_are_refused(keys: dict[str, bytes]) -> None:
    with pytest.raises(ConfigError):
        TicketSigner(keys)
    with pytest.raises(ConfigError):
        TicketVerifier(keys, "peer-a")


def test_key_entries_keep_their_order() -> None:
    keys = parse_ticket_keys([f"new:{SECRET}", f" old:{SECRET.rstrip('=')} "])
    assert list(keys) == ["new", "old"]
    assert keys["new"] == keys["old"] == b"s" * 32
    tricky = bytes(range(240, 256)) + b"\xff" * 16
    assert parse_ticket_keys([f"k:{base64.urlsafe_b64encode(tricky).decode()}"]) == {"k": tricky}


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        ([], "no key"),
        (["k1"], "id:base64"),
        (["k1:%%%%"], "not base64"),
        (["k1:A"], "not base64"),
        (["k1:QUJD"], "has 3 bytes"),
        ([f":{SECRET}"], "id matches"),
        ([f"k1:{SECRET}", f"k1:{SECRET}"], "twice"),
        ([f"k{i}:{SECRET}" for i in range(17)], "more than 16"),
    ],
)
def test_key_entry_that_is_none_is_refused_and_not_shown(
    entries: list[str], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint) as error:
        parse_ticket_keys(entries)
    assert SECRET not in str(error.value)


def test_key_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# rotated in spring\n\nk2:{SECRET}\n  k1:{SECRET}\n")
    assert list(read_ticket_keys(path)) == ["k2", "k1"]
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not ASCII"):
        read_ticket_keys(path)
    path.write_text("#" * 20_000)
    with pytest.raises(ConfigError, match="larger"):
        read_ticket_keys(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_ticket_keys(tmp_path / "absent")


def test_keys_rotate_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the documented order: the new key everywhere, then in front at the broker, then the old
    one away.
    """
    clock = HeldClock()
    watch_files_by(clock, monkeypatch)
    broker, peer = tmp_path / "broker", tmp_path / "peer"
    for path in (broker, peer):
        path.write_text(f"k1:{KEY_TEXTS['k1']}\n")
    keys = TicketKeyFile(broker), TicketKeyFile(peer)
    signer, verifier = TicketSigner(keys[0]), TicketVerifier(keys[1], "peer-a", clock_at(NOW))

    def signed() -> str:
        clock.now_s += 1.0
        return signer.sign(
            instance="peer-a", requester="peer-b", tenant="acme", expires_unix_ms=NOW + 1000
        )

    old = signed()
    assert verifier.verify(old).key_id == "k1"
    peer.write_text(f"k1:{KEY_TEXTS['k1']}\nk2:{KEY_TEXTS['k2']}\n")
    assert verifier.verify(signed()).key_id == "k1"
    broker.write_text(f"k2:{KEY_TEXTS['k2']}\nk1:{KEY_TEXTS['k1']}\n")
    assert verifier.verify(signed()).key_id == "k2"
    assert verifier.verify(old).key_id == "k1"
    peer.write_text(f"k2:{KEY_TEXTS['k2']}\n")
    assert verifier.verify(signed()).key_id == "k2"
    with pytest.raises(AuthenticationError, match="key is unknown"):
        verifier.verify(old)
    peer.write_text("k2:short")
    for _ in range(3):
        assert verifier.verify(signed()).key_id == "k2"
    assert caplog.text.count("keeping what was read before: files=ticket keys") == 1
    assert "short" not in caplog.text
    assert KEY_TEXTS["k2"] not in caplog.text + repr(keys)


def test_verifier_needs_an_instance_id() -> None:
    with pytest.raises(ValueError):
        TicketVerifier(KEYS, "not an id")
