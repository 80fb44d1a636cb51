"""An authority of the webhook's own, and the certificate that it signs. No I/O."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS: Final = 3650
CLOCK_SKEW: Final = datetime.timedelta(minutes=10)
"""Certificates are good that much before they are made: clocks of nodes differ."""
MAX_AUTHORITIES: Final = 4
"""The one that signs, and earlier ones whose certificates may still be served somewhere."""


@dataclass(frozen=True, slots=True)
class Material:
    """PEM texts.

    Attributes:
        authorities: Certificates to be trusted, the one that signs first.
        authority_key: Its key.
        certificate: What is served with.
        key: Its key.
    """

    authorities: bytes
    authority_key: bytes
    certificate: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class Lifetime:
    """How long a certificate is good, and how long before its end it is replaced."""

    valid: datetime.timedelta
    renew_before: datetime.timedelta


def why_renew(
    material: Material | None, names: Sequence[str], lifetime: Lifetime, now: datetime.datetime
) -> str | None:
    """Why a new certificate is needed; None where the old one will do.

    Args:
        material: What there is.
        names: What the certificate must be good for.
        lifetime: See there.
        now: With a time zone.
    """
    if material is None:
        return "there is none"
    try:
        certificate = x509.load_pem_x509_certificate(material.certificate)
        authority = x509.load_pem_x509_certificates(material.authorities)[0]
        key = serialization.load_pem_private_key(material.key, None)
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature) as exc:
        return f"the old one cannot be used ({type(exc).__name__})"
    if key.public_key() != certificate.public_key():
        return "the old one has another key"
    alternatives = certificate.extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    ).value.get_values_for_type(x509.DNSName)
    if not set(names) <= set(alternatives):
        return f"the old one is for {', '.join(alternatives)}"
    if certificate.not_valid_after_utc - now < lifetime.renew_before:
        return f"the old one ends at {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
    return None


def renew(
    material: Material | None, names: Sequence[str], lifetime: Lifetime, now: datetime.datetime
) -> Material:
    """Return a new certificate, from the same authority if that is good for longer, so that no one
    has to be told.

    Args:
        material: What there is.
        names: What the certificate is to be good for, the best known first.
        lifetime: See there.
        now: With a time zone.
    """
    signing = _signing(material, now + lifetime.valid)
    if signing is None:
        authority_key = ec.generate_private_key(ec.SECP256R1())
        authority = _sign_authority(authority_key, now)
        authorities = [authority, *_still_good(material, now)][:MAX_AUTHORITIES]
    else:
        authority_key, authorities = signing
        authority = authorities[0]
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _sign(key, authority, authority_key, names, lifetime, now)
    return Material(
        b"".join(one.public_bytes(serialization.Encoding.PEM) for one in authorities),
        _pem(authority_key),
        certificate.public_bytes(serialization.Encoding.PEM),
        _pem(key),
    )


def _signing(
    material: Material | None, until: datetime.datetime
) -> tuple[ec.EllipticCurvePrivateKey, list[x509.Certificate]] | None:
    """Key and certificates of the authority that there is, if it may sign something that is good
    until then.
    """
    if material is None:
        return None
    try:
        key = serialization.load_pem_private_key(material.authority_key, None)
        authorities = x509.load_pem_x509_certificates(material.authorities)
    except (ValueError, TypeError):
        return None
    is_its_key = (
        isinstance(key, ec.EllipticCurvePrivateKey)
        and key.public_key() == authorities[0].public_key()
    )
    if not is_its_key or authorities[0].not_valid_after_utc < until:
        return None
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key, authorities


def _still_good(material: Material | None, now: datetime.datetime) -> list[x509.Certificate]:
    try:
        found = [] if material is None else x509.load_pem_x509_certificates(material.authorities)
    except ValueError:
        return []
    return [one for one in found if one.not_valid_after_utc > now]


def _sign_authority(key: ec.EllipticCurvePrivateKey, now: datetime.datetime) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "lmcache-webhook authority")])
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _sign(
    key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    names: Sequence[str],
    lifetime: Lifetime,
    now: datetime.datetime,
) -> x509.Certificate:
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "lmcache-webhook")]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + lifetime.valid)
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()),
            critical=False,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
