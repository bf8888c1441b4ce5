# SPDX-License-Identifier: Apache-2.0
"""Throughput of a small published shape, end to end on the CPU: tokens, misses, the memory rule, what is written.

One file of over 400 lines, as its tests share one run, which is compiled once.
"""

from __future__ import annotations

import io
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from hisparse_jax import config as configs
from hisparse_jax import decode, simulated, throughput
from hisparse_jax.cache.state import create
from hisparse_jax.errors import ExpectationError, UserError
from hisparse_jax.synthetic import compile_admission, random_index, random_rows
from hisparse_jax.throughput import Point, Pool, Share, points
from hisparse_jax.workload import synthetic_scores
from models import sizes
from tests import dsa_small, oracles
from tests.helpers import layout, same_bits

# A layer alone, another, an anchor with two followers; the share has the last two groups.
SMALL = replace(
    dsa_small.CONFIG, anchors=(True, True, True, False, False), dense=(False,) * 5, selected=64, max_tokens=2048
)
TEXT = """
name: small
model: {published: Small, dtype: bfloat16}
selection: {kind: dsa}
cache: {hot_slots: 128, ring_slots: 8, page_records: 16}
decode: {steps: 4}
synthetic:
  first_layer: 1
  layers: 4
  ranks: 2
  contexts: [1024]
  concurrency: [1, 3]
  warmup_steps: 8
  steps: 4
  repeats: 2
  cold_concurrency: [3]
  weight_bytes: 2.0
"""
MODES = ("full", "sync", "prefetch", "no_io")
DEVICE = 700_000  # bytes: three requests in full are too many then
# Of one rank of two: 5 layers of attention, norms and expert layers, 3 indexers, half the vocabulary twice, one norm.
ATTENTION = 32 * (16 + 16 + 4) + 16 * 2 * (8 + 4) + 2 * (8 + 8) * 16 + 2 * 8 * 32 + 16 + 16
EXPERTS = (2 + 1) * 3 * 32 * 8 + 32 * 2 + 2
INDEXER = 16 * 3 * 8 + 32 * (8 + 3) + 2 * 8
RANK = 5 * (ATTENTION + 2 * 32 + EXPERTS) + 3 * INDEXER + 2 * 24 * 32 + 32
BUDGET = (0.85 * DEVICE - 2 * RANK) * 4 / 5


@pytest.fixture(autouse=True)
def small_shape(monkeypatch):
    monkeypatch.setitem(sizes.PUBLISHED, "Small", SMALL)
    monkeypatch.setattr(simulated, "device_bytes", lambda: DEVICE)


def parse(*overrides: str) -> configs.Config:
    return configs.parse(TEXT, "test", overrides)


def console() -> Console:
    return Console(file=io.StringIO(), width=200)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """One run of all modes: its folder, its result, what it printed. Compiled with little care, which takes less."""
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sizes.PUBLISHED, "Small", SMALL)
        patch.setattr(simulated, "device_bytes", lambda: DEVICE)
        patch.setattr(throughput.os, "cpu_count", lambda: 4)  # two programs are compiled at a time
        for module in (decode, throughput):
            patch.setattr(module, "decode_options", lambda **_: quick, raising=False)
        out = console()
        folder = throughput.run(replace(parse(), runs=str(tmp_path_factory.mktemp("runs"))), out)
    return SimpleNamespace(
        folder=folder, result=json.loads((folder / "result.json").read_text()), printed=out.file.getvalue()
    )


@pytest.fixture(scope="module")
def timed(done):
    return {(point["requests"], point["mode"]): point for point in done.result["points"]}


def test_every_point_is_there(done, timed):
    assert list(timed) == [(requests, mode) for requests in (3, 1) for mode in MODES]
    assert {path.name for path in done.folder.iterdir()} == {"result.json", "result.png"}
    for point in timed.values():
        assert point["step_ms"] > 0 and len(point["step_ms_samples"]) == 2
        assert point["step_ms"] == pytest.approx(np.median(point["step_ms_samples"]))
        assert point["tokens_per_s"] == pytest.approx(1e3 * point["requests"] / point["step_ms"])
        assert ("first_step_ms" in point) == (point["requests"] == 3)


