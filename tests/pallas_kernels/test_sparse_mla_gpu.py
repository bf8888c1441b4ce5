# SPDX-License-Identifier: Apache-2.0
"""On the GPU: latent attention against float64, wherever the rows lie, and past 4 GiB."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.online_softmax import Split
from pallas_kernels.row_format import RowFormat
from pallas_kernels.sparse_mla import mosaic_gpu, reference, sparse_mla
from pallas_kernels.sparse_mla.tuning import tuning
from tests.pallas_kernels.attention_cases import MLA_SCALE, OUT_TOLERANCE, agree, mla_case, moved
from tests.pallas_kernels.kernel_cases import needs_gpu, same

pytestmark = needs_gpu
RECORDS = ("bfloat16", "fp8")
# The weight of a single place is 1: exp2, reciprocal and products are then off by a few last bits of a float32 (2^-23).
ONE_PLACE = 1e-6
LAUNCHES: list[dict[str, Any]] = [
    {"handed_on": False},
    {"consumer_registers": (224, 168), "producer_registers": 112},
]


@functools.cache
def attend(row: RowFormat, how=None):
    if how is not None:
        return jax.jit(functools.partial(mosaic_gpu.sparse_mla, row=row, scale=MLA_SCALE, how=how))
    return jax.jit(functools.partial(sparse_mla, row=row, scale=MLA_SCALE, implementation="mosaic_gpu"))


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize(
    "requests, heads, selected",
    [(1, 64, 64), (1, 64, 2048), (5, 16, 77), (3, 128, 333), (2, 96, 63), (6, 64, 1), (2, 1, 65), (140, 64, 200),
     (8, 128, 2048)],
)  # fmt: skip
def test_against_float64(record, requests, heads, selected):
    """Ragged, with gaps, one place, none at all; NaN in every slot that isn't selected."""
    case = mla_case(record, requests, heads, selected)
    agree(attend(case.row)(*case.args()), case.want())


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("requests, selected", [(2, 640), (64, 200)])
def test_the_same_bits_wherever_the_rows_lie(record, requests, selected):
    """And at every run: how a residency places its rows must not change the result."""
    case = mla_case(record, requests, 64, selected)
    first = attend(case.row)(*case.args())
    for seed, extra in enumerate((0, 1000, 7)):
        same(attend(case.row)(*case.args(*moved(case.words, case.place, extra, seed))), first, f"{extra} more slots: ")
    for i in range(5):
        same(attend(case.row)(*case.args()), first, f"run {i}: ")


@pytest.mark.parametrize("record", RECORDS)
def test_parts(record):
    """Any number of parts, the last of them partly or wholly empty; the same bits whatever else the launch says."""
    case = mla_case(record, 4, 64, 700)
    want = case.want()
    for split in (Split(1, 11), Split(2, 6), Split(3, 4), Split(11, 1), Split(6, 2)):
        how = tuning(4, 64, 700)._replace(split=split)
        got = attend(case.row, how)(*case.args())
        agree(got, want)
        for change in LAUNCHES:
            same(attend(case.row, how._replace(**change))(*case.args()), got, f"{split}, {change}: ")


@pytest.mark.parametrize("record", RECORDS)
def test_like_the_reference(record):
    """A dequantised record is the reference's to the last of its 8 bits: attending to one place gives it back."""
    case = mla_case(record, 64, 64, 1)
    out, _ = attend(case.row)(*case.args())
    records = reference.read_rows(jnp.asarray(case.words[1]), case.row)[..., :512].astype(jnp.float32)
    want = np.where(case.place >= 0, np.asarray(records)[np.maximum(case.place[:, 0], 0)], 0)
    np.testing.assert_allclose(out[:, 0], want.astype(np.float32), rtol=ONE_PLACE, atol=0)
    got, want = attend(case.row)(*case.args()), jax.jit(
        functools.partial(reference.sparse_mla, row=case.row, scale=MLA_SCALE)
    )(*case.args())  # fmt: skip
    np.testing.assert_allclose(got[0], want[0], rtol=0, atol=OUT_TOLERANCE)


