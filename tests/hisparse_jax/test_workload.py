# SPDX-License-Identifier: Apache-2.0
"""The synthetic workload: what its scores depend on, what they look like, and the misses that they lead to."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import fit_workload
from hisparse_jax.workload import FITTED, Locality, Noise, synthetic_scores
from pallas_kernels.index_topk import index_topk
from tests.helpers import PLATFORMS, int32, lowered_for, same_bits

RECORD = json.loads((Path(fit_workload.__file__).parent / "results/workload_fit.json").read_text())
STILL = Locality((), recency_fall=16.0, table_spread=0.0)  # popularity alone, but for the newest tokens
LENGTH = [700, 3, 0, 512]
DRAWN = 20000  # tokens that `part` draws for
DEVIATION = DRAWN**-0.5  # of a mean of so many draws that have a deviation of 1, and of a correlation: 0.7 %


@functools.partial(jax.jit, static_argnames=("records", "locality"))
def scores_of(length, table, *, records=700, locality=FITTED):
    """Synthetic scores `[R, records]`, as a model gets them: jitted, with a traced table."""
    return synthetic_scores(jnp.zeros((length.shape[0], records)), length, table, locality)


def one(length, table=0, **kwargs) -> np.ndarray:
    """The scores of one request's visible tokens."""
    return np.asarray(scores_of(int32([length]), int32(table), **kwargs))[0, :length]


def part(noise: Noise, length: int, table=0, before=(), spread=0.0) -> np.ndarray:
    """What one noise adds to each of the first tokens."""
    still = dataclasses.replace(STILL, table_spread=spread)
    moving = dataclasses.replace(still, noises=(*before, noise))
    at = int32([length])
    with_noise, without = (scores_of(at, int32(table), records=DRAWN, locality=x) for x in (moving, still))
    return np.asarray(with_noise - without)[0]


def test_same_scores_whatever_else_runs():
    """Alone and in a batch, jitted or not, with more room or less, whatever the indexer says."""
    want = scores_of(int32(LENGTH), int32(5))
    same_bits(scores_of(int32(LENGTH), int32(5)), want)
    same_bits(synthetic_scores(jnp.full((4, 700), 3.0), int32(LENGTH), 5), want)
    for requests in (1, 2, 3):
        same_bits(scores_of(int32(LENGTH[:requests]), int32(5)), want[:requests])
    same_bits(scores_of(int32(LENGTH), int32(5), records=900)[:, :700], want)
    same_bits(synthetic_scores(jnp.zeros((4, 700)), int32(LENGTH), 5, dataclasses.replace(FITTED)), want)
    assert want.dtype == jnp.float32 and np.isfinite(want).all()


def test_in_a_loop_over_tables():
    """As a stack of layers calls it; every table, every request, every seed and every step differ."""
    length = int32([600, 600, 601])
    tables = jax.lax.map(lambda table: scores_of(length, table), int32(np.arange(5)))
    for table in range(5):
        same_bits(tables[table], scores_of(length, int32(table)))
    streams = np.asarray(tables).reshape(15, 700)[:, :600]
    other = one(600, locality=dataclasses.replace(FITTED, seed=1))
    assert np.abs(np.corrcoef(np.vstack([streams, other])) - np.eye(16)).max() < 0.35  # recency is shared
    assert not np.array_equal(streams[0], one(601)[:600])


def test_scores_that_are_not_numbers_stay():
    """So the kernel that makes them can't be left out of a program."""
    real = jnp.zeros((2, 64)).at[0, 7].set(jnp.nan).at[1, 60].set(jnp.inf)
    got = synthetic_scores(real, int32([64, 64]), 0)
    assert np.argwhere(np.isnan(got)).tolist() == [[0, 7]]
    same_bits(got[1], scores_of(int32([64, 64]), int32(0), records=64)[1])


