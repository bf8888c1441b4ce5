# SPDX-License-Identifier: Apache-2.0
"""Resolve on the state of a cache: from selected records to places among the hot rows, misses fetched."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from hisparse_jax.cache.append import with_rows
from hisparse_jax.cache.layout import Address, Layout
from hisparse_jax.cache.state import Cache
from pallas_kernels import fetch as fetch_kernel
from pallas_kernels import resolve as resolve_kernel
from pallas_kernels.common import Implementation, choose, tuned
from pallas_kernels.resolve import Plan


class Resolution(NamedTuple):
    """What a selection group shares after its anchor has resolved.

    Attributes:
      selected: int32 `[R, K]`, the records, ascending, -1 padded.
      place: int32 `[R, K]`, where each is among the hot rows of every layer of the group; -1 where nothing is.
      plan: what the anchor fetched and its followers have to fetch; None when residency is "full".
    """

    selected: Array
    place: Array
    plan: Plan | None


def resolve(
    cache: Cache, address: Address, selected: Array, implementation: Implementation = "auto", *, busy: int | None = None
) -> tuple[Resolution, Cache]:
    """Gives every selected record a slot and brings the missing rows of the anchor in. Counters are added to.

    Args:
      cache: the cache of a step that has begun, with the newest token appended.
      address: the anchor (position 0 of its group).
      selected: int32 `[R, K]`, ids ascending and unique, below the request's length, -1 padded.
      implementation: of the kernels: "auto", "xla" or "mosaic_gpu".
      busy: about how many requests are active, for the launch; all of them if None.
    """
    layout = cache.layout
    if layout.is_full:
        found = jnp.sum(selected >= 0, axis=1, dtype=jnp.int32)
        counters = jnp.stack([found, jnp.zeros_like(found), jnp.zeros_like(found)], axis=1)
        cache = cache.replace(counters=cache.counters.at[address.table].add(counters))
        return Resolution(selected, jnp.where(selected >= 0, cache.base[:, None] + selected, -1), None), cache
    tables = cache.slot_ids, cache.recency, cache.page_table
    sizes = {"ring_slots": layout.ring_slots, "page_records": layout.page_records, "implementation": implementation}
    with jax.named_scope("resolve"):
        if layout.residency == "no_io":
            found = resolve_kernel.resolve(selected, cache.length, *tables, cache.base, address.table, **sizes)
        else:
            found, rows = resolve_kernel.resolve_and_fetch(
                cache.pool, cache.hot_rows[address.position], selected, cache.length, *tables, cache.base,
                address.table, address.space, address.group, rows_per_space=layout.rows_per_space, busy=busy, **sizes,
            )  # fmt: skip
            cache = with_rows(cache, address.position, rows)
    counters = cache.counters.at[address.table].add(found.counters)
    cache = cache.replace(slot_ids=found.slot_ids, recency=found.recency, counters=counters)
    return Resolution(selected, found.place, found.plan), cache


def selection_parts(layout: Layout, wanted: int | None = None, implementation: Implementation = "auto") -> int:
    """In how many parts requests are selected and resolved: the next part selects while rows of this one are fetched.

    One where nothing is fetched.

    Args:
      layout: of the cache.
      wanted: how many. If None, one in plain JAX, and the measured choice (`pallas_kernels/tuned`) for the kernels.
      implementation: of the kernels.
    """
    if layout.residency != "hisparse":
        return 1
    if wanted is None:
        if choose(implementation, "selection_parts", None) == "xla":
            return 1
        wanted = tuned("selection_parts", requests=layout.request_slots, records=layout.records)["parts"]
    return min(wanted, layout.request_slots)


def part_of(cache: Cache, number: int, parts: int) -> Cache:
    """The cache of a step in which only the requests of one part are active: of neighbouring slots, whoever is active.

    So parts are equal where all slots are active, which is when there is most to fetch.
    """
    slots = cache.layout.request_slots
    return cache.replace(active=cache.active & (np.arange(slots) * parts // slots == number))


def together(resolutions: Sequence[Resolution]) -> Resolution:
    """What the parts resolved; a request of another part has -1 everywhere, and no misses."""
    return functools.reduce(functools.partial(jax.tree.map, jnp.maximum), resolutions)


def after_selection(layout: Layout, selected: Array, value: Array) -> Array:
    """The same value, so that what is computed of it runs after a selection, beside the fetch of what it misses.

    Where rows are fetched it hangs on the selection by a condition that always holds, which the compiler doesn't know.
    The barrier keeps that out of the matmul that reads the value, which is then the same in every residency.

    Args:
      layout: of the cache.
      selected: int32 `[R, K]`, what was selected, -1 padded.
      value: `[R, ...]`, which nothing needs before that: an anchor's query latent, or the next part's index weights.
    """
    if layout.residency == "hisparse":
        exists = jnp.expand_dims(selected[:, 0], range(1, value.ndim)) >= -1
        value = jnp.where(exists, value, 0)
    return lax.optimization_barrier(value)


def fetch(
    cache: Cache, address: Address, plan: Plan | None, implementation: Implementation = "auto", *,
    beside: bool = False, programs: int | None = None,
) -> tuple[Cache, Plan | None]:  # fmt: skip
    """Brings the planned rows of one space in. A follower calls it with its anchor's plan.

    Args:
      cache, address: where to.
      plan: what to fetch; None if there is nothing to.
      implementation: of the kernel.
      beside: whether compute runs beside it.
      programs: grid of the kernel; the tuned one if None.
    Returns:
      The new cache, and the plan again: a fetch that is given this one begins after this fetch.
    """
    if plan is None or cache.layout.residency == "no_io":
        return cache, plan
    with jax.named_scope("fetch"):
        rows, plan = fetch_kernel.fetch(
            cache.pool, cache.hot_rows[address.position], plan, cache.base, address.space, address.group,
            rows_per_space=cache.layout.rows_per_space, beside=beside, programs=programs, implementation=implementation,
        )  # fmt: skip
    return with_rows(cache, address.position, rows), plan
