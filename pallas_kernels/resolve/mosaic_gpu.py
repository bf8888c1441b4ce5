# SPDX-License-Identifier: Apache-2.0
"""Resolve as a Mosaic GPU kernel, alone or with the fetch of what is missing.

A request is served by a cluster of programs. All of them work the same plan out of the old tables; each then copies
its share of the rows, and the first ones publish. With E evictable slots and M misses, for a request longer than H:

1. select   a bitmap of the selected ids, with the place of the first id of each word;
2. probe    slots in recency order: hit if the bitmap has the slot's id, whose rank is its place among the selected.
            `order` gets the evictable slots from the front and the hit ones from the back;
3. place    each selected id: ring slot, hit slot, or as the m-th miss the victim order[m];
4. publish  places, plan and counters; new recency = order[M:E], order[:M], hits; new ids of the victims;
5. fetch    row of miss m to slot order[m]. Rows of a wide pool are first put into buckets by address: all programs then
            sweep it in one direction, which the link's address translation rewards (docs/kernels.md).

No lane reads a table after step 2, and programs publish only when the whole cluster is past it: that is what makes
changing the tables in place right.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import indexed
from pallas_kernels.common import SHARED_BYTES
from pallas_kernels.program import Lists, Program, in_address_order
from pallas_kernels.resolve.tuning import Tuning, tuning
from pallas_kernels.resolve.types import Plan, Resolved

_NEVER = jnp.iinfo(jnp.int32).max


def shared_bytes(selected: int, hot_slots: int, context: int, *, bitmap: bool) -> int:
    """Shared memory of a program: order, slot and host row of each selected id (twice), and the set of selected ids."""
    ids = -(-context // 32) * 6 if bitmap else selected * 4
    return 2 * hot_slots + 14 * selected + ids + 8 * 1024


def unsupported(selected: int, hot_slots: int, context: int, words: int = 0) -> str | None:
    """Why the kernel can't take these sizes, or None. `words` of a row, 0 if nothing is fetched."""
    need = shared_bytes(selected, hot_slots, context, bitmap=False)
    if need > SHARED_BYTES:
        return f"K = {selected} and H = {hot_slots} need {need} bytes of shared memory, it has {SHARED_BYTES}"
    return indexed.copy_unsupported(words, selected) if words else None


