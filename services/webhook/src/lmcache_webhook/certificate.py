"""`lmcache-webhook certificate`: creates the webhook's certificate unless there is a usable one,
keeps it in a Secret, and tells the API server which authority to trust.

Safe to run at any time: it leaves a valid certificate unchanged. It runs as a Job before an
installation or upgrade, because pods need their certificate, and after it, because only then is
there a configuration to update. A CronJob runs it periodically to renew the certificate.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import dataclasses
import datetime
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from lmcache_core.errors import ConfigError, LMCacheError, UnavailableError
from urllib3.exceptions import HTTPError

AUTHORITY_DAYS: Final = 3650
CLOCK_SKEW: Final = datetime.timedelta(minutes=10)
"""Certificates are good that much before they are made: clocks of nodes differ."""
MAX_AUTHORITIES: Final = 4
"""The one that signs, and earlier ones whose certificates may still be served somewhere."""
MAX_ATTEMPTS: Final = 3
MAX_DAYS: Final = 3650
EXIT_UNAVAILABLE: Final = 1
EXIT_BAD_CONFIG: Final = 2
CALL_TIMEOUT_S: Final = 10
PARTS: Final = ("ca.crt", "ca.key", "tls.crt", "tls.key")
"""Names in the Secret of the parts of a `Material`, in its order."""
LABELS: Final = {
    "app.kubernetes.io/managed-by": "lmcache-webhook",
    "app.kubernetes.io/part-of": "lmcache",
}
_NOT_FOUND: Final = 404
_CONFLICT: Final = 409


@dataclass(frozen=True, slots=True)
class Material:
    """PEM texts.

    Attributes:
        authorities: Certificates to trust, the signing one first.
        authority_key: Key of the signing authority.
        certificate: The webhook's certificate.
        key: Its key.
    """

    authorities: bytes
    authority_key: bytes
    certificate: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class Lifetime:
    """How long a certificate is valid, and how long before its end it is replaced."""

    valid: datetime.timedelta
    renew_before: datetime.timedelta


def why_renew(
    material: Material | None, names: Sequence[str], lifetime: Lifetime, now: datetime.datetime
) -> str | None:
    """Return why a new certificate is needed; None if the old one is still usable.

    Args:
        material: What there is.
        names: Names that the certificate must cover.
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
    """Return a new certificate, from the same authority if that outlives it, so that clients need
    not learn a new one.

    Args:
        material: What there is.
        names: Names that the certificate must cover, the best known first.
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
    """Return key and certificates of the current authority, if it is valid until then."""
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


class LostRaceError(UnavailableError):
    """The Secret was written concurrently: read it again."""


class CertificateStore:
    """A Secret and a MutatingWebhookConfiguration of the cluster that this pod runs in.

    Args:
        namespace: Of the Secret.
        secret: Its name.
        configuration: Name of the webhook's configuration.
        api_url: Use this API server instead of the one of this pod's cluster.

    Raises:
        ConfigError: No address was given, and this is not a pod of a cluster.
    """

    def __init__(
        self, namespace: str, secret: str, configuration: str, api_url: str | None = None
    ) -> None:
        options = client.Configuration()
        if api_url is None:
            try:
                config.load_incluster_config(options)
            except config.ConfigException as exc:
                raise ConfigError(f"this is not a pod of a cluster ({exc}); set --api-url") from exc
        else:
            options.host = api_url
        options.retries = 0  # Kubernetes retries the Job that runs this
        api = client.ApiClient(options)
        self._core = client.CoreV1Api(api)
        self._admission = client.AdmissionregistrationV1Api(api)
        self._namespace = namespace
        self._secret = secret
        self._configuration = configuration

    def read(self) -> tuple[Material | None, str]:
        """Return the certificate and the Secret's version; a Secret that lacks a part has no
        certificate.

        Raises:
            UnavailableError: The API server refuses, or cannot be reached.
        """
        found = _call(self._core.read_namespaced_secret, self._secret, self._namespace)
        if found is None:
            return None, ""
        data = found.data or {}
        try:
            material = Material(*(base64.b64decode(data[name]) for name in PARTS))
        except (KeyError, binascii.Error):
            return None, found.metadata.resource_version
        return material, found.metadata.resource_version

    def write(self, material: Material, version: str) -> None:
        """Replace that version of the certificate; if it is empty, create the Secret.

        Raises:
            LostRaceError: The Secret has another version now.
            UnavailableError: As `read`.
        """
        parts = zip(PARTS, dataclasses.astuple(material), strict=True)
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": self._secret, "namespace": self._namespace, "labels": LABELS},
            "type": "Opaque",
            "data": {name: base64.b64encode(data).decode() for name, data in parts},
        }
        if version:
            body["metadata"]["resourceVersion"] = version  # type: ignore[index]
            written = _call(
                self._core.replace_namespaced_secret, self._secret, self._namespace, body
            )
        else:
            written = _call(self._core.create_namespaced_secret, self._namespace, body)
        if written is None:
            raise LostRaceError("the Secret, or its namespace, has been removed in the meantime")

    def trust(self, authorities: bytes) -> int | None:
        """Tell the API server which authorities to trust.

        Returns:
            How many webhooks were updated; None if there is no configuration yet.

        Raises:
            UnavailableError: As `read`.
        """
        found = _call(self._admission.read_mutating_webhook_configuration, self._configuration)
        if found is None:
            return None
        bundle = base64.b64encode(authorities).decode()
        operations: list[dict[str, Any]] = []
        for index, webhook in enumerate(found.webhooks or []):
            if webhook.client_config.ca_bundle == bundle:
                continue
            # Test the name first: a webhook may have been added or removed since the read.
            operations.append(
                {"op": "test", "path": f"/webhooks/{index}/name", "value": webhook.name}
            )
            operations.append(
                {"op": "add", "path": f"/webhooks/{index}/clientConfig/caBundle", "value": bundle}
            )
        if operations:
            _call(
                self._admission.patch_mutating_webhook_configuration,
                self._configuration,
                operations,
            )
        return len(operations) // 2


def _call(method: Callable[..., Any], *arguments: Any) -> Any:
    """Return the answer to one call of the API; None if there is no such object."""
    try:
        return method(*arguments, _request_timeout=CALL_TIMEOUT_S)
    except ApiException as exc:
        if exc.status == _NOT_FOUND:
            return None
        if exc.status == _CONFLICT:
            raise LostRaceError("the Secret has changed in the meantime") from exc
        raise UnavailableError(
            f"the API server answers {exc.status} {exc.reason} to {method.__name__}"
        ) from exc
    except HTTPError as exc:
        raise UnavailableError(f"the API server cannot be reached: {type(exc).__name__}") from exc


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Returns:
        0 if there is a valid certificate; 1 if the API server refuses or cannot be reached; 2 for
        bad arguments.
    """
    options = _parse(argv)
    names = [
        f"{options.service}.{options.namespace}.svc",
        f"{options.service}.{options.namespace}.svc.cluster.local",
    ]
    lifetime = Lifetime(
        datetime.timedelta(days=options.valid_days), datetime.timedelta(days=options.renew_days)
    )
    try:
        store = CertificateStore(
            options.namespace, options.secret, options.configuration, options.api_url
        )
        ensure_certificate(store, names, lifetime)
    except ConfigError as exc:
        _tell(str(exc))
        return EXIT_BAD_CONFIG
    except LMCacheError as exc:
        _tell(str(exc))
        return EXIT_UNAVAILABLE
    return 0


