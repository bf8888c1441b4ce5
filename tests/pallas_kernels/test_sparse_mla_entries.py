# SPDX-License-Identifier: Apache-2.0
"""Decode attention over compressed entries, a window and a sink against float64; its kernel lowered and interpreted."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.online_softmax import Split
from pallas_kernels.sparse_mla import arg_specs, entry_bytes, mosaic_gpu, read_entries, sparse_entries
from pallas_kernels.sparse_mla.tuning import tiles_of, tuning
from tests.pallas_kernels.attention_cases import MLA_SCALE, OUT_TOLERANCE, agree, entry_case
from tests.pallas_kernels.kernel_cases import DEVICES, ON_GPU, abstract_gpu, lower_for_cuda, without_races

on_cpu = pytest.mark.skipif(ON_GPU, reason="runs on the CPU")
# A softmax over at most 30 records of 128 numbers; bfloat16 rounds the weights to 8 bits.
TOLERANCE = {"float32": 3e-6, "bfloat16": OUT_TOLERANCE, "fp8": OUT_TOLERANCE}
# Log-sum-exps are float32 for all records and below 8: four roundings.
TOTAL_TOLERANCE = 4 * 8 * 2.0**-24


def attend(case, implementation="xla"):
    run = functools.partial(sparse_entries, record=case.record, scale=MLA_SCALE, implementation=implementation)
    return jax.jit(run)(*case.args())


@pytest.mark.parametrize("record", TOLERANCE)
@pytest.mark.parametrize("selected, window", [(20, 10), (20, 0), (0, 10)])
def test_against_float64(record, selected, window):
    """Gaps, no entries, no window, neither; NaN in every slot that isn't selected, the first one too."""
    case = entry_case(record, 5, 8, selected, window, width=128)
    out, total = attend(case)
    want = case.want()
    np.testing.assert_allclose(out, want[0], rtol=0, atol=TOLERANCE[record])
    np.testing.assert_allclose(total, want[1], rtol=0, atol=TOTAL_TOLERANCE)
    assert not np.asarray(out[-1]).any()
    np.testing.assert_allclose(total[-1], case.sink, rtol=2.0**-23)  # log(exp(0)) + sink: its last bit


def test_a_sink_only_takes_weight():
    """Without sinks the result is a plain softmax; a sink scales it by what the records keep of the weight."""
    case = entry_case("float32", 2, 4, 20, 10, width=128)
    plain = attend(case._replace(sink=np.full(4, -np.inf, np.float32)))
    out, total = attend(case)
    np.testing.assert_allclose(total[0], jnp.logaddexp(plain[1][0], case.sink), rtol=0, atol=TOTAL_TOLERANCE)
    kept = jnp.exp(plain[1][0] - total[0])
    # Two log-sum-exps below 8, each off by one rounding, in the exponent of what multiplies numbers below 1.
    np.testing.assert_allclose(out[0], plain[0][0] * kept[:, None], rtol=0, atol=2 * 8 * 2.0**-24)


def test_bytes_of_entries():
    assert [entry_bytes(512, record) for record in ("bfloat16", "fp8", "float32")] == [1024, 584, 2048]
    row = np.zeros(584, np.uint8)
    row[:448] = np.repeat(np.arange(7), 64) + 0x38  # 1, 1.125, ...
    row[448:576] = np.asarray(jnp.arange(64, dtype=jnp.bfloat16)).view(np.uint8)
    row[576:584] = [127, 128, 126, 0, 254, 255, 120, 0]
    got = np.asarray(read_entries(jnp.asarray(row.view(np.uint32)), 512, "fp8")).astype(np.float64)
    want = [1.0, 1.125 * 2, 1.25 / 2, None, 1.5 * 2.0**127, np.nan, 1.75 / 128]  # a CPU may flush 2^-127 to zero
    for tile, value in enumerate(want):
        if value is not None:
            np.testing.assert_array_equal(got[64 * tile : 64 * tile + 64], np.float64(value))
    np.testing.assert_array_equal(got[448:], np.arange(64))


def test_arguments_are_checked():
    case = entry_case("bfloat16", 2, 4, 20, 10)
    query, *rest = case.args()
    run = functools.partial(sparse_entries, record="bfloat16", scale=1.0)
    with pytest.raises(ValueError, match=r"hot_rows must have shape \['any', 'any', 255\]"):
        run(query[..., :510], *rest)
    with pytest.raises(ValueError, match=r"sink must have shape \[4\]"):
        run(query, *rest[:-1], rest[-1][:3])
    with pytest.raises(ValueError, match="fp8 entries have a multiple of 64 numbers"):
        run(query[..., :100], *rest, record="fp8")
    for record, width, why in (("fp8", 512, "bfloat16 entries, got fp8"), ("bfloat16", 128, "512 numbers, got 128")):
        case = entry_case(record, 2, 4, 20, 10, width=width)
        with abstract_gpu(), pytest.raises(ValueError, match=why):
            sparse_entries(*case.args(), record=record, scale=1.0, implementation="mosaic_gpu")


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("name", arg_specs.ENTRY_SPECS)
def test_lowers(name, kind):
    args = arg_specs.abstract_entry_args(arg_specs.ENTRY_SPECS[name])
    run = functools.partial(sparse_entries, record="bfloat16", scale=0.1, implementation="mosaic_gpu")
    text = lower_for_cuda(lambda args: run(**args), args, kind=kind)
    assert text.count("kernel_hash") == 1 and "mosaic_gpu" in text


@on_cpu
@pytest.mark.parametrize(
    "requests, heads, selected, window, parts, change",
    [
        (5, 16, 100, 70, 1, {}),
        (2, 64, 130, 128, 2, {"handed_on": False}),
        (2, 64, 130, 128, 5, {}),
        (3, 128, 0, 90, 1, {}),
        (3, 24, 70, 0, 2, {}),
    ],
)
def test_interpreted(requests, heads, selected, window, parts, change):
    case = entry_case("bfloat16", requests, heads, selected, window)
    tiles = tiles_of(selected) + tiles_of(window)
    how = tuning(requests, heads, selected, window=window)._replace(split=Split(parts, -(-tiles // parts)), **change)
    with without_races():
        got = jax.jit(functools.partial(mosaic_gpu.sparse_entries, scale=MLA_SCALE, how=how))(*case.args())
    agree(got, case.want())
    assert not np.asarray(got[0][-1]).any()


@pytest.mark.parametrize("requests, selected, window", [(1, 512, 128), (64, 512, 128), (64, 0, 128), (64, 77, 0)])
def test_launches(requests, selected, window):
    """Parts cover the tiles of entries and of the window."""
    parts, tiles = tuning(requests, 64, selected, window=window).split
    want = tiles_of(selected) + tiles_of(window)
    assert parts * tiles >= want > (parts - 1) * tiles
