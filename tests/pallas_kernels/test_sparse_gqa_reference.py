# SPDX-License-Identifier: Apache-2.0
"""The portable decode attention over pages against float64, with poison wherever nothing may be read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sparse_gqa import sparse_gqa
from tests import oracles
from tests.helpers import NAN_WORD, PLATFORMS, lowered_for, same_bits, to_words

REQUESTS, KV_HEADS, HEADS, CHANNELS = 3, 2, 2, 16
RECORDS, TOKENS, SLOTS, GROUPS = 4, 8, 15, 2
SCALE = CHANNELS**-0.5
attention = jax.jit(
    functools.partial(sparse_gqa, scale=SCALE, implementation="xla"), static_argnames=("dtype", "out_dtype")
)


class Case:
    """Random rows; every token that no query may see is NaN, and so is every row that no place names."""

    def __init__(self, dtype, seed: int = 0, visible=None):
        rng = np.random.default_rng(seed)
        self.dtype = dtype
        kv = rng.standard_normal((GROUPS, SLOTS, TOKENS, 2, KV_HEADS, CHANNELS))
        self.kv = np.asarray(jnp.asarray(kv, dtype))
        self.query = jnp.asarray(rng.standard_normal((REQUESTS, KV_HEADS, HEADS, CHANNELS)), dtype)
        place = 1 + rng.permutation(SLOTS - 1)[: REQUESTS * RECORDS].reshape(REQUESTS, RECORDS)
        place[0, 2:], place[1, 3:] = -1, -1
        self.place = place
        self.visible = np.array([[8, 8, 8, 8], [8, 8, 3, 8], [8, 8, 8, 1]]) if visible is None else visible
        shape = (GROUPS, SLOTS, TOKENS, 2 * KV_HEADS * CHANNELS * self.kv.itemsize // 4)
        rows = to_words(self.kv.reshape(GROUPS, SLOTS, TOKENS, -1)).reshape(shape)
        poisoned = np.full_like(rows, NAN_WORD)
        for r, k in np.ndindex(REQUESTS, RECORDS):
            if place[r, k] >= 0:
                seen = slice(0, self.visible[r, k])
                poisoned[:, place[r, k], seen] = rows[:, place[r, k], seen]
        self.rows, self.poisoned = rows.reshape(GROUPS, SLOTS, -1), poisoned.reshape(GROUPS, SLOTS, -1)

    def run(self, rows, group: int = 0, head_mask=None, **options):
        place, visible = (jnp.asarray(x, jnp.int32) for x in (self.place, self.visible))
        mask = None if head_mask is None else jnp.asarray(head_mask)
        args = self.query, jnp.asarray(rows), jnp.int32(group), place, visible, mask
        return attention(*args, dtype=self.dtype, **options)

    def want(self, group: int = 0, head_mask=None):
        """Output and log-sum-exp of each request and head, in float64."""
        out = np.zeros((REQUESTS, KV_HEADS, HEADS, CHANNELS))
        logsumexp = np.full((REQUESTS, KV_HEADS, HEADS), -np.inf)
        kv, query = self.kv[group].astype(np.float64), np.asarray(self.query).astype(np.float64)
        for r, g, h in np.ndindex(REQUESTS, KV_HEADS, HEADS):
            attended = [
                kv[self.place[r, k], : self.visible[r, k], :, g]
                for k in range(RECORDS)
                if self.place[r, k] >= 0 and (head_mask is None or head_mask[r, g, h, k])
            ]
            tokens = np.concatenate([*attended, np.zeros((0, 2, CHANNELS))])
            if len(tokens):
                key, value = tokens[:, None, 0], tokens[:, None, 1]
                out[r, g, h] = oracles.attention(query[r, g, h][None], key, value, SCALE)[0]
                logits = SCALE * key[:, 0] @ query[r, g, h]
                logsumexp[r, g, h] = np.log(np.exp(logits - logits.max()).sum()) + logits.max()
        return out, logsumexp


def agree(got, want, dtype):
    """Dot products of C = 16 and sums over at most 32 tokens round by a few tens of float32 epsilons of their terms,
    which are of order one to ten; below that, bfloat16 rounds each weight of the softmax once, by 2^-9 of it, and the
    weights sum to one, so that the output moves by at most 2^-9 of the largest value (below 5)."""
    out_tolerance = 1e-5 if dtype == jnp.float32 else 5 * 2.0**-9
    assert got[0].dtype == got[1].dtype == jnp.float32
    np.testing.assert_allclose(got[0], want[0], rtol=0, atol=out_tolerance)
    np.testing.assert_allclose(got[1], want[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("group", [0, 1])
def test_against_float64(dtype, group):
    case = Case(dtype, seed=group)
    agree(case.run(case.rows, group), case.want(group), dtype)


def test_a_result_of_another_type_is_the_rounded_one():
    case = Case(jnp.bfloat16)
    (out, sums), (rounded, same) = case.run(case.rows), case.run(case.rows, out_dtype=jnp.bfloat16)
    assert rounded.dtype == jnp.bfloat16 and np.array_equal(rounded, out.astype(jnp.bfloat16))
    assert np.array_equal(sums, same)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_poison_changes_no_bit(dtype):
    """NaN in the row that -1 would read, in slots that no one named, and past the last visible token."""
    case = Case(dtype)
    assert 0 not in case.place and np.all(case.poisoned[:, 0] == NAN_WORD), "-1 is read as slot 0"
    for clean, poisoned in zip(case.run(case.rows), case.run(case.poisoned), strict=True):
        assert not np.isnan(clean).any()
        same_bits(poisoned, clean)


def test_head_mask():
    case = Case(jnp.float32)
    mask = np.random.default_rng(3).random((REQUESTS, KV_HEADS, HEADS, RECORDS)) > 0.4
    mask[0, 0, 0] = False
    got, want = case.run(case.poisoned, head_mask=mask), case.want(head_mask=mask)
    agree(got, want, jnp.float32)
    assert not np.asarray(got[0])[0, 0, 0].any() and got[1][0, 0, 0] == -np.inf


def test_a_mask_of_all_is_no_mask():
    case = Case(jnp.float32)
    everything = np.ones((REQUESTS, KV_HEADS, HEADS, RECORDS), bool)
    for masked, plain in zip(case.run(case.rows, head_mask=everything), case.run(case.rows), strict=True):
        # Two programs, which a compiler may fuse differently: a few units in the last place (1.2e-7 each).
        np.testing.assert_allclose(masked, plain, rtol=1e-6, atol=1e-7)


def test_rows_of_one_kv_head():
    """Records of one KV head, rows that are pairs of request and KV head: what records of all heads give."""
    case = Case(jnp.float32)
    want, want_sum = case.want()
    kv = np.moveaxis(case.poisoned.view(np.float32).reshape(GROUPS, SLOTS, TOKENS, 2, KV_HEADS, CHANNELS), 4, 2)
    rows = to_words(kv.reshape(GROUPS, SLOTS * KV_HEADS, -1))
    head = np.arange(KV_HEADS)[None, :, None]
    place = np.where(case.place[:, None] >= 0, case.place[:, None] * KV_HEADS + head, -1)
    got, got_sum = attention(
        case.query.reshape(REQUESTS * KV_HEADS, 1, HEADS, CHANNELS), jnp.asarray(rows), jnp.int32(0),
        jnp.asarray(place.reshape(-1, RECORDS), jnp.int32),
        jnp.asarray(np.repeat(case.visible, KV_HEADS, axis=0), jnp.int32), dtype=jnp.float32,
    )  # fmt: skip
    agree((got.reshape(want.shape), got_sum.reshape(want_sum.shape)), (want, want_sum), jnp.float32)


@pytest.mark.parametrize("nothing", ["places", "visible"])
def test_a_request_without_anything_gives_zero(nothing):
    case = Case(jnp.float32)
    if nothing == "places":
        case.place[1] = -1
    else:
        case.visible[1] = 0
    out, logsumexp = case.run(np.full_like(case.rows, NAN_WORD) if nothing == "places" else case.rows)
    assert not np.asarray(out)[1].any() and np.all(np.asarray(logsumexp)[1] == -np.inf)


def test_large_logits_do_not_overflow():
    case = Case(jnp.float32)
    case.query = case.query * 1000
    got, want = case.run(case.rows), case.want()
    # Logits of several thousand round by about 1e-3, which moves a weight by as much, relatively, and values reach 5.
    np.testing.assert_allclose(got[0], want[0], rtol=0, atol=1e-2)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=0)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_lowers_anywhere(platform):
    case = Case(jnp.bfloat16)
    place, visible = (jnp.asarray(x, jnp.int32) for x in (case.place, case.visible))
    run = functools.partial(sparse_gqa, scale=SCALE, dtype=jnp.bfloat16, implementation="xla")
    text = lowered_for(run, platform, case.query, jnp.asarray(case.rows), jnp.int32(0), place, visible)
    assert text.count("stablehlo.dot_general") == 2
    assert text.count("stablehlo.optimization_barrier") == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": jnp.zeros((3, 2, 16))}, "query must have shape"),
        ({"hot_rows": jnp.zeros((2, 12, 512), jnp.int32)}, "hot_rows must be uint32, got int32"),
        ({"place": jnp.zeros((2, 4), jnp.int32)}, r"place must have shape \[3, 'any'\], got \[2, 4\]"),
        ({"place": jnp.zeros((3, 4), jnp.int16)}, "place must be int32, got int16"),
        ({"visible": jnp.zeros((3, 5), jnp.int32)}, r"visible must have shape \[3, 4\], got \[3, 5\]"),
        ({"head_mask": jnp.zeros((3, 2, 2, 5), bool)}, "head_mask must have shape"),
        ({"head_mask": jnp.zeros((3, 2, 2, 4), jnp.int32)}, "head_mask must be bool, got int32"),
        ({"hot_rows": jnp.zeros((2, 12, 100), jnp.uint32)}, "400 bytes, not a multiple of the 256 bytes of one token"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    given = {
        "query": jnp.zeros((3, 2, 2, 16)),
        "hot_rows": jnp.zeros((2, 12, 512), jnp.uint32),
        "group": 0,
        "place": jnp.zeros((3, 4), jnp.int32),
        "visible": jnp.zeros((3, 4), jnp.int32),
        "head_mask": None,
    }
    with pytest.raises(ValueError, match=message):
        sparse_gqa(**(given | changes), scale=1.0, dtype=jnp.float32)
