"""The certificates: a model is blended only with a measurement of what blending costs its
answers.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import time
import uuid
from pathlib import Path
from typing import Final

import msgspec

from lmcache_core.errors import ConfigError

FORMAT_VERSION: Final = 1
MAX_CERTIFICATE_BYTES: Final = 1 << 16
MAX_CERTIFICATES_COMPARED: Final = 1000
"""Certificates of a folder to examine for the reason why none matches."""
ABANDONED_AFTER_S: Final = 3600.0
"""Age of a half-written file whose writer was killed."""


class BlendProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of blending that a certificate covers.

    Attributes:
        policy: Selects the tokens to recompute: one of `config.BLEND_POLICIES`.
        recompute_ratio: Their share, 0 … 1.
        separator: Token ids that end a document.
    """

    policy: str
    recompute_ratio: float
    separator: tuple[int, ...]

    def __str__(self) -> str:
        ids = " ".join(map(str, self.separator))
        return f"{self.policy}, {100 * self.recompute_ratio:g} % recomputed, separator {ids}"


class Quality(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measurements of blended prompts against full recompute, over the judged tokens after the
    documents.

    Attributes:
        num_tokens: Number of judged tokens.
        kl_nats: Mean Kullback-Leibler divergence of the next token's distribution, in nats.
        top1_agreement: Share of tokens with the same most probable successor.
        delta_loss_nats: Increase of the text's loss, in nats per token.
        delta_loss_error: Standard error of that, over prompts.
        reused_share: Share of the prompts' tokens whose KV was retrieved; if it is 0, nothing was
            blended.
    """

    num_prompts: int
    num_tokens: int
    kl_nats: float
    top1_agreement: float
    delta_loss_nats: float
    delta_loss_error: float
    reused_share: float


class QualityBounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds that a model must keep.

    Attributes:
        min_top1_agreement: Smallest share of equal first choices.
        max_delta_loss_nats: Largest increase of the loss; twice its standard error is added to the
            measurement.
    """

    max_kl_nats: float = 0.05
    min_top1_agreement: float = 0.95
    max_delta_loss_nats: float = 0.02


DEFAULT_BOUNDS: Final = QualityBounds()


class BlendCertificate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measurement, its subject, and whether it meets the bounds.

    Attributes:
        format_version: `FORMAT_VERSION`.
        model_name: Name under which the model's KV is shared.
        identity: Revision of the weights and the options that affect KV, as in
            `LMCacheEngineMetadata.revision`.
        core_version: Version of the library that measured.
    """

    format_version: int
    model_name: str
    identity: str
    profile: BlendProfile
    bounds: QualityBounds
    quality: Quality
    core_version: str

    @property
    def reasons(self) -> list[str]:
        """Why the model may not be blended with this profile; empty if it may. NaN is within no
        bounds.
        """
        bounds, quality = self.bounds, self.quality
        reasons = []
        if not quality.reused_share > 0:
            reasons.append("no KV was reused, so the measurement says nothing about blending")
        if not quality.kl_nats <= bounds.max_kl_nats:
            reasons.append(
                f"divergence of {quality.kl_nats:.4f} nats is above {bounds.max_kl_nats}"
            )
        if not quality.top1_agreement >= bounds.min_top1_agreement:
            reasons.append(
                f"{quality.top1_agreement:.1%} equal first choices are below"
                f" {bounds.min_top1_agreement:.0%}"
            )
        worst = quality.delta_loss_nats + 2 * quality.delta_loss_error
        if not worst <= bounds.max_delta_loss_nats:
            reasons.append(
                f"the loss may grow by {worst:.4f} nats a token, above {bounds.max_delta_loss_nats}"
            )
        return reasons


class CertificateFolder:
    """Certificates as JSON files, one for each model and profile.

    Args:
        folder: Their folder; created when the first is saved.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path_of(self, model_name: str, identity: str, profile: BlendProfile) -> Path:
        """Return the path of the certificate of a model and profile, whether or not it exists."""
        ratio = float(profile.recompute_ratio)  # 1 and 1.0 are the same ratio, but different texts
        named = msgspec.json.encode(
            (
                FORMAT_VERSION,
                model_name,
                identity,
                msgspec.structs.replace(profile, recompute_ratio=ratio),
            )
        )
        return self._folder / f"blend-{hashlib.sha256(named).hexdigest()[:32]}.json"

    def save(self, certificate: BlendCertificate) -> Path:
        """Store a certificate, replacing an older one, atomically even if others save, too."""
        path = self.path_of(certificate.model_name, certificate.identity, certificate.profile)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._remove_abandoned()
        part = path.with_suffix(f".{uuid.uuid4().hex}.part")
        try:
            with part.open("xb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(certificate), indent=2) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        return path

    def reason_against(self, model_name: str, identity: str, profile: BlendProfile) -> str | None:
        """Return why that model may not be blended with the profile; None if it may. A certificate
        that cannot be read is also a reason.
        """
        path = self.path_of(model_name, identity, profile)
        try:
            found = _read(path)
        except ConfigError as exc:
            return str(exc)
        if found is None:
            near = self._nearest(model_name, identity, profile)
            missing = (
                f"{model_name} has no certificate for blending ({profile}) in {self._folder}{near}"
            )
            return f"{missing}; make one with `python -m lmcache_core.blend.certify`"
        if (found.format_version, found.model_name, found.identity, found.profile) != (
            FORMAT_VERSION,
            model_name,
            identity,
            profile,
        ):
            return (
                f"the certificate {path} is of another model or profile; make it again with"
                " `python -m lmcache_core.blend.certify`"
            )
        if found.reasons:
            return (
                f"{model_name} failed its certificate for blending ({profile}):"
                f" {'; '.join(found.reasons)}"
            )
        return None

    def _nearest(self, model_name: str, identity: str, profile: BlendProfile) -> str:
        """Return how a certificate of the same model differs, if there is one."""
        found = []
        for path in itertools.islice(self._folder.glob("blend-*.json"), MAX_CERTIFICATES_COMPARED):
            try:
                other = _read(path)
            except ConfigError:
                continue  # nothing can be said about that one
            if other is not None and other.model_name == model_name:
                found.append(other)
        if any(other.profile == profile for other in found):
            return ", only one of other weights, another dtype or other options of that model"
        profiles = sorted({str(other.profile) for other in found if other.identity == identity})
        return f", only for {'; '.join(profiles)}" if profiles else ""

    def _remove_abandoned(self) -> None:
        for part in self._folder.glob("blend-*.part"):
            try:
                if time.time() - part.stat().st_mtime > ABANDONED_AFTER_S:
                    part.unlink()
            except FileNotFoundError:
                continue  # its writer is done


def _read(path: Path) -> BlendCertificate | None:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CERTIFICATE_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise ConfigError(f"certificate {path} cannot be read: {exc}") from exc
    if len(data) > MAX_CERTIFICATE_BYTES:
        raise ConfigError(
            f"certificate {path} has more than {MAX_CERTIFICATE_BYTES} bytes; it is no certificate"
        )
    try:
        return msgspec.json.decode(data, type=BlendCertificate)
    except (msgspec.DecodeError, msgspec.ValidationError) as exc:
        raise ConfigError(
            f"certificate {path} is damaged ({exc}); remove it, or make it again"
        ) from exc
