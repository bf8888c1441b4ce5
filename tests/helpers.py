# SPDX-License-Identifier: Apache-2.0
"""Small things that several tests need. `oracles.py` says what is right; this file only builds inputs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from hisparse_jax.cache.layout import Layout
from tests import oracles

NAN_WORD = np.uint32(0x7FC07FC0)  # NaN as float32, and twice NaN as bfloat16
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def padded(ids, width: int) -> np.ndarray:
    """Ids sorted, without duplicates, -1 padded: int32 `[width]`."""
    ids = sorted({int(i) for i in ids})
    assert len(ids) <= width
    return np.array(ids + [-1] * (width - len(ids)), np.int32)


def random_selection(rng: np.random.Generator, length: int, width: int, count: int | None = None) -> np.ndarray:
    """A selection among `length` records; half of them favour the newest records, so that hits and misses mix."""
    most = min(width, length)
    count = int(rng.integers(0, most + 1)) if count is None else min(count, most)
    recent = rng.permutation(np.arange(max(0, length - 2 * width), length))[: count // 2]
    others = [i for i in rng.permutation(length) if i not in recent][: count - len(recent)]
    return padded([*recent, *others], width)


def layout(**changes) -> Layout:
    """A small layout, with changes."""
    small = Layout(
        residency="hisparse",
        request_slots=3,
        context_tokens=48,
        record_tokens=2,
        row_bytes=16,
        group_sizes=(1, 2),
        selected=3,
        hot_slots=4,
        ring_slots=2,
        page_records=4,
        host_pages=18,
    )
    return dataclasses.replace(small, **changes)


def simulator(layout: Layout, rule=oracles.hit_first_lru) -> oracles.Cache:
    """The NumPy cache with the sizes of a layout."""
    groups, space = [], 0
    for table, size in enumerate(layout.group_sizes):
        groups.append(oracles.Group(table, list(range(space, space + size))))
        space += size
    return oracles.Cache(
        requests=layout.request_slots,
        hot_slots=layout.hot_slots,
        ring_slots=layout.ring_slots,
        row_words=layout.row_bytes // 4,
        groups=groups,
        page_records=layout.page_records,
        record_tokens=layout.record_tokens,
        rule=rule,
    )


def words(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random words; any pattern may come up, NaNs too."""
    return rng.integers(0, 2**32, shape, dtype=np.uint32)


def to_words(values: np.ndarray) -> np.ndarray:
    """The bytes of an array's last axis as uint32."""
    return np.ascontiguousarray(values).view(np.uint32)


def pinned(rows: np.ndarray) -> jax.Array:
    """An array in the pinned host memory of the default device."""
    return jax.device_put(rows, jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))


def bits(values) -> np.ndarray:
    """The bits of each number, as unsigned integers."""
    values = np.asarray(values)
    return values.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[values.dtype.itemsize])


def same_bits(got, want) -> None:
    """Asserts equality of dtype, shape and every bit, NaNs and signs of zeros included."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype, f"{got.dtype} is not {want.dtype}"
    assert got.shape == want.shape, f"{got.shape} is not {want.shape}"
    np.testing.assert_array_equal(bits(got), bits(want))


def lowered_for(function, platform: str, *arguments) -> str:
    """The module that `function` lowers to for a platform that needn't be here."""
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


def int32(values) -> jax.Array:
    return jnp.asarray(np.asarray(values), jnp.int32)
