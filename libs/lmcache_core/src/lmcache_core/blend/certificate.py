"""The gate: a model is blended only with a certificate that says what blending costs its
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
"""Of a folder, to say why none fits."""
ABANDONED_AFTER_S: Final = 3600.0
"""Age of a half-written file whose writer was killed."""


class BlendProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How KV is blended: what a certificate holds for.

    Attributes:
        policy: Which tokens are recomputed: one of `selection.POLICY_NAMES`.
        recompute_ratio: Share of them, 0 … 1.
        separator: Token ids that end a document.
    """

    policy: str
    recompute_ratio: float
    separator: tuple[int, ...]

    def __str__(self) -> str:
        ids = " ".join(map(str, self.separator))
        return f"{self.policy}, {100 * self.recompute_ratio:g} % recomputed, separator {ids}"


class Quality(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured of blended prompts against full recompute, over the tokens after the
    documents that are judged.

    Attributes:
        num_prompts: How many prompts.
        num_tokens: How many tokens were judged.
        kl_nats: Mean Kullback-Leibler divergence of the next token's distribution, in nats.
        top1_agreement: Share of tokens whose most probable successor is the same.
        delta_loss_nats: By how much the loss of the text grows, in nats a token.
        delta_loss_error: Standard error of that, over prompts.
        reused_share: Share of the prompts' tokens whose KV was retrieved; where it is 0, nothing
            was blended.
    """

    num_prompts: int
    num_tokens: int
    kl_nats: float
    top1_agreement: float
    delta_loss_nats: float
    delta_loss_error: float
    reused_share: float


class QualityBounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a model must keep to.

    Attributes:
        max_kl_nats: Largest mean divergence.
        min_top1_agreement: Smallest share of equal first choices.
        max_delta_loss_nats: Largest growth of the loss; twice its standard error is added to what
            was measured.
    """

    max_kl_nats: float = 0.05
    min_top1_agreement: float = 0.95
    max_delta_loss_nats: float = 0.02


class BlendCertificate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured, of what, and whether it is good enough.

    Attributes:
        format_version: `FORMAT_VERSION`.
        model_name: Under which its KV is shared.
        identity: Revision of the weights and the options that decide about KV, as in
            `LMCacheEngineMetadata.revision`.
        profile: What it holds for.
        bounds: What was asked for.
        quality: What was found.
        core_version: Of the library that measured.
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
        """Why the model may not be blended so; empty if it may. NaN is in no bounds."""
        bounds, quality = self.bounds, self.quality
        reasons = []
        if not quality.reused_share > 0:
            reasons.append("no KV was reused, so what was measured says nothing of blending")
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
        folder: Where they lie; made when the first is saved.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path_of(self, model_name: str, identity: str, profile: BlendProfile) -> Path:
        """Return where the certificate of a model and profile lies, if there is one."""
        ratio = float(profile.recompute_ratio)  # 1 and 1.0 are one ratio, and not one text
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
        """Keep a certificate in the place of an older one; whole or not at all, even if others save
        too.

        Returns:
            Where it lies.
        """
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
        """Return why that model may not be blended so; None if it may. A certificate that cannot be
        read is a reason, too.
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
            return f"{missing}; make one with `lmcachectl certify blend`"
        if (found.format_version, found.model_name, found.identity, found.profile) != (
            FORMAT_VERSION,
            model_name,
            identity,
            profile,
        ):
            return (
                f"the certificate {path} is of another model or profile; make it again with"
                " `lmcachectl certify blend`"
            )
        if found.reasons:
            return (
                f"{model_name} failed its certificate for blending ({profile}):"
                f" {'; '.join(found.reasons)}"
            )
        return None

    def _nearest(self, model_name: str, identity: str, profile: BlendProfile) -> str:
        """Return in what a certificate of the same model differs, where there is one."""
        found = []
        for path in itertools.islice(self._folder.glob("blend-*.json"), MAX_CERTIFICATES_COMPARED):
            try:
                other = _read(path)
            except ConfigError:
                continue  # of that one nothing can be said
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