def test_the_record_says_what_it_is(done):
    result = done.result
    assert result["label"].startswith("synthetic: random weights")
    assert result["simulated"] == "layers 1 to 4 of 5 of Small, one rank of 2"
    assert result["config"]["synthetic"]["weight_bytes"] == 2.0 and result["wall_s"] > 0
    assert result["locality"]["recency_fall"] == 2.0 and result["environment"]["platform"] == "cpu"
    assert [sorted(entry) for entry in result["summary"]][-1] == ["context", "peak_ratio", "peaks"]
    for words in ("layers 1 to 4 of 5 of Small", "synthetic", "no_io (output invalid)", "written to"):
        assert words in done.printed, words


def test_modes_with_valid_output_emit_the_same_tokens(done, timed):
    for requests in (1, 3):
        valid = {timed[requests, mode]["tokens"] for mode in ("full", "sync", "prefetch")}
        assert len(valid) == 1 and timed[requests, "no_io"]["tokens"] not in valid
    assert timed[1, "full"]["tokens"] != timed[3, "full"]["tokens"]
    assert all(entry["same_tokens"] for entry in done.result["summary"] if "requests" in entry)


def misses_by_hand(request: int, table: int, first: int, steps: int) -> list[int]:
    """Misses of one request, step by step from its first one, by the NumPy cache; a table lies before the share."""
    trace, lengths = [], range(first, first + steps)
    for length in lengths:
        scores = synthetic_scores(jnp.zeros((3, 1024)), jnp.full(3, length, jnp.int32), jnp.int32(1 + table))
        best = np.argsort(-np.asarray(scores)[request, :length], kind="stable")[:64]
        trace.append(np.sort(best).astype(np.int32))
    return oracles.count_misses(
        trace, lengths, oracles.admitted_table(first, 128), hot_slots=128, ring_slots=8, rule=oracles.hit_first_lru
    )


def test_misses_are_as_counted_by_hand(timed):
    """The first step, then 8 to warm up, then 8 that count; three requests began with the first, one without."""
    room = Share(parse()).steps
    by_table = np.array([[misses_by_hand(r, t, 1024 - room + 1, 17) for t in range(2)] for r in range(3)])
    for mode in ("sync", "prefetch", "no_io"):
        np.testing.assert_allclose(timed[3, mode]["first_step_misses"], by_table[..., 0].mean(axis=0))
        np.testing.assert_allclose(timed[3, mode]["misses_per_table_and_request"], by_table[..., 9:].mean(axis=(0, 2)))
        np.testing.assert_allclose(timed[1, mode]["misses_per_table_and_request"], by_table[0, :, 8:16].mean(axis=1))
        for requests in (1, 3):
            point = timed[requests, mode]
            one, other = point["misses_per_table_and_request"]
            assert point["miss_rate"] == pytest.approx((one + other) / 2 / 64)
            rows = (one + 3 * other) * requests * (mode != "no_io")  # those of followers too
            assert point["fetched_bytes_per_step"] == pytest.approx(rows * 40)
    assert timed[3, "full"]["misses_per_table_and_request"] == [0, 0]


def test_a_cold_first_step_misses_nearly_everything(timed):
    """All but the ring: of the newest 8 tokens most are selected, of the others none is there."""
    for mode in ("sync", "prefetch", "no_io"):
        point = timed[3, mode]
        assert all(64 - 8 <= missed <= 64 for missed in point["first_step_misses"])
        assert min(point["first_step_misses"]) > 3 * max(point["misses_per_table_and_request"])
    assert timed[3, "full"]["first_step_misses"] == [0, 0]


def test_the_memory_rule_by_hand(done, timed):
    rule = done.result["rule"]
    assert rule == {
        "device_bytes": DEVICE, "device_share": 0.85, "rank_weight_bytes_of_the_whole_model": 2 * RANK,
        "simulated_layers": 4, "all_layers": 5, "cache_bytes": int(BUDGET),
    }  # fmt: skip
    index, small = 2 * 1024 * 8 * 2, 2 * 3 * 4 + 4 + 1  # keys of two anchors; counters, a length, active or not
    full = 4 * 1024 * 40 + index + small
    sparse = 4 * (128 + 8) * 40 + index + 2 * 128 * (4 + 2) + 1024 // 16 * 4 + small  # tables, host pages
    for (requests, mode), point in timed.items():
        assert point["request_bytes"] == (full if mode == "full" else sparse), mode
        assert point["fits_by_rule"] == (requests * point["request_bytes"] <= BUDGET)
    assert full < BUDGET < 3 * full and 3 * sparse < BUDGET
    assert not timed[3, "full"]["fits_by_rule"] and done.result["summary"][-1]["peaks"]["full"]["requests"] == 1


