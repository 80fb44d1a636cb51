"""The web page at `/`: static files whose script asks `/v1/overview` with a given token."""

from __future__ import annotations

from importlib import resources
from types import MappingProxyType
from typing import Final

from fastapi import APIRouter, HTTPException, Response

HEADERS: Final = MappingProxyType(
    {
        "Content-Security-Policy": (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src"
            " 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none';"
            " require-trusted-types-for 'script'"
        ),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }
)
_INDEX: Final = "index.html"
_MEDIA_TYPES: Final = MappingProxyType(
    {
        ".html": "text/html; charset=utf-8",
        ".css": "text/css; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".svg": "image/svg+xml",
    }
)


def create_page_router() -> APIRouter:
    """Return the routes of the page. Reads its files, once."""
    folder = resources.files("lmcache_broker.page") / "static"
    files = {
        entry.name: entry.read_bytes()
        for entry in folder.iterdir()
        if _suffix(entry.name) in _MEDIA_TYPES
    }
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def index() -> Response:
        """The page itself."""
        return _answer(_INDEX, files[_INDEX])

    @router.get("/page/{name}")
    async def file(name: str) -> Response:
        """A script, style sheet or image of the page."""
        if name not in files:
            raise HTTPException(404)
        return _answer(name, files[name])

    return router


def _answer(name: str, content: bytes) -> Response:
    return Response(content, media_type=_MEDIA_TYPES[_suffix(name)], headers=dict(HEADERS))


def _suffix(name: str) -> str:
    return name[name.rfind(".") :]
