"""What every token database must do. A test module subclasses `TokenDatabaseSuite` and gives it
a `make_database` fixture.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from lmcache_core.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache_core.keys import CacheEngineKey
from lmcache_core.token_database import MultimodalSpan, TokenDatabase

from tests.suites.threads import interleave

CHUNK_SIZE = 4
MAX_TOKEN_ID = 2**32 - 1
METADATA = LMCacheEngineMetadata("test/model", 2, 1, "vllm", "bfloat16", (4, 2, CHUNK_SIZE, 8, 64))
NUM_SEQUENCES = 120
INTEGER_DTYPES = (
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)

MakeDatabase = Callable[[LMCacheEngineConfig, LMCacheEngineMetadata], TokenDatabase]
NamedChunks = list[tuple[int, int, CacheEngineKey]]


def make_config(salt: str = "", chunk_size: int = CHUNK_SIZE) -> LMCacheEngineConfig:
    """The options that a token database looks at."""
    return LMCacheEngineConfig.from_defaults(chunk_size=chunk_size, remote_url=None, salt=salt)


def named(
    database: TokenDatabase,
    tokens: Any,
    mask: torch.Tensor | None = None,
    spans: Sequence[MultimodalSpan] = (),
) -> NamedChunks:
    """All that the database gives for these tokens (a tensor or a list of token ids)."""
    ids = tokens if isinstance(tokens, torch.Tensor) else torch.tensor(tokens, dtype=torch.int64)
    return list(database.process_tokens(ids, mask, spans))


def hashes(database: TokenDatabase, tokens: Any, spans: Sequence[MultimodalSpan] = ()) -> list[str]:
    """The chunk hashes of these tokens."""
    return [key.chunk_hash for _, _, key in named(database, tokens, spans=spans)]


def branching_sequences(seed: int, num_sequences: int, max_tokens: int = 40) -> list[list[int]]:
    """Sequences that share prefixes of all lengths, the same for the same seed."""
    dice = random.Random(seed)
    made: list[list[int]] = [[]]
    while len(made) < num_sequences:
        known = dice.choice(made)
        beginning = known[: dice.randint(0, len(known))]
        made.append((beginning + dice.choices(range(3), k=dice.randint(0, 16)))[:max_tokens])
    return made


class TokenDatabaseSuite:
    """The contract of `TokenDatabase`; `make_database` is the fixture to provide, a
    `MakeDatabase`.
    """

    @pytest.fixture
    def database(self, make_database: MakeDatabase) -> TokenDatabase:
        """One without salt."""
        return make_database(make_config(), METADATA)

    def test_chunks_carry_the_identity_of_the_worker(self, database: TokenDatabase) -> None:
        [(start, end, key)] = named(database, [1, 2, 3])
        assert (start, end) == (0, 3)
        assert (key.fmt, key.model_name, key.world_size, key.worker_id, key.group) == (
            "vllm",
            "test/model",
            2,
            1,
            "",
        )
        assert len(bytes.fromhex(key.chunk_hash)) == 32
        assert isinstance(database, TokenDatabase)

    @pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 5, 8, 41])
    def test_chunks_cover_the_tokens_in_order_and_the_last_may_be_short(
        self, database: TokenDatabase, num_tokens: int
    ) -> None:
        want = [(i, min(i + CHUNK_SIZE, num_tokens)) for i in range(0, num_tokens, CHUNK_SIZE)]
        for _ in range(2):
            got = named(database, range(num_tokens))
            assert [(start, end) for start, end, _ in got] == want
            assert len({key for _, _, key in got}) == len(want)

    def test_asking_again_gives_the_same(self, make_database: MakeDatabase) -> None:
        database = make_database(make_config(), METADATA)
        for tokens in branching_sequences(1, NUM_SEQUENCES):
            assert (
                named(database, tokens)
                == named(database, tokens)
                == named(make_database(make_config(), METADATA), tokens)
            )

    def test_a_hash_depends_on_everything_before_its_end_and_on_nothing_after_it(
        self, database: TokenDatabase
    ) -> None:
        tokens = list(range(18))
        before = hashes(database, tokens)
        for at in range(len(tokens)):
            for bit in (1, 1 << 8, 1 << 31):
                changed = [*tokens[:at], tokens[at] ^ bit, *tokens[at + 1 :]]
                after = hashes(database, changed)
                assert [a == b for a, b in zip(before, after, strict=True)] == [
                    i < at // CHUNK_SIZE for i in range(len(before))
                ]

    def test_full_chunks_are_shared_by_prefix_and_partial_chunks_are_not(
        self, database: TokenDatabase
    ) -> None:
        whole = hashes(database, range(18))
        for num_tokens in range(18):
            part = hashes(database, range(num_tokens))
            full = num_tokens // CHUNK_SIZE
            assert part[:full] == whole[:full]
            assert not set(part[full:]) & set(whole)

    def test_the_same_tokens_elsewhere_are_another_chunk(self, database: TokenDatabase) -> None:
        assert len(set(hashes(database, [7] * 40))) == 10

    @pytest.mark.parametrize("dtype", INTEGER_DTYPES, ids=str)
    def test_equal_ids_give_equal_keys_in_every_integer_dtype(
        self, database: TokenDatabase, dtype: torch.dtype
    ) -> None:
        tokens = [0, 1, 2, 127, 5, 6]
        assert named(database, torch.tensor(tokens, dtype=dtype)) == named(database, tokens)

    def test_strides_do_not_matter(self, database: TokenDatabase) -> None:
        spread = torch.arange(40)[::2]
        assert named(database, spread) == named(database, spread.tolist())

    @pytest.mark.parametrize("tokens", [[MAX_TOKEN_ID], [MAX_TOKEN_ID] * 9, [0] * 9])
    def test_the_ends_of_the_range_are_tokens(
        self, database: TokenDatabase, tokens: list[int]
    ) -> None:
        assert len(named(database, tokens)) == -(-len(tokens) // CHUNK_SIZE)
        assert named(database, torch.tensor(tokens, dtype=torch.uint32)) == named(database, tokens)

    @pytest.mark.parametrize(
        ("tokens", "word"),
        [
            (torch.tensor([1, -1]), "negative"),
            (torch.tensor([1, -1], dtype=torch.int8), "negative"),
            (torch.tensor([1, 2**32]), "above"),
            (torch.tensor([2**63], dtype=torch.uint64), "above"),
            (torch.tensor([1.0, 2.0]), "integers"),
            (torch.tensor([True]), "integers"),
            (torch.tensor([[1, 2]]), "dimension"),
            (torch.tensor(5), "dimension"),
        ],
        ids=str,
    )
    def test_what_is_no_token_sequence_is_refused_at_once(
        self, database: TokenDatabase, tokens: torch.Tensor, word: str
    ) -> None:
        with pytest.raises(ValueError, match=word):
            database.process_tokens(tokens)

    @pytest.mark.parametrize("num_false", [0, 4, 8])
    @pytest.mark.parametrize("is_known", [False, True])
    def test_masked_chunks_are_part_of_the_hashes_but_not_given(
        self, make_database: MakeDatabase, num_false: int, is_known: bool
    ) -> None:
        tokens = torch.arange(10)
        want = named(make_database(make_config(), METADATA), tokens)[num_false // CHUNK_SIZE :]
        database = make_database(make_config(), METADATA)
        if is_known:
            named(database, tokens)
        assert named(database, tokens, torch.arange(10) >= num_false) == want

    def test_a_mask_of_falses_only_gives_nothing(self, database: TokenDatabase) -> None:
        assert named(database, torch.arange(8), torch.zeros(8, dtype=torch.bool)) == []
        assert named(database, torch.arange(0), torch.zeros(0, dtype=torch.bool)) == []

    @pytest.mark.parametrize(
        ("mask", "words"),
        [
            (torch.arange(10) >= 3, r"\(3\).* multiple of the chunk size \(4\)"),
            (torch.zeros(10, dtype=torch.bool), r"\(10\).* multiple of the chunk size \(4\)"),
            (torch.arange(10) < 4, "FFF"),
            (torch.tensor([False, False, True, False, False] + [True] * 5), "FFF"),
            (torch.ones(9, dtype=torch.bool), "10 booleans"),
            (torch.ones(11, dtype=torch.bool), "10 booleans"),
            (torch.ones(10, dtype=torch.int64), "10 booleans"),
            (torch.ones(1, 10, dtype=torch.bool), "10 booleans"),
        ],
        ids=range(8),
    )
    def test_a_mask_of_another_form_is_refused_at_once(
        self, database: TokenDatabase, mask: torch.Tensor, words: str
    ) -> None:
        with pytest.raises(ValueError, match=words):
            database.process_tokens(torch.arange(10), mask)

    @pytest.mark.parametrize(
        "change",
        [
            {"model_name": "test/other"},
            {"revision": "main"},
            {"adapter": "sql-lora/3"},
            {"kv_dtype": "float16"},
            {"layout": "HND"},
            {"kv_shape": (5, 2, CHUNK_SIZE, 8, 64)},
            {"kv_shape": (4, 1, CHUNK_SIZE, 8, 64)},
            {"kv_shape": (4, 2, CHUNK_SIZE, 4, 128)},
        ],
        ids=str,
    )
    def test_whatever_the_kv_is_enters_the_hash(
        self, make_database: MakeDatabase, database: TokenDatabase, change: dict[str, object]
    ) -> None:
        other = make_database(make_config(), dataclasses.replace(METADATA, **change))  # type: ignore[arg-type]
        assert not set(hashes(database, range(10))) & set(hashes(other, range(10)))

    @pytest.mark.parametrize(
        "change",
        [
            {"kv_dtype": torch.bfloat16},
            {"kv_shape": (4, 2, 999, 8, 64)},
            {"worker_id": 0},
            {"fmt": "huggingface"},
        ],
        ids=str,
    )
    def test_what_does_not_change_the_kv_does_not_enter_the_hash(
        self, make_database: MakeDatabase, database: TokenDatabase, change: dict[str, object]
    ) -> None:
        other = make_database(make_config(), dataclasses.replace(METADATA, **change))  # type: ignore[arg-type]
        assert hashes(database, range(10)) == hashes(other, range(10))

    def test_a_salt_separates_and_can_be_set_later(
        self, make_database: MakeDatabase, database: TokenDatabase
    ) -> None:
        plain, salted = (
            hashes(database, range(10)),
            hashes(make_database(make_config("tenant-a"), METADATA), range(10)),
        )
        assert not set(plain) & set(salted)
        database.use_salt("tenant-a")
        assert hashes(database, range(10)) == salted
        assert hashes(database, range(14))[:2] == salted[:2]
        database.use_salt("")
        assert hashes(database, range(10)) == plain

    @pytest.mark.parametrize("length", [1, 3, 4, 9])
    @pytest.mark.parametrize("offset", range(24))
    def test_a_span_changes_the_chunks_that_it_overlaps_and_those_after_them(
        self, database: TokenDatabase, offset: int, length: int
    ) -> None:
        plain = hashes(database, range(22))
        with_image = hashes(database, range(22), [MultimodalSpan(b"image", offset, length)])
        first = offset // CHUNK_SIZE if offset < 22 else 6
        assert [a == b for a, b in zip(plain, with_image, strict=True)] == [
            i < first for i in range(6)
        ]
        assert hashes(database, range(22)) == plain

    @pytest.mark.parametrize(
        "other",
        [
            [MultimodalSpan(b"dog", 5, 6)],
            [MultimodalSpan(b"cat", 6, 6)],
            [MultimodalSpan(b"cat", 5, 7)],
            [MultimodalSpan(b"cat", 5, 6), MultimodalSpan(b"dog", 5, 6)],
            [],
        ],
        ids=range(5),
    )
    def test_spans_differ_by_content_place_and_number(
        self, database: TokenDatabase, other: list[MultimodalSpan]
    ) -> None:
        one, two = (
            hashes(database, range(14), [MultimodalSpan(b"cat", 5, 6)]),
            hashes(database, range(14), other),
        )
        assert one[0] == two[0]
        assert not set(one[1:]) & set(two[1:])

    def test_an_image_in_the_second_turn_keeps_the_first_turns_chunks(
        self, database: TokenDatabase
    ) -> None:
        first = [MultimodalSpan(b"cat", 1, 5)]
        both = [*first, MultimodalSpan(b"dog", 10, 3)]
        assert hashes(database, range(8), first) == hashes(database, range(20), both)[:2]

    def test_the_order_in_which_spans_are_named_does_not_matter(
        self, make_database: MakeDatabase, database: TokenDatabase
    ) -> None:
        spans = [
            MultimodalSpan(b"cat", 0, 3),
            MultimodalSpan(b"dog", 2, 4),
            MultimodalSpan(b"ant", 2, 4),
        ]
        assert hashes(database, range(12), spans) == hashes(
            make_database(make_config(), METADATA), range(12), spans[::-1]
        )

    def test_many_threads_get_what_one_would(self, make_database: MakeDatabase) -> None:
        sequences = branching_sequences(2, NUM_SEQUENCES, max_tokens=80)
        want = [named(make_database(make_config(), METADATA), tokens) for tokens in sequences]
        shared = make_database(make_config(), METADATA)

        def ask(thread: int) -> None:
            for i in random.Random(thread).sample(range(NUM_SEQUENCES), NUM_SEQUENCES):
                assert named(shared, sequences[i]) == want[i]

        interleave(ask)

    def test_a_salt_that_comes_while_threads_ask_names_no_chunk_wrongly(
        self, make_database: MakeDatabase
    ) -> None:
        tokens = list(range(200))
        by_salt = {
            salt: hashes(make_database(make_config(salt), METADATA), tokens)
            for salt in ("", "a", "b")
        }
        shared = make_database(make_config(), METADATA)

        def ask(thread: int) -> None:
            for turn in range(30):
                if thread == 0:
                    shared.use_salt("ab"[turn % 2])
                assert hashes(shared, tokens) in by_salt.values()

        interleave(ask)
        assert hashes(shared, tokens) == by_salt["b"]