def operations(jaxpr):
    """Name and output shape of every operation, inner ones too."""
    for equation in jaxpr.eqns:
        inner = [value for value in equation.params.values() if hasattr(value, "eqns") or hasattr(value, "jaxpr")]
        for value in inner:
            yield from operations(getattr(value, "jaxpr", value))
        if not inner:
            yield from ((equation.primitive.name, out.aval.shape) for out in equation.outvars)


def test_elementwise_and_cheap():
    call = jax.make_jaxpr(lambda *args: synthetic_scores(*args, FITTED))
    found = list(operations(call(jnp.zeros((3, 700)), int32([1, 2, 3]), int32(0)).jaxpr))
    allowed = {
        "add", "sub", "mul", "and", "or", "xor", "shift_left", "shift_right_logical", "shift_right_arithmetic", "max",
        "convert_element_type", "bitcast_convert_type", "iota", "broadcast_in_dim", "reshape", "ne", "select_n",
    }  # fmt: skip
    assert {name for name, _ in found} <= allowed
    assert len([name for name, shape in found if shape == (3, 700) and name != "convert_element_type"]) <= 70


@pytest.mark.parametrize("platform", PLATFORMS)
def test_lowers(platform):
    args = jnp.zeros((2, 128)), int32([100, 0]), int32(0)
    lowered_for(synthetic_scores, platform, *args)


def test_selections_are_valid():
    length = int32([700, 40, 0, 641])
    for table in range(3):
        selected = np.asarray(index_topk(scores_of(length, int32(table)), length, 64))
        for row, count in zip(selected, [64, 40, 0, 64], strict=True):
            assert (np.diff(row[:count]) > 0).all() and (row[count:] == -1).all()
            assert not count or 0 <= row[0] <= row[count - 1] < 700


def test_an_octave_more_is_half_as_many():
    popularity = one(2**18, records=2**18, locality=STILL)[:-256]
    counts = [(popularity > octaves).mean() for octaves in range(9)]
    # About 1024 tokens are above 8 octaves: the deviation of their number.
    np.testing.assert_allclose(counts, 0.5 ** np.arange(9), rtol=1024**-0.5)


@pytest.mark.parametrize("before", [(), (Noise(0.0, 1.0),), (Noise(0.0, 1.0), Noise(0.0, 5.0))])
def test_noise_is_as_large_and_lasts_as_long_as_it_says(before):
    """A fifth of the tokens draws anew in each of five steps, and a new value has nothing to do with the old one.

    Tolerances are three deviations of what is estimated.
    """
    values = np.array([part(Noise(0.75, 5.0), 30000 + step, before=before) for step in range(12)])
    np.testing.assert_allclose(values.std(axis=1), 0.75, rtol=3 * 0.6 * DEVIATION)  # 0.6: a triangular distribution
    np.testing.assert_allclose(values.mean(axis=1), 0.0, atol=3 * 0.75 * DEVIATION)
    anew = (values[1:] != values[:-1]).mean(axis=1)
    np.testing.assert_allclose(anew, 0.2, atol=3 * 0.4 * DEVIATION)  # 0.4: yes or no, one in five
    correlation = [np.corrcoef(values[0], values[lag])[0, 1] for lag in range(12)]
    np.testing.assert_allclose(correlation, np.maximum(0, 1 - np.arange(12) / 5), atol=3 * DEVIATION)


def test_noises_have_nothing_to_do_with_each_other():
    first, second = Noise(1.0, 1.0), Noise(1.0, 6.0)
    columns = [part(first, 900), part(second, 900, before=(Noise(0.0, 1.0),)), part(first, 900, table=1),
               np.asarray(scores_of(int32([900]), int32(0), records=DRAWN, locality=STILL))[0]]  # fmt: skip
    rows = np.array(columns)[:, :800]
    assert np.abs(np.corrcoef(rows) - np.eye(4)).max() < 3 * 800**-0.5  # deviations of a correlation of 800


