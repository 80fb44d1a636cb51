"""Where lookup says that chunks are: gaps, and the bound on questions."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.lookup import Holder, LookupAnswer
from lmcache_core.storage.remote.locating import MAX_QUESTIONS, LookupLocator
from lmcache_core.testing.chunks import make_key

KEYS = [make_key(i) for i in range(12)]


class ScriptedLookup:
    def __init__(self, held: set[int], degraded: bool = False) -> None:
        self._held = {KEYS[i].key.chunk_id() for i in held}
        self._degraded = degraded
        self.num_questions = 0

    async def lookup(self, chunk_ids: Sequence[bytes]) -> LookupAnswer:
        self.num_questions += 1
        if self._degraded:
            return LookupAnswer(0, [], degraded=True)
        num_prefix = next(
            (i for i, chunk_id in enumerate(chunk_ids) if chunk_id not in self._held),
            len(chunk_ids),
        )
        return LookupAnswer(
            num_prefix,
            [[Holder("s-1", "storage", "Hot", 5), Holder("s-2", "storage", "Hot", 5)]] * num_prefix,
        )


async def test_what_is_held_behind_a_gap_is_found() -> None:
    lookup = ScriptedLookup({0, 1, 3, 5, 6})
    found = await LookupLocator(lookup)(KEYS[:7])
    assert [bool(names) for names in found] == [True, True, False, True, False, True, True]
    assert found[0] == ["s-1", "s-2"]
    assert lookup.num_questions == 3


async def test_questions_are_bounded_and_the_rest_is_not_known() -> None:
    lookup = ScriptedLookup({0, *range(8, 12)})
    found = await LookupLocator(lookup)(KEYS)
    assert [bool(names) for names in found] == [True] + [False] * 11
    assert lookup.num_questions == MAX_QUESTIONS


async def test_without_its_index_lookup_knows_nothing() -> None:
    assert await LookupLocator(ScriptedLookup({0}, degraded=True))(KEYS) == [[] for _ in KEYS]
    assert await LookupLocator(ScriptedLookup(set()))([]) == []