def ensure_certificate(store: CertificateStore, names: Sequence[str], lifetime: Lifetime) -> None:
    """Ensure that a store has a certificate with enough lifetime left, and that the API server
    trusts it.

    Args:
        store: Where it is kept.
        names: Names that it must cover.
        lifetime: How long it is valid, and when it is renewed.

    Raises:
        UnavailableError: The store cannot be used, or loses every race against other writers.
    """
    for is_last in (*[False] * (MAX_ATTEMPTS - 1), True):
        material, version = store.read()
        now = datetime.datetime.now(datetime.UTC)
        reason = why_renew(material, names, lifetime, now)
        if reason is None:
            break
        material = renew(material, names, lifetime, now)
        try:
            store.write(material, version)
        except LostRaceError:
            if is_last:
                raise
            continue
        _tell(f"a new certificate for {names[0]}: {reason}")
        break
    assert material is not None
    num_told = store.trust(material.authorities)
    if num_told is None:
        _tell("no webhook configuration yet: a later run will update it")
    elif num_told:
        _tell(f"{num_told} webhooks of the configuration now trust the authority")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="lmcache-webhook certificate", allow_abbrev=False, description=__doc__
    )
    parser.add_argument("--namespace", required=True, help="of Secret and Service")
    parser.add_argument("--secret", required=True, help="Secret that the certificate is kept in")
    parser.add_argument(
        "--service", required=True, help="Service of the webhook, which the certificate is for"
    )
    parser.add_argument(
        "--configuration",
        required=True,
        help="MutatingWebhookConfiguration that is told whom to trust",
    )
    parser.add_argument(
        "--valid-days", type=int, default=90, help="how long a certificate is good (default: 90)"
    )
    parser.add_argument(
        "--renew-days",
        type=int,
        default=30,
        help="how long before its end it is replaced (default: 30)",
    )
    parser.add_argument("--api-url", help="API server, instead of the one of this pod's cluster")
    options = parser.parse_args(argv)
    if not 1 <= options.renew_days < options.valid_days <= MAX_DAYS:
        parser.error(
            f"--renew-days {options.renew_days} and --valid-days {options.valid_days}: 1 <= renew <"
            f" valid <= {MAX_DAYS}"
        )
    return options


def _tell(line: str) -> None:
    sys.stdout.write(f"lmcache-webhook certificate: {line}\n")
    sys.stdout.flush()