def resolve(
    selected: Array, length: Array, slot_ids: Array, recency: Array, page_table: Array, base: Array, table: Array, *,
    ring_slots: int, page_records: int, rows: tuple[Array, ...] | None = None, rows_per_space: int = 0,
    busy: int | None = None, how: Tuning | None = None,
) -> tuple[Resolved, Any]:  # fmt: skip
    """See `pallas_kernels.resolve.resolve` and `resolve_and_fetch`.

    Args:
      rows: None, or pool, hot rows, space and group: then the misses are fetched too.
    Returns:
      What resolve gives, and the new hot rows or None.
    """
    (requests, width), (_, _, hot_slots) = selected.shape, slot_ids.shape
    context = page_table.shape[1] * page_records
    how = how or tuning(busy or requests, 4 * rows[0].shape[1] * rows_per_space if rows else 0)
    how = how if rows else how._replace(buckets=0)
    programs, threads = how.programs, how.threads
    by_bitmap = shared_bytes(width, hot_slots, context, bitmap=True) <= SHARED_BYTES
    bitmap_words = -(-context // 32)

    def resolve_kernel(*refs: Any) -> None:
        rows_refs, refs = (refs[:4], refs[4:]) if rows else ((), refs)
        selected_ref, length_ref, pages_ref, base_ref, table_ref, ids_ref, ages_ref = refs[:7]
        place_ref, host_row_ref, slot_ref, count_ref, counters_ref, *shared = refs[7:]
        order, slot_of_place, host_rows, words, first, scratch, *sweep = shared
        request, thread = lax.axis_index("request"), lax.axis_index("thread")
        number = lax.axis_index("program") if programs > 1 else jnp.int32(0)
        program = Program(threads, thread)
        places, rounds = program.places, program.rounds
        wait_late = program.one_round(width)  # just before the tables are written, or before a loop that writes them
        ids_ref, ages_ref = (r.at[table_ref[0], request] for r in (ids_ref, ages_ref))
        selected_ref, pages_ref = selected_ref.at[request], pages_ref.at[request]
        place_ref, host_row_ref, slot_ref = (r.at[request] for r in (place_ref, host_row_ref, slot_ref))
        length, base = length_ref[request], base_ref[request]

        def scratch_of(chunk: Any) -> Any:
            return scratch.at[chunk % 2] if not isinstance(chunk, int) else scratch.at[chunk]

        def publisher(i: int) -> Any:
            """The i-th of the things to publish is done by this program."""
            return number == i % programs

        # Short and inactive requests: no search -----------------------------------------------------------------------
        def short() -> None:
            def one(chunk: Any, hits: Array) -> Array:
                at = places(width, chunk)
                ids = indexed.gather(selected_ref, at)
                ids = jnp.where((ids >= 0) & (length > 0), ids, -1)
                indexed.scatter(place_ref, at, jnp.where(ids >= 0, base + ids, -1))
                indexed.scatter(host_row_ref, at, -1)
                indexed.scatter(slot_ref, at, -1)
                _, found = indexed.prefix_count(scratch_of(chunk), _flag(ids >= 0), threads=threads)
                return hits + found

            hits = rounds(width, one, jnp.int32(0))
            zero = jnp.int32(0)
            publish_counters(hits, zero, zero)

        def publish_counters(hits: Array, ring_hits: Array, misses: Array) -> None:
            indexed.put(counters_ref.at[request], hits, ring_hits, misses)
            indexed.put(count_ref.at[pl.ds(request, 1)], misses)

        # Longer ones --------------------------------------------------------------------------------------------------
        def old_tables(chunk: Any) -> tuple[Array, Array, Array]:
            """Place in the order, slot and record of the slots that this thread probes."""
            at = places(hot_slots, chunk)
            slot = indexed.gather(ages_ref, at)
            return at, slot, indexed.gather(ids_ref, slot)

        def selection(chunk: Any) -> tuple[Array, Array, Array]:
            """Place, id and host row of the selected records of this thread."""
            at = places(width, chunk)
            ids = indexed.gather(selected_ref, at)
            known = jnp.maximum(ids, 0)
            page = indexed.gather(pages_ref, lax.div(known, jnp.int32(page_records)))
            return at, ids, page * page_records + lax.rem(known, jnp.int32(page_records))

        # What one round covers is loaded at once, before anything waits for the length.
        tables = old_tables(0) if program.one_round(hot_slots) else None
        picked = selection(0) if program.one_round(width) else None

        def select(chunk: Any, _: Any) -> Any:
            at, ids, _row = picked or selection(chunk)
            if by_bitmap:
                before = indexed.gather(selected_ref, jnp.where(at > 0, at - 1, -1))
                indexed.bitmap_insert(words, first, ids, before, at)
            else:
                indexed.scatter(words, at, jnp.where(ids >= 0, ids, _NEVER))
            return _

        def probe(chunk: Any, before: Array) -> Array:
            at, slot, ids = tables or old_tables(chunk)
            place = indexed.bitmap_rank(words, first, ids) if by_bitmap else indexed.search_rank(words, ids)
            evictable = (at >= 0) & (place < 0)
            rank, found = indexed.prefix_count(scratch_of(chunk), _flag(evictable), threads=threads)
            rank = before + rank
            indexed.scatter(slot_of_place, place, slot)
            where = jnp.where(evictable, rank, hot_slots - 1 - (at - rank))
            indexed.scatter(order, jnp.where(at >= 0, where, -1), slot)
            return before + found

        def place(chunk: Any, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            misses = sums[0]
            at, ids, host_row = picked or selection(chunk)
            is_selected = ids >= 0
            hit_slot = indexed.gather(slot_of_place, at)
            ring_begin = jnp.maximum(hot_slots, length - ring_slots)
            in_ring = is_selected & (ids >= ring_begin)
            miss = is_selected & (ids < ring_begin) & (hit_slot < 0)
            rank, *found = indexed.prefix_count(
                scratch_of(chunk), _flag(miss), _flag(in_ring), _flag(is_selected), threads=threads
            )
            rank = misses + rank
            victim = indexed.gather(order, jnp.where(miss, rank, -1))
            slot = jnp.where(
                in_ring,
                hot_slots + lax.rem(jnp.maximum(ids, 0), jnp.int32(ring_slots)),
                jnp.where(miss, victim, hit_slot),
            )
            indexed.scatter(host_rows, jnp.where(miss, rank, -1), host_row)
            if programs > 1 and wait_late:
                indexed.cluster_wait()

            @pl.when(publisher(0))
            def _() -> None:
                indexed.scatter(place_ref, at, jnp.where(is_selected, base + slot, -1))
                indexed.scatter(ids_ref, jnp.where(miss, victim, -1), ids)

            return tuple(a + b for a, b in zip(sums, found, strict=True))

        def plan(misses: Array) -> Any:
            def one(chunk: Any, _: Any) -> Any:
                at = places(width, chunk)
                wanted = jnp.where(at < misses, at, -1)
                indexed.scatter(host_row_ref, at, indexed.gather(host_rows, wanted))
                indexed.scatter(slot_ref, at, indexed.gather(order, wanted))
                return _

            return one

        def new_recency(evictable: Array, misses: Array) -> Any:
            def one(chunk: Any, _: Any) -> Any:
                at = places(hot_slots, chunk)
                kept = evictable - misses
                old = jnp.where(
                    at < kept, at + misses, jnp.where(at < evictable, at - kept, hot_slots - 1 - at + evictable)
                )
                indexed.scatter(ages_ref, at, indexed.gather(order, jnp.where(at >= 0, old, -1)))
                return _

            return one

        def fetch(misses: Array) -> None:
            pool_ref, hot_ref, space_ref, group_ref = rows_refs
            plan: list[Any] = [host_rows, order, misses, number, programs]
            if how.buckets:
                lists, most = Lists(*sweep), -(-width // programs)

                def row_at(at: Array) -> tuple[Array, Array]:
                    m = at * programs + number
                    m = jnp.where((at >= 0) & (m < misses), m, -1)
                    return indexed.gather(host_rows, m), indexed.gather(order, m)

                in_address_order(program, lists, most, row_at, buckets=how.buckets, rows_per_space=rows_per_space)
                plan = [lists.from_rows, lists.to_rows, lax.div(misses - number + (programs - 1), jnp.int32(programs))]
            indexed.copy_rows(
                pool_ref, hot_ref.at[group_ref[0]], *plan, threads=threads, aligned="source",
                source_offset=space_ref[0] * rows_per_space, target_offset=base, in_flight=how.in_flight,
                copiers=how.copiers,
            )  # fmt: skip

        def long() -> None:
            if by_bitmap:
                indexed.fill(words, 0, threads)
            indexed.fill(slot_of_place, -1, threads)
            indexed.barrier()
            rounds(width, select, jnp.int32(0))
            indexed.barrier()
            evictable = rounds(hot_slots, probe, jnp.int32(0))
            if programs > 1:
                indexed.cluster_arrive()
                if not wait_late:
                    indexed.cluster_wait()
            indexed.barrier()
            zero = jnp.int32(0)
            misses, ring_hits, active = rounds(width, place, (zero, zero, zero))
            indexed.barrier()

            @pl.when(publisher(1))
            def _() -> None:
                rounds(hot_slots, new_recency(evictable, misses), zero)

            @pl.when(publisher(2))
            def _() -> None:
                rounds(width, plan(misses), zero)
                publish_counters(active - misses, ring_hits, misses)

            if rows_refs:
                fetch(misses)

        @pl.when(length <= hot_slots)
        def _() -> None:
            @pl.when(publisher(0))
            def _() -> None:
                short()

        @pl.when(length > hot_slots)
        def _() -> None:
            long()

    per_place = jax.ShapeDtypeStruct((requests, width), jnp.int32)
    out_type = (
        per_place, per_place, per_place, jax.ShapeDtypeStruct((requests,), jnp.int32),
        jax.ShapeDtypeStruct((requests, 3), jnp.int32),
    )  # fmt: skip
    scratch_types = [
        plgpu.SMEM((hot_slots,), jnp.int16),
        plgpu.SMEM((width,), jnp.int16),
        plgpu.SMEM((width,), jnp.int32),
        plgpu.SMEM((bitmap_words if by_bitmap else width,), jnp.int32),
        plgpu.SMEM((bitmap_words if by_bitmap else 1,), jnp.int16),
        plgpu.SMEM((2, 3 * indexed.MAX_WARPS), jnp.int32),
    ]
    if how.buckets:
        scratch_types += Lists.types(-(-width // programs), how.buckets)
    cluster: dict[str, Any] = {"cluster": (programs,), "cluster_names": ("program",)} if programs > 1 else {}
    run = plgpu.kernel(
        resolve_kernel, out_type=out_type, grid=(requests,), grid_names=("request",), num_threads=threads,
        thread_name="thread", scratch_types=scratch_types, **cluster,
    )  # fmt: skip
    ids_ref, ages_ref = jax.new_ref(slot_ids), jax.new_ref(recency)
    hot_ref = None
    operands: tuple[Any, ...] = (selected, length, page_table, base, table.reshape(1), ids_ref, ages_ref)
    if rows:
        pool, hot_rows, space, group = rows
        hot_ref = jax.new_ref(hot_rows)
        operands = (pool, hot_ref, space.reshape(1), group.reshape(1), *operands)
    place, host_row, slot, count, counters = run(*operands)
    resolved = Resolved(place, Plan(host_row, slot, count), counters, jax.freeze(ids_ref), jax.freeze(ages_ref))
    return resolved, None if hot_ref is None else jax.freeze(hot_ref)


def _flag(mask: Array) -> Array:
    return jnp.where(mask, jnp.int32(1), jnp.int32(0))