# --- runs that compile nothing ---------------------------------------------------------------------------------------


def pretended(monkeypatch, fails=lambda point: None) -> list[tuple[Point, Pool]]:
    """Replaces compiling and timing; `fails` gives the error of a point. What was timed comes back."""
    seen = []

    def time_point(share, point, programs, params, pool, *_):
        seen.append((point, pool))
        if error := fails(point):
            raise error
        return {"step_ms": 1.0, "tokens_per_s": 1e3 * point.requests, "miss_rate": 0.1, "tokens": "a", "compile_s": 0.0}

    monkeypatch.setattr(throughput, "lower_point", lambda *_: SimpleNamespace(compile=lambda after: None))
    monkeypatch.setattr(throughput, "time_point", time_point)
    monkeypatch.setattr(Share, "parameters", lambda self: [])
    return seen


def test_a_point_that_runs_out_of_memory_is_recorded_and_the_rest_goes_on(monkeypatch, tmp_path):
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.")
    seen = pretended(monkeypatch, lambda point: error if point == Point(1024, 3, "full") else None)
    out = console()
    folder = throughput.run(replace(parse("synthetic.contexts=[1024, 512]"), runs=str(tmp_path)), out)
    result = json.loads((folder / "result.json").read_text())
    first, *others = result["points"]
    assert first["error"] == "does not fit in memory" and "step_ms" not in first and first["request_bytes"] > 0
    assert len(others) == 15 and not any("error" in point for point in others)
    assert "1024 tokens x   3 full     does not fit in memory" in out.file.getvalue()
    entries = {(entry["context"], entry.get("requests")): entry for entry in result["summary"]}
    assert "no_io_to_full" not in entries[1024, 3] and entries[1024, 1]["no_io_to_full"] == 1
    pools = [pool for _, pool in seen]
    assert len({id(pool) for pool in pools[:8]}) == 1 and pools[8] is not pools[7]  # another context, another pool


def test_another_error_keeps_what_was_timed_and_fails_the_run(monkeypatch, tmp_path):
    error = jax.errors.JaxRuntimeError("INTERNAL: no")
    pretended(monkeypatch, lambda point: error if point.mode == "sync" and point.requests == 1 else None)
    with pytest.raises(ExpectationError, match=r"1 of 8 points failed, the first with: failed: INTERNAL: no"):
        throughput.run(replace(parse(), runs=str(tmp_path)), console())
    (folder,) = tmp_path.iterdir()
    result = json.loads((folder / "result.json").read_text())
    assert sum("step_ms" in point for point in result["points"]) == 7


