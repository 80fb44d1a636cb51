"""The queries, keys and values that `CacheBlendImpl` gives the attention of each layer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache_core.blend import CacheBlendImpl, RopeParameters, RotaryEmbedding
from lmcache_core.blend.selection import create_policy

HEAD_SIZE, NUM_HEADS = 8, 2
WIDTH = HEAD_SIZE * NUM_HEADS
EMBEDDING = RotaryEmbedding(RopeParameters(HEAD_SIZE))


def executor(ratio=0.5, policy="deviation"):
    made = CacheBlendImpl(ratio, create_policy(policy, ratio))
    made.set_mover(EMBEDDING.mover)
    return made


class Batch:
    """Random KV of a batch. `k` is not rotated; `cached_k` is, at the original positions."""

    def __init__(self, lengths, valid, seed=0, token_dim=0):
        generator = torch.Generator().manual_seed(seed)
        num_tokens = sum(lengths)
        self.token_dim = token_dim
        self.valid = torch.tensor(valid, dtype=torch.bool)
        self.starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
        self.positions = torch.cat([torch.arange(length) for length in lengths])
        self.originals = torch.randint(0, 50, (num_tokens,), generator=generator) * self.valid
        self.q, self.k, self.v, self.fresh_v = (
            torch.randn(num_tokens, WIDTH, generator=generator) for _ in range(4)
        )
        self.cached_k = EMBEDDING.encode(self.originals, self.k, self.k)[1]
        self.fresh_k = EMBEDDING.encode(self.positions, self.k, self.k)[1]

    def layer(self, made, layer_id, rows=None, **changed):
        """Blend a layer of which only these rows are fresh."""
        rows = torch.arange(len(self.valid)) if rows is None else rows
        sides = {
            "fresh_q": self.q[rows],
            "fresh_k": self.fresh_k[rows],
            "fresh_v": self.fresh_v[rows],
        }
        sides |= {"retrieved_k": self.cached_k, "retrieved_v": self.v}
        arguments = {
            name: side.movedim(0, self.token_dim).contiguous() for name, side in sides.items()
        }
        arguments |= {
            "valid_mask": self.valid,
            "original_positions": self.originals,
            "positions": self.positions[rows],
        }
        return made.blend(
            layer_id,
            **arguments | {"query_start_loc": self.starts, "token_dim": self.token_dim} | changed,
        )


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.integers(0, 12), min_size=1, max_size=4).filter(sum))
    valid = draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths)))
    return Batch(lengths, valid, draw(st.integers(0, 99)), draw(st.sampled_from([0, 1, -1])))


@settings(deadline=None, max_examples=60)
@given(
    batches(),
    st.sampled_from([0.0, 0.15, 0.5, 1.0]),
    st.sampled_from(["deviation", "first_of_chunk"]),
)
def test_every_layer_gets_fresh_kv_of_selected_tokens_and_moved_kv_of_the_rest(
    batch, ratio, policy
):
    made = executor(ratio, policy)
    before = [
        tensor.clone()
        for tensor in (batch.starts, batch.valid, batch.originals, batch.cached_k, batch.v)
    ]
    dim, check_layer = batch.token_dim, made.policy.check_layer
    for layer_id in range(check_layer):
        out = batch.layer(made, layer_id)
        assert out.query_start_loc is None
        assert torch.equal(out.q.movedim(dim, 0), batch.q)
        assert torch.equal(out.k.movedim(dim, 0), batch.fresh_k)
    out = batch.layer(made, check_layer)
    if not batch.valid.any():
        assert out.query_start_loc is None
        assert len(out.local_indices) == len(batch.valid)
        return
    rows, starts = out.local_indices, out.query_start_loc.tolist()
    for request, (start, end) in enumerate(
        zip(batch.starts.tolist(), batch.starts.tolist()[1:], strict=False)
    ):
        own = rows[starts[request] : starts[request + 1]]
        assert ((own >= start) & (own < end)).all()
        assert end == start or end - 1 in own, "the last token of a request is always computed"
    selected = torch.zeros(len(batch.valid), dtype=torch.bool)
    selected[rows] = True
    assert selected[~batch.valid].all()
    assert starts[-1] == len(rows)
    assert torch.equal(rows, rows.sort().values)
    assert torch.equal(out.q.movedim(dim, 0), batch.q[rows])
    assert torch.equal(out.positions, batch.positions[rows])
    assert torch.equal(out.v.movedim(dim, 0), batch.fresh_v)
    if ratio == 1:
        assert selected.all() or policy == "first_of_chunk"
    later = batch.layer(made, check_layer + 1, rows)
    assert later.query_start_loc is None
    assert later.local_indices.tolist() == list(range(len(rows)))
    assert torch.equal(later.positions, batch.positions[rows])
    assert torch.equal(later.q.movedim(dim, 0), batch.q[rows])
    assert torch.equal(
        later.v.movedim(dim, 0), torch.where(selected[:, None], batch.fresh_v, batch.v)
    )
    # K is the same wherever it comes from, once it is at its new position: the retrieved and the
    # fresh were made of the same values
    torch.testing.assert_close(later.k.movedim(dim, 0), batch.fresh_k, rtol=0, atol=1e-5)
    assert all(
        map(
            torch.equal,
            before,
            (batch.starts, batch.valid, batch.originals, batch.cached_k, batch.v),
        )
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_a_mask_may_be_of_numbers(dtype):
    batch, made = Batch([5, 4], [True, True, False, True, True] + [True] * 4), executor(0.0)
    batch.valid = batch.valid.to(dtype) * 3
    batch.layer(made, 0)
    rows = batch.layer(made, 1).local_indices
    assert rows.tolist() == [2, 4, 8]
    torch.testing.assert_close(batch.layer(made, 2, rows).k, batch.fresh_k, rtol=0, atol=1e-5)


def test_encoders_serve_instead_of_a_mover():
    batch, made = Batch([6], [True] * 5 + [False]), CacheBlendImpl(0.0)
    made.set_positional_encoder(EMBEDDING.encode)
    made.set_reverse_positional_encoder(EMBEDDING.decode)
    batch.layer(made, 0)
    rows = batch.layer(made, 1).local_indices
    torch.testing.assert_close(batch.layer(made, 2, rows).k, batch.fresh_k, rtol=0, atol=1e-5)


def test_blending_needs_a_share_and_encoders():
    for ratio in (-0.1, 1.01, float("nan")):
        with pytest.raises(ValueError, match="recompute_ratio"):
            CacheBlendImpl(ratio)
    batch, made = Batch([6], [True] * 6), CacheBlendImpl(0.5)
    batch.layer(made, 0)
    with pytest.raises(ValueError, match="positional encoder"):
        batch.layer(made, 1)


def test_a_layer_without_the_kv_of_reused_tokens_is_refused():
    batch, made = Batch([6, 4], [True] * 5 + [False] + [True] * 4), executor(0.2)
    batch.layer(made, 0)
    rows = batch.layer(made, 1).local_indices
    lost = batch.valid.clone()
    lost[[2, 7]] = False
    with pytest.raises(ValueError, match="no retrieved KV of 2 tokens"):
        batch.layer(made, 2, rows, valid_mask=lost)
    with pytest.raises(ValueError, match="no retrieved KV of 9 tokens"):
        batch.layer(made, 2, rows, valid_mask=torch.zeros(10, dtype=torch.bool))
    with pytest.raises(ValueError, match="fresh_q"):
        batch.layer(made, 2, rows, fresh_q=torch.zeros(5, WIDTH))
    assert torch.equal(
        batch.layer(made, 2, rows, valid_mask=torch.ones(10, dtype=torch.bool)).k,
        batch.layer(made, 3, rows).k,
    )


def test_a_mask_counts_as_it_was_when_tokens_were_selected():
    batch, made = Batch([6], [True] * 6), executor(0.0)
    batch.layer(made, 0)
    rows = batch.layer(made, 1).local_indices
    batch.valid[2] = False
    with pytest.raises(ValueError, match="no retrieved KV of 1 tokens"):
        batch.layer(made, 2, rows)


def test_without_valid_kv_on_the_check_layer_everything_is_computed():
    batch, made = Batch([6], [True] * 6), executor(0.0)
    batch.layer(made, 0)
    none = torch.zeros(6, dtype=torch.bool)
    checked = batch.layer(made, 1, valid_mask=none, retrieved_k=None, retrieved_v=None)
    assert checked.query_start_loc is None
    late = batch.layer(made, 2)
    assert late.query_start_loc is None
    assert torch.equal(late.k, batch.fresh_k)
    assert len(late.local_indices) == 6


def test_a_new_batch_begins_at_layer_0():
    made, first, second = executor(), Batch([6], [True] * 6), Batch([4, 3], [True] * 7)
    first.layer(made, 0)
    first.layer(made, 1)
    assert len(second.layer(made, 0).local_indices) == 7
    second.layer(made, 1)
    with pytest.raises(ValueError, match="layer 4 does not follow layer 1"):
        second.layer(made, 4)
    with pytest.raises(ValueError, match="layer -1 does not follow"):
        second.layer(made, -1)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"valid_mask": torch.ones(5, dtype=torch.bool)}, "original_positions"),
        ({"original_positions": torch.tensor([0, 1, 2, -4, 0, 1])}, "-4"),
        ({"positions": torch.tensor([0, 1, 2, -3, 0, 1])}, "-3"),
        ({"positions": torch.arange(4)}, "6 tokens"),
        ({"query_start_loc": torch.tensor([0, 4])}, "6"),
        ({"query_start_loc": torch.tensor([0, 5, 4, 6])}, "rise"),
        ({"valid_mask": torch.ones(6, 1, dtype=torch.bool)}, r"valid_mask is \(6, 1\)"),
        ({"fresh_k": torch.zeros(6, WIDTH, dtype=torch.float16)}, "fresh_k is .*float16"),
        ({"fresh_v": torch.zeros(6, 3)}, "fresh_v"),
        ({"retrieved_k": None}, "retrieved_k is None"),
        ({"retrieved_v": torch.zeros(6, WIDTH + 1)}, "retrieved_v"),
        ({"token_dim": 2}, "token_dim is 2"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changed, words):
    with pytest.raises(ValueError, match=words):
        Batch([6], [True] * 6).layer(executor(), 0, **changed)
