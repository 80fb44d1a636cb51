"""The web page at `/`: the live peers as one HTML table, without scripts, styles or anything from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Final

from lmcache_core.p2p import PeerStatus

PAGE_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

_COLUMNS: Final = ("Peer", "Kind", "Serves at", "Zone", "Node", "Load", "Pulls", "Lease left", "State")


def render_page(peers: Iterable[PeerStatus]) -> str:
    """Render the page; every value is escaped."""
    rows = [_row(peer) for peer in peers]
    head = "".join(f"<th>{escape(column)}</th>" for column in _COLUMNS)
    body = "\n".join(rows) or f'<tr><td colspan="{len(_COLUMNS)}">No peer is registered.</td></tr>'
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>LMCache broker</title></head>\n<body>\n'
        f"<h1>Peers</h1>\n<p>{len(rows)} live</p>\n"
        f'<table border="1">\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</body>\n</html>\n'
    )


def _state(peer: PeerStatus) -> str:
    if not peer.draining:
        return "serving"
    drain = peer.drain
    return "draining" if drain is None else f"{drain.state}: {drain.total - drain.left} of {drain.total} chunks, {drain.failed} failed"


def _row(peer: PeerStatus) -> str:
    cells = (
        peer.id,
        peer.kind,
        peer.distributed_url,
        peer.zone,
        peer.node,
        f"{peer.load:.0%}",
        str(peer.num_pulls),
        f"{peer.expires_in_ms / 1000:.1f} s",
        _state(peer),
    )
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
