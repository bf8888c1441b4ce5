# SPDX-License-Identifier: Apache-2.0
"""Definition of fetch in `jax.numpy`; also the portable implementation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.common import DEVICE, HOST, on_host
from pallas_kernels.resolve.types import Plan

_ROWS_AT_ONCE = 32


@on_host
def _gather(pool: Array, rows: Array) -> Array:
    return pool.at[rows].get(mode="clip")


def fetch(
    pool: Array, hot_rows: Array, plan: Plan, base: Array, space: Array, group: Array, *, rows_per_space: int
) -> Array:
    """See `pallas_kernels.fetch.fetch`.

    The misses of all requests are packed together and moved a few rows at a time, so that what crosses the link is
    the missed rows, rounded up to `_ROWS_AT_ONCE`, and not the padding of the plan.
    """
    requests, width = plan.slot.shape
    planned = jnp.arange(width)[None] < plan.count[:, None]
    rank = jnp.cumsum(planned.ravel(), dtype=jnp.int32) - 1
    total = jnp.sum(plan.count, dtype=jnp.int32)
    padded = -(-requests * width // _ROWS_AT_ONCE) * _ROWS_AT_ONCE
    where = jnp.where(planned.ravel(), rank, padded)
    source = jnp.zeros(padded, jnp.int32).at[where].set(plan.host_row.ravel(), mode="drop") + space * rows_per_space
    place = (base[:, None] + plan.slot).ravel()
    target = jnp.full(padded, hot_rows.shape[1], jnp.int32).at[where].set(place, mode="drop")

    def some(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        done, hot_rows = carry
        rows, to = (lax.dynamic_slice(x, (done,), (_ROWS_AT_ONCE,)) for x in (source, target))
        values = jax.device_put(_gather(pool, jax.device_put(rows, HOST)), DEVICE)
        return done + _ROWS_AT_ONCE, hot_rows.at[group, to].set(values, mode="drop")

    return lax.while_loop(lambda carry: carry[0] < total, some, (jnp.int32(0), hot_rows))[1]