def test_an_interrupted_run_keeps_what_was_timed(monkeypatch, tmp_path):
    pretended(monkeypatch, lambda point: KeyboardInterrupt() if point == Point(1024, 1, "sync") else None)
    with pytest.raises(KeyboardInterrupt):
        throughput.run(replace(parse(), runs=str(tmp_path / "late")), console())
    (folder,) = (tmp_path / "late").iterdir()
    result = json.loads((folder / "result.json").read_text())
    assert len(result["points"]) == 5 and result["interrupted"] and result["summary"][0]["step_ms"] == {"full": 1.0}
    pretended(monkeypatch, lambda point: KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        throughput.run(replace(parse(), runs=str(tmp_path / "early")), console())
    assert not list((tmp_path / "early").iterdir())


def test_modes_that_emit_other_tokens_fail_the_run(monkeypatch, tmp_path):
    pretended(monkeypatch)
    timed = throughput.time_point

    def time_point(share, point, *rest):
        return timed(share, point, *rest) | {"tokens": "b" if point.mode == "prefetch" else "a"}

    monkeypatch.setattr(throughput, "time_point", time_point)
    with pytest.raises(ExpectationError, match="the modes did not emit the same tokens"):
        throughput.run(replace(parse(), runs=str(tmp_path)), console())


def test_a_host_pool_that_can_not_be_had_is_refused(monkeypatch):
    monkeypatch.setattr(simulated, "host_limit", lambda: 10**4)
    with pytest.raises(UserError, match=r"host pool of 3 requests of 1024 tokens takes .* XLA_PJRT_GPU_HOST_MEMORY"):
        Share(parse()).check(Point(1024, 1, "sync"))
    Share(parse()).check(Point(1024, 1, "full"))


def test_a_cold_step_where_nothing_is_timed_is_refused():
    with pytest.raises(UserError, match=r"synthetic.cold_concurrency: \[7\] are not among"):
        parse("synthetic.cold_concurrency=[7]")


def test_the_largest_concurrency_comes_first():
    setting = parse("synthetic.modes=[full, no_io]").synthetic
    assert setting is not None
    assert [(point.requests, point.mode) for point in points(setting, 512)] == [
        (3, "full"), (3, "no_io"), (1, "full"), (1, "no_io"),
    ]  # fmt: skip


def test_the_first_mode_of_a_concurrency_is_compiled_before_the_others(monkeypatch):
    """Also where it fails. One thread lowers all of them."""
    lowered_by, compiled = set(), []

    def lower_point(share, point, *_):
        lowered_by.add(threading.get_ident())

        def compile(after):
            if after is not None:
                after.exception()
            if point.mode == "full":
                time.sleep(0.05)  # the others would be done by then
            compiled.append(point)
            if point == Point(1024, 3, "full"):
                raise ValueError("no")
            return point

        return SimpleNamespace(compile=compile)

    monkeypatch.setattr(throughput, "lower_point", lower_point)
    share = Share(parse())
    todo = points(share.setting, 1024)
    with ThreadPoolExecutor(8) as compilers:
        futures = throughput.compile_points(share, todo, [], compilers)
    assert lowered_by == {threading.get_ident()} and set(futures) == set(todo) == set(compiled)
    for point, future in futures.items():
        assert compiled.index(Point(1024, point.requests, "full")) <= compiled.index(point)
        if point != Point(1024, 3, "full"):
            assert future.result() == point
    with pytest.raises(ValueError, match="no"):
        futures[Point(1024, 3, "full")].result()


def test_points_of_a_context_have_pools_of_one_size():
    share = Share(parse())
    for mode in MODES:
        sizes = {share.layout(Point(1024, requests, mode)).pool_rows for requests in (1, 3)}
        assert sizes == {0 if mode == "full" else 4 * 3 * 1024}
    pool = Pool(jnp.zeros((4, 2), jnp.uint32))
    full, sparse = (share.layout(Point(1024, 3, mode)) for mode in ("full", "sync"))
    array = pool.array
    assert pool.lend(full) is None and pool.array is array
    assert pool.lend(sparse) is array and pool.array is None


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["model={path: x.gguf, dtype: bfloat16}"], "model.published: missing; synthetic times a published shape"),
        (["model.records=fp8"], "give dtype: bfloat16 and records: plain"),
        (["model.dtype=float32"], "give dtype: bfloat16 and records: plain"),
        (
            ["synthetic.modes=[fast]"],
            "synthetic.modes.0: input should be 'full', 'sync', 'prefetch' or 'no_io'",
        ),
        (["synthetic.device_share=1.5"], "synthetic.device_share: "),
        (["synthetic.contexts=[25]"], "synthetic.contexts: 25 tokens are no more than the 25 of all steps"),
        (["synthetic.concurency=[1]"], "synthetic.concurency: unknown key, did you mean 'concurrency'?"),
        (["model.published=GLM-9"], "model.published: 'GLM-9' is not known; known: DeepSeek-V3.2, GLM-5.1, GLM-5.2"),
        (
            ["synthetic.first_layer=3", "synthetic.layers=2"],
            "synthetic: layer 3 takes the selection of a layer before it",
        ),
        (["synthetic.layers=9"], "synthetic: layers 1..9 are not all among the model's 5"),
        (["synthetic.ranks=3"], "synthetic: 4 experts, of which a token uses 2, do not go into 3 ranks"),
        (["cache.hot_slots=63"], "cache.hot_slots must be at least the 64 selected records"),
    ],
)
def test_what_can_not_be_run_is_one_line(monkeypatch, tmp_path, overrides, says):
    pretended(monkeypatch)
    with pytest.raises(UserError) as error:
        throughput.run(replace(parse(*overrides), runs=str(tmp_path)), console())
    assert says in str(error.value) and "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_the_preset_is_one_of_these():
    setting = configs.load("glm52_prefetch").synthetic
    assert setting is not None
    share = Share(configs.load("glm52_prefetch"))
    assert share.shape.group_sizes == (4, 4) and share.shape.experts == 32
    for context in setting.contexts:
        for point in points(setting, context):
            share.layout(point)
    assert share.layout(Point(131072, 64, "sync")).host_bytes() < 128 * 2**30


# --- requests that were never prefilled ------------------------------------------------------------------------------


