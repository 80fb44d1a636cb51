"""The segments of prompts that `SPTBlendRetriever` finds in a real engine."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from lmcache_core.blend import SPTBlendRetriever, SPTBlendRetrieverTask

from tests.fixtures.documents import (
    SEPARATOR,
    Watched,
    document,
    request,
    retrieving,
    starts_of,
    store,
)
from tests.fixtures.embedded import PATIENT, embedded_engine
from tests.fixtures.kv import CHUNK_SIZE, HIDDEN, NUM_LAYERS, make_metadata
from tests.fixtures.prompts import kv_of, wanted_pieces


def parts_of(tokens):
    """The tokens cut after each separator, one token at a time."""
    parts, part = [], []
    for token in tokens:
        part.append(token)
        if tuple(part[-len(SEPARATOR) :]) == SEPARATOR:
            parts.append(part)
            part = []
    return [*parts, part] if part else parts


def num_found(tokens, kept):
    found = 0
    for piece in wanted_pieces(torch.tensor(tokens, dtype=torch.int64)):
        if piece not in kept:
            break
        found = len(piece)
    return found


def segments_of(tokens, kept):
    """Of each segment of a prompt its tokens and how many of them are to be found."""
    parts = parts_of(tokens)
    num_exact, joined = num_found(tokens, kept), []
    while parts and len(joined) + len(parts[0]) <= num_exact:
        joined += parts.pop(0)
    if len(parts_of(joined)) < 2:
        joined, parts = [], parts_of(tokens)
    return [(joined, len(joined))] * bool(joined) + [
        (part, num_found(part, kept)) for part in parts
    ]


TEXTS = st.lists(st.sampled_from([1, 2, 7]), max_size=3).map(lambda few: few * 9)
PROMPTS = st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=4)


@st.composite
def batches(draw):
    """Texts, some stored alone and some together, and prompts of them in any order, with
    separators or without.
    """
    texts = draw(
        st.lists(
            st.one_of(TEXTS, st.integers(0, 40).map(lambda n: [*range(100, 100 + n)])),
            min_size=4,
            max_size=4,
        )
    )

    def whole(parts):
        return [
            token for number, has_end in parts for token in [*texts[number], *SEPARATOR * has_end]
        ]

    stored = [whole(parts) for parts in draw(st.lists(PROMPTS, max_size=5))]
    alone = [[*texts[number], *SEPARATOR] for number in draw(st.sets(st.integers(0, 3)))]
    return [*alone, *stored], [
        whole(parts) for parts in draw(st.lists(PROMPTS, min_size=1, max_size=3))
    ]


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(batches(), st.booleans())
@example(([], [[]]), True)
@example(([[7, 7]], [[7, 7, 7, 7], [], [7], [7, 7, 1]]), True)
@example(
    (
        [[*range(20), 7, 7, *range(50, 60), 7, 7, 1, 2, 3]],
        [[*range(20), 7, 7, *range(50, 60), 7, 7, 9]],
    ),
    False,
)
def test_the_cached_prefix_of_every_segment_is_found(batch, saves_unfull):
    stored, prompts = batch
    with (
        embedded_engine(num_chunks=512, save_unfull_chunk=saves_unfull, **PATIENT) as cache,
        retrieving(cache.engine) as made,
    ):
        kept = set()
        for tokens in stored:
            store(cache.engine, torch.tensor(tokens, dtype=torch.int64))
            kept |= {
                piece
                for piece in wanted_pieces(torch.tensor(tokens))
                if saves_unfull or len(piece) % CHUNK_SIZE == 0
            }
        starts = starts_of(*prompts)
        before = starts.clone()
        whole = torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int32)
        task = made.new_request(whole, starts)
        segments = [segment for prompt in prompts for segment in segments_of(prompt, kept)]
        valid = torch.tensor(
            [i < num for tokens, num in segments for i in range(len(tokens))], dtype=torch.bool
        )
        for layer_id in range(NUM_LAYERS):
            found = task.result(layer_id)
            assert torch.equal(found.valid_mask, valid)
            assert found.original_positions.dtype == torch.int64
            assert found.original_positions.tolist() == [
                i * (i < num) for tokens, num in segments for i in range(len(tokens))
            ]
            if not valid.any():
                assert found.k is None
                assert found.v is None
                continue
            for side, got in enumerate((found.k, found.v)):
                want = torch.cat(
                    [
                        kv_of(torch.tensor(tokens))[layer_id][side]
                        for tokens, _ in segments
                        if tokens
                    ]
                ).flatten(1)
                assert got.shape == (len(whole), HIDDEN)
                assert torch.equal(got[valid], want[valid])
        assert torch.equal(starts, before)
        made.close()
        cache.check_nothing_held()


def test_a_text_too_short_to_be_stored_is_not_asked_for():
    asked = []
    with (
        embedded_engine(save_unfull_chunk=False) as cache,
        retrieving(Watched(cache.engine, asked.append)) as made,
    ):
        assert request(made, document(1, 5), document(2, 14)).result(0).k is None
    assert [len(tokens) for tokens in asked] == [CHUNK_SIZE]


@pytest.mark.parametrize(
    ("tokens", "starts", "words"),
    [
        (torch.arange(5), [0, 4], r"query_start_loc is \[0, 4\].*5"),
        (torch.arange(5), [0, 4, 3, 5], "rise from 0"),
        (torch.arange(5), [], "rise from 0"),
        (torch.arange(5), [[0, 5]], "rise from 0"),
        (torch.zeros(5, 2, dtype=torch.int64), [0, 5], r"input_tokens is \(5, 2\)"),
        (torch.zeros(5), [0, 5], "float32"),
    ],
)
def test_bad_batches_are_refused_before_anything_is_asked_for(tokens, starts, words):
    watched = Watched(None)
    with retrieving(watched) as made, pytest.raises(ValueError, match=words):
        made.new_request(tokens, torch.tensor(starts, dtype=torch.int64))
    assert not watched.lookups


def test_a_separator_is_a_row_of_token_ids():
    for separator in (torch.zeros(0, dtype=torch.int64), torch.tensor([[7]]), torch.ones(1)):
        with pytest.raises(ValueError, match="special token sequence"):
            SPTBlendRetriever(separator, None, make_metadata())


def test_a_task_refuses_other_layers_and_segments():
    with pytest.raises(ValueError, match="'gguf'; known are vllm, huggingface"):
        SPTBlendRetrieverTask([], [], "gguf")
    with pytest.raises(ValueError, match="0 tasks for 1 segments"):
        SPTBlendRetrieverTask([torch.arange(3)], [], "vllm")
    with embedded_engine() as cache, retrieving(cache.engine) as made:
        store(cache.engine, document(1, 14))
        task = request(made, document(1, 14))
        for layer_id in (-1, NUM_LAYERS):
            with pytest.raises(ValueError, match=f"layer {layer_id} of KV that has {NUM_LAYERS}"):
                task.result(layer_id)
