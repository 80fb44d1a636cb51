"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_SIDECAR_URL = "http://127.0.0.1:8083"
DEFAULT_LOOKUP_URL = "http://127.0.0.1:8081"


def _checked_url(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise typer.BadParameter(f"{url!r} must begin with http:// or https://")
    return url


SidecarUrl = Annotated[str, typer.Option("--url", help="REST address of a sidecar.", callback=_checked_url)]
LookupUrl = Annotated[str, typer.Option("--url", help="REST address of the lookup service.", callback=_checked_url)]
Tls = Annotated[
    str | None,
    typer.Option(
        metavar="CA[,CERT[,KEY]]",
        help="For https: file with the authorities to trust, and where the service asks for it the certificate to show and its key (PEM).",
    ),
]
TokenFile = Annotated[Path | None, typer.Option("--token-file", help="File with the token to show; needed where the service wants one.")]
