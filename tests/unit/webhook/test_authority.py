"""The certificate that the webhook makes for itself: good for whom it should be, renewed in
time, trusted without a gap.
"""

from __future__ import annotations

import datetime
import ssl

import pytest
from cryptography import x509
from lmcache_webhook.certificate import (
    AUTHORITY_DAYS,
    Lifetime,
    Material,
    renew,
    why_renew,
)

NAMES = ["hook.lmcache.svc", "hook.lmcache.svc.cluster.local"]
LIFETIME = Lifetime(datetime.timedelta(days=90), datetime.timedelta(days=30))
NOW = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)


@pytest.fixture(scope="module")
def material() -> Material:
    return renew(None, NAMES, LIFETIME, NOW)


def later(days: int) -> datetime.datetime:
    return NOW + datetime.timedelta(days=days)


def test_a_new_one_is_good(material: Material) -> None:
    assert why_renew(material, NAMES, LIFETIME, NOW) is None
    assert why_renew(material, NAMES, LIFETIME, later(59)) is None
    certificate = x509.load_pem_x509_certificate(material.certificate)
    names = certificate.extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    ).value.get_values_for_type(x509.DNSName)
    assert names == NAMES
    assert certificate.not_valid_after_utc == later(90)
    ssl.create_default_context(cadata=material.authorities.decode())


def test_when_a_new_one_is_needed(material: Material) -> None:
    assert why_renew(None, NAMES, LIFETIME, NOW) == "there is none"
    assert "ends at 2030-04-01" in (why_renew(material, NAMES, LIFETIME, later(61)) or "")
    assert "is for hook.lmcache.svc" in (
        why_renew(material, ["other.lmcache.svc"], LIFETIME, NOW) or ""
    )
    other = renew(None, NAMES, LIFETIME, NOW)
    mixed = Material(material.authorities, material.authority_key, other.certificate, other.key)
    assert "cannot be used (InvalidSignature)" in (why_renew(mixed, NAMES, LIFETIME, NOW) or "")
    swapped = Material(
        material.authorities, material.authority_key, material.certificate, other.key
    )
    assert why_renew(swapped, NAMES, LIFETIME, NOW) == "the old one has another key"
    broken = Material(b"", b"", b"x", b"y")
    assert "cannot be used" in (why_renew(broken, NAMES, LIFETIME, NOW) or "")
    assert why_renew(renew(broken, NAMES, LIFETIME, NOW), NAMES, LIFETIME, NOW) is None


def test_renewal_keeps_the_authority(material: Material) -> None:
    renewed = renew(material, NAMES, LIFETIME, later(61))
    assert renewed.authorities == material.authorities
    assert renewed.authority_key == material.authority_key
    assert renewed.certificate != material.certificate
    assert renewed.key != material.key
    assert why_renew(renewed, NAMES, LIFETIME, later(61)) is None


def test_a_new_authority_is_trusted_beside_the_old_one(material: Material) -> None:
    end = AUTHORITY_DAYS - 60
    renewed = renew(material, NAMES, LIFETIME, later(end))
    authorities = x509.load_pem_x509_certificates(renewed.authorities)
    assert len(authorities) == 2
    assert authorities[1] == x509.load_pem_x509_certificate(material.authorities)
    assert why_renew(renewed, NAMES, LIFETIME, later(end)) is None
    again = renew(renewed, NAMES, LIFETIME, later(2 * end))
    assert len(x509.load_pem_x509_certificates(again.authorities)) == 2, (
        "the one that has ended is gone"
    )


def test_an_authority_without_its_key_signs_nothing(material: Material) -> None:
    other = renew(None, NAMES, LIFETIME, NOW)
    renewed = renew(
        Material(material.authorities, other.authority_key, b"", b""), NAMES, LIFETIME, NOW
    )
    assert renewed.authority_key not in (material.authority_key, other.authority_key)
    assert why_renew(renewed, NAMES, LIFETIME, NOW) is None
