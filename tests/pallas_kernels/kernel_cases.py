# SPDX-License-Identifier: Apache-2.0
"""Cases that the kernel tests share: abstract devices, random traces, a pool whose bytes say where they come from."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.helpers import bits

HOST = jax.memory.Space.Host
DEVICES = {"NVIDIA H100": 132, "NVIDIA H200": 132, "NVIDIA B200": 148}
ON_GPU = jax.default_backend() == "gpu"
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")]


def abstract_gpu(kind: str = "NVIDIA H200"):
    """Context in which kernels are traced for this GPU, on any machine."""
    device = jax.sharding.AbstractDevice(device_kind=kind, platform="gpu", num_cores=DEVICES[kind])
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


@contextlib.contextmanager
def without_races() -> Generator[None]:
    """Kernels of the block run under the CPU interpreter, which must find no race."""
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)), abstract_gpu():
        yield
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    races = interpret_pallas_call.get_races()
    assert races is not None and not races.races_found


def lower_for_cuda(function, *args, kind: str = "NVIDIA H200") -> str:
    """Text of the module lowered for CUDA; this is not yet a PTX compilation."""
    with abstract_gpu(kind):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def pinned() -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def pool_words(row, words: int):
    """Contents of pool rows, uint32 `[..., words]`, from their row numbers (NumPy or JAX)."""
    row = row[..., None].astype(np.uint32)
    column = np.arange(words, dtype=np.uint32)
    return (row * np.uint32(2654435761)) ^ (column * np.uint32(40503) + row)


def make_pool(rows: int, words: int) -> jax.Array:
    """A pool in pinned host memory, filled by `pool_words`."""
    return jax.device_put(pool_words(np.arange(rows), words), pinned())


class Sizes(NamedTuple):
    requests: int
    selected: int
    hot_slots: int
    ring_slots: int
    page_records: int
    pages: int
    tables: int = 2


SMALL = Sizes(requests=5, selected=64, hot_slots=150, ring_slots=10, page_records=4, pages=200)


class Step(NamedTuple):
    selected: np.ndarray
    length: np.ndarray


def tables(sizes: Sizes, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cold tables and a page table: slot_ids, recency, page_table."""
    shape = (sizes.tables, sizes.requests, sizes.hot_slots)
    slot_ids = np.full(shape, -1, np.int32)
    recency = rng.permuted(np.broadcast_to(np.arange(sizes.hot_slots, dtype=np.int16), shape), axis=-1)
    pages = rng.permutation(sizes.requests * sizes.pages).reshape(sizes.requests, sizes.pages).astype(np.int32)
    return slot_ids, recency, pages


def trace(sizes: Sizes, steps: int, rng: np.random.Generator) -> Iterator[Step]:
    """A random walk of selections: requests come, grow past H and H + W, and go; most selected ids come again."""
    context = sizes.pages * sizes.page_records
    edges = [1, sizes.hot_slots, sizes.hot_slots + 1, sizes.hot_slots + sizes.ring_slots, context - 20]
    length = rng.choice(edges, sizes.requests)
    last = [np.zeros(0, np.int64) for _ in range(sizes.requests)]
    for _ in range(steps):
        selected = np.full((sizes.requests, sizes.selected), -1, np.int32)
        for r in range(sizes.requests):
            fate = rng.random()
            if fate < 0.02:
                length[r] = 0
            elif fate < 0.06 or length[r] >= context:
                length[r] = min(context, max(1, rng.choice(edges) + rng.integers(-1, 2)))
            elif length[r] > 0:
                length[r] += 1
            n = min(sizes.selected, int(length[r]))
            if n and rng.random() < 0.2:
                n = int(rng.integers(1, n + 1))
            if n:
                newest = [length[r] - 1] * int(rng.random() < 0.5)
                old = rng.permutation(last[r][last[r] < length[r]])
                fresh = rng.choice(length[r], min(n, int(length[r])), replace=False)
                ids = np.concatenate([newest, old[rng.random(len(old)) < 0.8], fresh]).astype(np.int64)
                ids = ids[np.sort(np.unique(ids, return_index=True)[1])][:n]
                last[r] = ids
                selected[r, :n] = (
                    np.sort(ids)[:n] if len(ids) >= n else np.pad(np.sort(ids), (0, n - len(ids)), constant_values=-1)
                )
        yield Step(selected, length.astype(np.int32))


def _outside_the_ring(sizes: Sizes, steps: int, rng: np.random.Generator) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Lengths of each step, all beyond H, and for each request the ids that are in no ring, in random order."""
    context, ones = sizes.pages * sizes.page_records, np.ones(sizes.requests, np.int32)
    assert context - steps >= sizes.hot_slots + sizes.ring_slots
    ids = [rng.permutation(context - steps - sizes.ring_slots).astype(np.int32) for _ in ones]
    return [(context - steps + number) * ones for number in range(1, steps + 1)], ids


def all_hits(sizes: Sizes, steps: int, rng: np.random.Generator) -> Iterator[Step]:
    """K records outside the ring, the same ones every step: the first step misses them all, the others none."""
    lengths, ids = _outside_the_ring(sizes, steps, rng)
    selected = np.stack([np.sort(row[: sizes.selected]) for row in ids])
    for length in lengths:
        yield Step(selected, length)


def all_misses(sizes: Sizes, steps: int, rng: np.random.Generator) -> Iterator[Step]:
    """K records outside the ring, which come again when H others have come since: every step misses them all."""
    lengths, ids = _outside_the_ring(sizes, steps, rng)
    width = sizes.selected
    turns = len(ids[0]) // width
    assert (turns - 1) * width >= sizes.hot_slots
    for number, length in enumerate(lengths):
        at = number % turns * width
        yield Step(np.stack([np.sort(row[at : at + width]) for row in ids]), length)


def check_counters(counters: np.ndarray, walk, width: int) -> None:
    """Counters `[steps, R, 3]` are as the walk says: hits (ring included), ring hits, misses."""
    if walk is trace:
        hits, ring_hits, misses = counters.sum((0, 1))
        assert min(hits - ring_hits, ring_hits, misses) > 0, "a trace without hits, ring hits or misses shows nothing"
        return
    missed = np.full(len(counters), walk is all_misses)
    missed[0] = True
    want = np.where(missed[:, None, None], [0, 0, width], [width, 0, 0])
    np.testing.assert_array_equal(counters, np.broadcast_to(want, counters.shape))


def same(got, want, what: str) -> None:
    """Asserts equality of dtype, shape and every bit of every leaf, NaNs and signs of zeros included."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b, name = np.asarray(a), np.asarray(b), f"{what}{jax.tree_util.keystr(path)}"
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            raise AssertionError(f"{name}: {a.dtype} {list(a.shape)} instead of {b.dtype} {list(b.shape)}")
        wrong = np.argwhere(bits(a) != bits(b))
        if len(wrong):
            raise AssertionError(
                f"{name}: {len(wrong)} of {a.size} differ, first at {wrong[0]}: "
                f"{a[tuple(wrong[0])]} instead of {b[tuple(wrong[0])]}"
            )


def zeros(*shape: int, dtype=jnp.int32) -> jax.Array:
    return jnp.zeros(shape, dtype)
