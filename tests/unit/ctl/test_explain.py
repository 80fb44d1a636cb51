"""What is shown of a remembered lookup when the sidecar does not explain all of its chunks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fixtures.ctl import Ctl
from tests.fixtures.http_server import Handler, served

NUM_CHUNKS = 600
HASHES = [f"{number:064x}" for number in range(512)]
LOOKUP = {
    "request_id": "0a1b:chatcmpl-7",
    "model_name": "m",
    "age_s": 1.0,
    "num_chunks": NUM_CHUNKS,
    "num_found": NUM_CHUNKS,
    "found": {"memory": NUM_CHUNKS},
    "num_at_once": 400,
    "is_final": True,
    "settled_s": 0.0312,
    "source": "pod-7",
    "missing": None,
    "chunk_hashes": HASHES,
}
STATE = {"rank": 0, "group": "", "places": [], "missing": "evicted", "is_pinned": False}


class Sidecar(Handler):
    """Remembers one lookup, and explains `max_chunks` at once."""

    max_chunks = 0

    def do_GET(self) -> None:
        self.answer(200, {"lookup": LOOKUP})

    def do_POST(self) -> None:
        hashes = self.body()["chunk_hashes"]
        if not self.max_chunks:
            self.answer(409, {"detail": "no engine of the model 'm' has connected"})
        elif len(hashes) > self.max_chunks:
            self.answer(400, {"detail": f"ask for {self.max_chunks} chunks or fewer"})
        else:
            chunk = {"start": None, "end": None, "is_complete": False, "states": [STATE]}
            one = {
                "fmt": "vllm",
                "model_name": "m",
                "chunk_size": 16,
                "num_prefix": 0,
                "chunks": [{"chunk_hash": chunk_hash, **chunk} for chunk_hash in hashes],
            }
            self.answer(200, {"explanations": [one], "num_not_explained": 0})


@pytest.fixture
def url() -> Iterator[str]:
    with served(Sidecar) as url:
        yield url


@pytest.mark.parametrize(
    ("max_chunks", "said"),
    [(0, "no engine of the model 'm' has connected"), (200, "first 128 of 600 chunks")],
)
def test_what_a_request_found_is_shown_even_if_its_chunks_are_not_all_explained(
    max_chunks: int, said: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sidecar, "max_chunks", max_chunks)
    text = " ".join(Ctl().text("explain", "--request", "chatcmpl-7", "--url", url).split())
    assert "The request found 600 of 600 chunks (600 in memory)" in text
    assert "It expected them of pod-7: 400 were here at once, 200 came within 0.031 s." in text
    assert said in text
