# SPDX-License-Identifier: Apache-2.0
"""Backup: records that closed in this step, from the ring to the host pool."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from hisparse_jax.cache.state import Cache
from pallas_kernels.backup import backup
from pallas_kernels.common import Implementation


def host_rows(cache: Cache, record: Array) -> Array:
    """Row of each request's `record` inside any space of the pool, -1 if it has no page. int32 `[R]` to int32 `[R]`."""
    size = cache.layout.page_records
    page = jnp.take_along_axis(cache.page_table, record[:, None] // size, axis=1, mode="clip")[:, 0]
    return jnp.where(page >= 0, page * size + record % size, -1)


def end_step(cache: Cache, implementation: Implementation = "auto") -> Cache:
    """Copies every record that closed in this step to the host pool, for all spaces. Nothing to do for "full"."""
    layout = cache.layout
    if layout.residency != "hisparse":
        return cache
    closed = cache.active & (cache.tokens % layout.record_tokens == 0)
    in_space = host_rows(cache, jnp.maximum(cache.length - 1, 0))
    newest, targets = [], []
    for position, rows in enumerate(cache.hot_rows):
        spaces = np.array(layout.spaces_at(position), np.int32)
        newest.append(rows.at[:, cache.newest].get(mode="clip").reshape(-1, layout.words))
        target = spaces[:, None] * layout.rows_per_space + in_space[None]
        targets.append(jnp.where((closed & (in_space >= 0))[None], target, -1).ravel())
    # Together, as a launch costs more than its few rows.
    pool = backup(cache.pool, jnp.concatenate(newest), jnp.concatenate(targets), implementation=implementation)
    return cache.replace(pool=pool)