def test_every_code_with_scales_of_many_sizes():
    """All finite e4m3 codes, 256 scales from 2^-149 to 2^118: the reference's numbers, the same bits by every launch.

    Numbers below 2^-100 are compared between launches only.
    """
    requests, rng = 64, np.random.default_rng(0)
    row = RowFormat(512, 64, "fp8")
    codes = np.tile(np.arange(256, dtype=np.uint8), (requests, 2))
    codes = rng.permuted(np.where(codes & 0x7F == 0x7F, 0, codes), axis=1)
    scales = np.ldexp(rng.choice([1, 1, 1.1, -1.7], 256), np.linspace(-149, 118, 256).astype(int)).astype(np.float32)
    parts = codes.view(np.uint32), rng.permutation(scales).reshape(-1, 4).view(np.uint32), np.zeros((requests, 32))
    words = np.concatenate([part.astype(np.uint32) for part in parts], axis=1)[None]
    query = jnp.zeros((requests, 1, 576), jnp.bfloat16)
    args = query, jnp.asarray(words), jnp.int32(0), jnp.asarray(rng.permutation(requests)[:, None], jnp.int32)
    got = attend(row, tuning(requests, 1, 1))(*args)
    want = np.asarray(reference.read_rows(args[1][0], row)[:, :512].astype(jnp.float32))[np.asarray(args[3][:, 0])]
    assert np.isfinite(want).all()
    normal = np.abs(want) > 2.0**-100
    np.testing.assert_allclose(np.asarray(got[0])[:, 0][normal], want[normal], rtol=ONE_PLACE, atol=0)
    for change in LAUNCHES:
        same(attend(row, tuning(requests, 1, 1)._replace(**change))(*args), got, f"{change}: ")


def test_nan_queries_of_inactive_requests():
    case = mla_case("bfloat16", 3, 64, 100)
    case = case._replace(query=case.query.at[-1].set(jnp.nan))
    out, total = attend(case.row)(*case.args())
    assert not np.asarray(out[-1]).any() and np.isneginf(np.asarray(total[-1])).all()


@pytest.mark.parametrize("record", RECORDS)
def test_rows_past_4_gib(record):
    """Group 1 of rows that are 6 GiB; the last slots."""
    case = mla_case(record, 4, 64, 300)
    slots = (6 << 30) // 2 // case.row.row_bytes
    n = case.words.shape[1]

    @functools.partial(jax.jit, static_argnums=1)
    def large(small, slots):
        rows = jnp.full((2, slots, case.row.words), 0xFFFFFFFF, jnp.uint32)
        return jax.lax.dynamic_update_slice(rows, small, (jnp.int32(1), jnp.int32(slots - n), jnp.int32(0)))

    hot = large(jnp.asarray(case.words[1:]), slots)
    place = np.where(case.place >= 0, case.place + (slots - n), -1).astype(np.int32)
    got = attend(case.row)(case.query, hot, jnp.int32(1), jnp.asarray(place))
    same(got, attend(case.row)(*case.args()), "past 4 GiB: ")


def test_in_a_loop_nothing_of_the_size_of_the_rows_is_copied():
    case = mla_case("bfloat16", 8, 64, 512, slots=65536)
    query, words, group, place = case.args()

    def loop(query, words):
        def step(_, q):
            out, _ = sparse_mla(q, words, group, place, row=case.row, scale=MLA_SCALE, implementation="mosaic_gpu")
            return q.at[:, :, :512].set(out.astype(q.dtype))

        return jax.lax.fori_loop(0, 3, step, query)

    memory = jax.jit(loop).lower(query, words).compile().memory_analysis()
    assert memory.temp_size_in_bytes < words.nbytes // 4, memory