def as_numbers(rows) -> np.ndarray:
    return np.asarray(jax.lax.bitcast_convert_type(jnp.asarray(rows), jnp.bfloat16), np.float32)


def test_random_rows_are_numbers_of_a_moderate_size():
    sizes = layout(context_tokens=4096, host_pages=512, row_bytes=64)
    rows = random_rows(jnp.int32(2), jnp.int32(1), sizes)
    assert rows.shape == (sizes.records, sizes.words) and rows.dtype == jnp.uint32
    values = as_numbers(rows)
    assert np.isfinite(values).all() and np.abs(values).min() >= 1 / 8 and np.abs(values).max() < 2
    assert abs((values < 0).mean() - 0.5) < 0.02 and abs(values.mean()) < 0.02
    assert len(np.unique(np.asarray(rows), axis=0)) == sizes.records  # no two records alike


def test_random_rows_differ_by_space_and_request():
    sizes = layout(row_bytes=64)
    made = [np.asarray(random_rows(jnp.int32(s), jnp.int32(r), sizes)) for s in range(3) for r in range(3)]
    for one in range(9):
        for other in range(one):
            assert (made[one] != made[other]).mean() > 0.9


def test_random_rows_are_the_same_bytes_in_every_residency():
    """On the device in full; in the host pool, and what is in the ring, in hisparse."""
    row, tokens = random_rows, (13, 31, 40)
    caches = {}
    for residency in ("full", "hisparse", "no_io"):
        sizes = layout(residency=residency, record_tokens=1, host_pages=36)
        cache = create(sizes)
        admit = compile_admission(cache)
        for slot, count in enumerate(tokens):
            cache = admit(cache, np.int32(slot), np.int32(count))
        caches[residency] = cache
    full, sparse, no_io = caches.values()
    for slot, count in enumerate(tokens):
        for space, address in enumerate(full.layout.addresses()):
            want = np.asarray(row(jnp.int32(space), jnp.int32(slot), full.layout))[:count]
            at = slot * full.layout.slots_per_request
            same_bits(np.asarray(full.hot_rows[address.position])[address.group, at : at + count], want)
            pages = np.asarray(sparse.page_table)[slot]
            assert pages.tolist() == list(range(slot * 12, slot * 12 + 12))
            places = space * sparse.layout.rows_per_space + pages[np.arange(count) // 4] * 4 + np.arange(count) % 4
            same_bits(np.asarray(sparse.pool)[places], want)
            for cache in (sparse, no_io):  # the ring holds the newest two
                ring = slot * cache.layout.slots_per_request + cache.layout.hot_slots
                for record in (count - 2, count - 1):
                    got = np.asarray(cache.hot_rows[address.position])[address.group, ring + record % 2]
                    same_bits(got, want[record])
    for cache in caches.values():
        assert np.asarray(cache.tokens).tolist() == list(tokens)


def test_random_index_has_the_shapes_and_types_it_is_given():
    like = {
        "keys": jnp.zeros((2, 3, 50, 8), jnp.float8_e4m3fn), "scale": jnp.zeros((2, 3, 50), jnp.float32),
        "bounds": jnp.zeros((1, 3, 7, 2, 4), jnp.bfloat16), "nothing": None,
    }  # fmt: skip
    made = random_index(like)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), made) == jax.tree.map(lambda x: (x.shape, x.dtype), like)
    for leaf in jax.tree.leaves(made):
        values = np.asarray(leaf.astype(jnp.float32))
        assert np.isfinite(values).all() and 0.7 < values.std() < 1.3
    same_bits(made["keys"], random_index(like)["keys"])
    assert random_index(()) == ()


@pytest.mark.parametrize("override", ["synthetic.modes=[]", "synthetic.concurrency=[]", "synthetic.contexts=[]"])
def test_a_run_of_nothing_is_refused(override):
    with pytest.raises(UserError, match=r"synthetic\.\w+: .*at least 1 item"):
        configs.load("glm52_prefetch", [override])


def test_the_section_can_be_taken_out():
    assert configs.load("glm52_prefetch", ["synthetic=null", "prompt.text=x"]).synthetic is None


def test_too_few_ranks_for_the_weights(monkeypatch):
    monkeypatch.setattr(simulated, "device_bytes", lambda: 150 * 10**9)
    share = Share(configs.load("glm52_prefetch", ["synthetic.ranks=2"]))
    with pytest.raises(UserError, match=r"synthetic.ranks: with 2 no memory is left for caches.*give more ranks"):
        share.cache_budget()
