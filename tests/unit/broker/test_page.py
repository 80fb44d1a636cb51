from typing import Any

import pytest
from lmcache_broker.peers.page import render_page
from lmcache_core.p2p import PeerStatus

HOSTILE = "<script>alert('x')</script>&\""


def status(**changed: Any) -> PeerStatus:
    fields: dict[str, Any] = {
        "id": "a",
        "incarnation": 1,
        "distributed_url": "lm://10.0.0.1:1",
        "load": 0.25,
        "draining": False,
        "num_pulls": 3,
        "expires_in_ms": 1500,
    }
    return PeerStatus(**fields | changed)


def test_a_row_holds_the_facts() -> None:
    page = render_page([status(), status(id="b", draining=True)])
    assert "2 live" in page
    for cell in ("a", "sidecar", "lm://10.0.0.1:1", "25%", "3", "1.5 s", "serving", "draining"):
        assert f"<td>{cell}</td>" in page


@pytest.mark.parametrize("field", ["zone", "node", "kind"])
def test_every_text_is_escaped(field: str) -> None:
    page = render_page([status(**{field: HOSTILE})])
    assert "<script" not in page
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;&amp;&quot;" in page


def test_nothing_comes_from_elsewhere() -> None:
    page = render_page([status()])
    for loader in ("<script", "<link", "<style", "<img", "src=", "href=", "http"):
        assert loader not in page