def test_tables_differ_by_as_much_as_they_may():
    sizes = np.array([part(Noise(1.0, 1.0), 9000, table, spread=0.4).std() for table in range(21)])
    np.testing.assert_allclose(sizes[0], 1.0, atol=3 * 0.6 * DEVIATION)  # as of the noise above
    np.testing.assert_allclose(sizes.mean(), 1.0, atol=0.4 / 21)  # places of 21 tables are even to 1 in 21
    assert 0.58 < sizes.min() < 0.66 and 1.34 < sizes.max() < 1.42


@pytest.mark.parametrize("length", [4096, 2**16])
def test_the_newest_tokens_come_first(length):
    """With a fall of 2 the newest has log2(length) octaves on top, and sqrt(length) tokens have something."""
    flat = dataclasses.replace(STILL, recency_fall=2.0)
    more = one(length, records=length, locality=flat) - one(length, records=length, locality=STILL)
    newest = more[::-1]
    assert newest[0] == 0  # STILL favours the newest as much
    assert newest[15] == np.log2(length) - 8
    assert (newest[2 : int(length**0.5) - 1] > 0).all() and not newest[int(length**0.5) :].any()


def test_some_tables_of_a_model_are_the_same_as_in_the_whole():
    some = dataclasses.replace(FITTED, first_table=10)
    same_bits(scores_of(int32(LENGTH), int32(1), locality=some), scores_of(int32(LENGTH), int32(11)))


@pytest.mark.parametrize(
    "wrong",
    [{"noises": (Noise(1.0, 0.5),)}, {"noises": (Noise(-1.0, 1.0),)}, {"noises": (Noise(19.0, 1.0),)},
     {"recency_fall": 0.0}, {"table_spread": 1.5}, {"seed": -1}],
)  # fmt: skip
def test_what_can_not_be(wrong):
    with pytest.raises(ValueError):
        dataclasses.replace(FITTED, **wrong)


def test_the_record_is_of_the_fitted_parameters():
    noises = tuple(Noise(**noise) for noise in RECORD["parameters"]["noises"])
    assert Locality(**RECORD["parameters"] | {"noises": noises}) == FITTED
    assert {(line["rule"], line["hot_slots"]): line["target"] for line in RECORD["fit"]} == fit_workload.TARGETS
    for line in RECORD["fit"]:
        assert abs(line["residual"]) < (1.5 if line["rule"] == "hit_first_lru" else 2.0), line
    by_context = [line["misses"] for line in RECORD["contexts"] if line["prompt_tokens"] >= 32768]
    assert len(by_context) == 3 and max(by_context) - min(by_context) < 2


def test_the_docs_show_the_record():
    text = (Path(fit_workload.__file__).parents[1] / "docs/workload.md").read_text()
    for line in RECORD["fit"]:
        row = f"| {line['hot_slots']} | {line['target']} | {line['misses']} | {line['residual']:+} |"
        assert row in text, row
    assert " | ".join(str(line["misses"]) for line in RECORD["contexts"]) in text
    assert ", ".join(f"({noise.octaves}, {noise.steps})" for noise in FITTED.noises) in text


def test_misses_are_those_of_the_record():
    """A short run of four tables, each within a point of what the record says of it."""
    protocol = dataclasses.replace(fit_workload.RECORD, tables=4, warm_up=60, counted=20, ahead=0)
    got = fit_workload.misses(FITTED, protocol, [("hit_first_lru", 4096)])["hit_first_lru", 4096]
    (want,) = (
        line["by_table"] for line in RECORD["fit"] if line["rule"] == "hit_first_lru" if line["hot_slots"] == 4096
    )
    np.testing.assert_allclose(got, want[:4], atol=1.0)
    assert np.ptp(got) > 3


def test_random_replacement_is_a_permutation():
    hit = jnp.arange(64) % 3 == 0
    first, second = (np.asarray(fit_workload.random(x, ~x)) for x in (hit, hit.at[1].set(True)))
    assert sorted(first) == sorted(second) == list(range(64)) and first.dtype == np.int32
    assert (first != second).any()
