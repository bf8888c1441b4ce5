# SPDX-License-Identifier: Apache-2.0
"""Decode attention over selected latent records, and over entries and a window, as one Mosaic GPU kernel.

A program attends with up to 64 heads of one request to one part of its places, 64 records (a tile) at a time. Three
warpgroups, with two tiles in shared memory:

* the producer looks up places and copies rows into a swizzled tile, `[64, 576]` for latents, `[64, 512]` for entries;
  fp8 rows it dequantises on the way;
* the leader computes the logits of the tile, `q k^T`, and its softmax, in registers, and hands the weights on through
  shared memory;
* leader and follower each add up half of the columns: the value of a record is the first 512 columns of the tile it has
  as a key.

```
producer: places of tile t+1 -> copies of tile t (when both released its stage) -> ready[stage]
leader:   ready[stage] -> logits -> softmax -> taken -> weights -> made -> values -> consumed[stage]
follower: made -> values -> taken, consumed[stage]
```
With `Tuning.handed_on` false there is no leader: both compute the same logits, which takes half as many products again
and no exchange. Either way the sums are the same to the last bit.
A window's tiles come after those of the entries. A sink is where the first part begins: one key without a value.
With several parts the results are merged by their log-sum-exp, in order. How many parts there are depends on shapes
alone, and places only on where a row is read: results don't depend on where rows lie.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels import indexed, online_softmax, tiles
from pallas_kernels.online_softmax import HEADS, TOKENS
from pallas_kernels.row_format import RecordType, RowFormat
from pallas_kernels.sparse_mla import fp8_tiles
from pallas_kernels.sparse_mla.tuning import Tuning, head_tiles, tiles_of, tuning

CONSUMERS = 2
LATENT, ROPE = 512, 64


def unsupported(query: Array, place: Array, row: RowFormat) -> str | None:
    """Why the kernel can't take these arguments of `sparse_mla`, or None."""
    if (row.latent, row.rope) != (LATENT, ROPE):
        return f"the kernel has records of {LATENT} + {ROPE} numbers, got {row.latent} + {row.rope}"
    if row.record == "float32":
        return "the kernel has bfloat16 and fp8 records, got float32"
    return _unsupported(query, place)


def unsupported_entries(query: Array, place: Array, window_place: Array, record: RecordType) -> str | None:
    """Why the kernel can't take these arguments of `sparse_entries`, or None."""
    if query.shape[2] != LATENT:
        return f"the kernel has entries of {LATENT} numbers, got {query.shape[2]}"
    if record != "bfloat16":
        return f"the kernel has bfloat16 entries, got {record}"
    return _unsupported(query, place if place.size else window_place)


def _unsupported(query: Array, place: Array) -> str | None:
    heads = query.shape[1]
    if not query.size or not place.size:
        return f"there is nothing to do for a query of {list(query.shape)} and places of {list(place.shape)}"
    if heads % head_tiles(heads):
        return f"{heads} heads can't be shared out evenly over {head_tiles(heads)} programs of at most {HEADS}"
    return online_softmax.needs_hopper()


class Rows(NamedTuple):
    """Some of the records to attend to: uint32 `[groups, slots, words]`, int32 scalar, int32 `[R, K]`."""

    hot_rows: Array
    group: Array
    place: Array


def sparse_mla(
    query: Array, hot_rows: Array, group: Array, place: Array, *, row: RowFormat, scale: float,
    out_dtype: DTypeLike = jnp.float32, how: Tuning | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """See `pallas_kernels.sparse_mla.sparse_mla`. `how.split` must cover all places."""
    requests, heads, _ = query.shape
    how = how or tuning(requests, heads, place.shape[1])
    rows = [Rows(hot_rows, group, place)]
    return _attend(query, rows, None, latent=row.latent, record=row.record, scale=scale, out_dtype=out_dtype, how=how)


def sparse_entries(
    query: Array, hot_rows: Array, group: Array, place: Array, window_rows: Array, window_group: Array,
    window_place: Array, sink: Array, *, record: RecordType = "bfloat16", scale: float, how: Tuning | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """See `pallas_kernels.sparse_mla.sparse_entries`. `how.split` must cover the tiles of entries and of the window."""
    requests, heads, width = query.shape
    how = how or tuning(requests, heads, place.shape[1], window=window_place.shape[1])
    rows = [Rows(hot_rows, group, place), Rows(window_rows, window_group, window_place)]
    return _attend(query, rows, sink, latent=width, record=record, scale=scale, how=how)


def _attend(
    query: Array, rows: Sequence[Rows], sink: Array | None, *, latent: int, record: RecordType, scale: float,
    out_dtype: DTypeLike = jnp.float32, how: Tuning,
) -> tuple[Array, Array]:  # fmt: skip
    """Softmax attention over all rows, one after the other; records are `[latent | rest]` as wide as the query."""
    requests, heads, width = query.shape
    rows = [each for each in rows if each.place.shape[1]]
    row_bytes = 4 * rows[0].hot_rows.shape[2]
    (parts, part_tiles), stages = how.split, how.stages
    head_programs = head_tiles(heads)
    own_heads = heads // head_programs
    columns = latent // CONSUMERS
    rings = stages + 1
    query = query.astype(jnp.bfloat16)
    # Each of the rows, how many there are, and the tiles they begin and end at.
    counts = [each.place.shape[1] for each in rows]
    ends = [sum(map(tiles_of, counts[: i + 1])) for i in range(len(rows))]
    begins = [end - tiles_of(count) for end, count in zip(ends, counts, strict=True)]

    def mla_kernel(query_ref: Any, *refs: Any) -> None:
        given, refs = refs[: 3 * len(rows)], refs[3 * len(rows) :]
        sink_ref, refs = (None, refs) if sink is None else (refs[0], refs[1:])
        out_ref, sum_ref, query_tile, tile, items, ready, consumed, *exchange = refs
        program, thread = lax.axis_index("program"), lax.axis_index("thread")
        head_program = lax.rem(program, jnp.int32(head_programs))
        first_head = head_program * own_heads
        rest = lax.div(program, jnp.int32(head_programs))
        part, request = lax.rem(rest, jnp.int32(parts)), lax.div(rest, jnp.int32(parts))
        row_refs = [given[i].at[given[i + 1][0]] for i in range(0, len(given), 3)]
        place_refs = [given[i].at[request] for i in range(2, len(given), 3)]

        def ring(number: Any) -> Any:
            return items.at[lax.rem(number, jnp.int32(rings))]

        def locate(number: Any) -> Callable[[], None]:
            """Looks up slots of the records of a tile, -1 where there is none; to be written into the ring."""
            lane, found = indexed.positions(indexed.LANES), []
            for each, place_ref, count, begin in zip(rows, place_refs, counts, begins, strict=True):
                at = (part * part_tiles + number - begin) * TOKENS + lane
                wanted = (lane < TOKENS) & (at < count)
                wanted = wanted & (at >= 0) if begin else wanted
                found.append((indexed.gather(place_ref, jnp.where(wanted, at, -1)), each.hot_rows.shape[1] - 1))

            def write() -> None:
                slots = [jnp.minimum(slot, last) for slot, last in found]  # of all but one of the rows it is -1
                slot = functools.reduce(jnp.maximum, slots)
                indexed.scatter(ring(number), jnp.where(lane < TOKENS, lane, -1), slot)

            return write

        def copy(number: Any, stage: Any) -> None:
            for i, rows_ref in enumerate(row_refs):
                make = functools.partial(copy_from, rows_ref, ring(number), stage)
                if len(rows) == 1:
                    make()
                    continue
                at = part * part_tiles + number
                here = at >= begins[i]
                if i + 1 < len(rows):  # the last ones also have the tiles past the end, of no records
                    here = here & (at < ends[i])
                pl.when(here)(make)

        def copy_from(rows_ref: Any, slots: Any, stage: Any) -> None:
            if record == "fp8":
                fp8_tiles.fill_fp8_tile(tile.at[stage], rows_ref, slots, item_bytes=row_bytes, latent=latent)
            else:
                tiles.gather_tile(tile.at[stage], rows_ref, slots, item_bytes=row_bytes)

        def produce() -> None:
            lane = indexed.positions(indexed.LANES)
            head = jnp.where(lane < own_heads, request * heads + first_head + lane, -1)
            indexed.scatter(items.at[rings - 1], jnp.where(lane < HEADS, lane, -1), head)
            locate(jnp.int32(0))()
            plgpu.commit_smem()
            tiles.gather_tile(query_tile, query_ref, items.at[rings - 1], item_bytes=2 * width)
            tiles.produce(part_tiles, stages, copy, locate, ready=ready, consumed=consumed)

        def shown_in(number: Any) -> Callable[[], Array]:
            def shown() -> Array:
                item = online_softmax.per_token(ring(number))
                return lax.broadcast_in_dim(item, (HEADS, TOKENS), [1]) >= 0

            return shown

        def value_of(stage: Any, own: int) -> Any:
            return tile.at[stage, :, pl.ds(own * columns, columns)]

        def start() -> online_softmax.Softmax:
            state = online_softmax.start(columns)
            if sink_ref is None:
                return state
            return online_softmax.with_sink(state, online_softmax.per_head(sink_ref.at[head_program]), part == 0)

        mine = pl.ds(first_head, own_heads)

        def store_out(own: int, out: Array, total: Array) -> None:
            target = out_ref.at[part, request, mine, pl.ds(own * columns, columns)]
            tiles.store_rows(target, online_softmax.mean(out, total), plgpu.Layout.WGMMA)

        def store_sums(top: Array, total: Array) -> None:
            sums = online_softmax.log_sum_exp(top, total)
            tiles.store_rows(sum_ref.at[part, request, mine], sums, plgpu.Layout.WGMMA.reduce(1))

        def alone(own: int) -> None:
            def one(number: Any, state: Any) -> Any:
                stage = lax.rem(number, jnp.int32(stages))
                plgpu.barrier_wait(ready.at[stage])
                value, shown = value_of(stage, own), shown_in(number)
                state = online_softmax.step(state, query_tile, tile.at[stage], value, shown, scale)
                plgpu.barrier_arrive(consumed.at[stage])
                return state

            out, top, total = lax.fori_loop(0, part_tiles, one, start())
            store_out(own, out, total)
            if own == 0:
                store_sums(top, total)

        def lead() -> None:
            weights, factors, made, taken = exchange

            def one(number: Any, state: Any) -> Any:
                out, top, total = state
                stage = lax.rem(number, jnp.int32(stages))
                plgpu.barrier_wait(ready.at[stage])
                shown = shown_in(number)
                weight, shrink, top, total = online_softmax.weigh(top, total, query_tile, tile.at[stage], shown, scale)

                @pl.when(number > 0)
                def _wait() -> None:
                    plgpu.barrier_wait(taken)

                weights[...], factors[...] = weight, shrink
                plgpu.commit_smem()
                plgpu.barrier_arrive(made)
                out = online_softmax.add(out, shrink, weight, value_of(stage, 0))
                plgpu.barrier_arrive(consumed.at[stage])
                return online_softmax.Softmax(out, top, total)

            out, top, total = lax.fori_loop(0, part_tiles, one, start())
            plgpu.barrier_wait(taken)
            factors[...] = total
            plgpu.commit_smem()
            plgpu.barrier_arrive(made)
            store_out(0, out, total)
            store_sums(top, total)

        def follow() -> None:
            weights, factors, made, taken = exchange

            def one(number: Any, out: Any) -> Any:
                stage = lax.rem(number, jnp.int32(stages))
                plgpu.barrier_wait(made)
                out = online_softmax.add(out, online_softmax.per_head(factors), weights, value_of(stage, 1))
                plgpu.barrier_arrive(taken)
                plgpu.barrier_arrive(consumed.at[stage])
                return out

            out = lax.fori_loop(0, part_tiles, one, online_softmax.start(columns).out)
            plgpu.barrier_wait(made)
            store_out(1, out, online_softmax.per_head(factors))

        roles = (lead, follow) if how.handed_on else (functools.partial(alone, 0), functools.partial(alone, 1))
        for own, (role, registers) in enumerate(zip(roles, how.consumer_registers, strict=True)):

            @pl.when(thread == own)
            def _consume(role: Any = role, registers: int = registers) -> None:
                plgpu.set_max_registers(registers, action="increase")
                role()

        @pl.when(thread == CONSUMERS)
        def _produce() -> None:
            plgpu.set_max_registers(how.producer_registers, action="decrease")
            produce()

    exchange_types = (
        plgpu.SMEM((HEADS, TOKENS), jnp.bfloat16, transforms=tiles.TILED), plgpu.SMEM((HEADS,), jnp.float32),
        plgpu.Barrier(), plgpu.Barrier(),
    )  # fmt: skip
    run = plgpu.kernel(
        mla_kernel,
        out_type=(
            jax.ShapeDtypeStruct((parts, requests, heads, latent), jnp.float32),
            jax.ShapeDtypeStruct((parts, requests, heads), jnp.float32),
        ),
        grid=(requests * parts * head_programs,), grid_names=("program",), num_threads=CONSUMERS + 1,
        thread_name="thread",
        scratch_types=[
            plgpu.SMEM((HEADS, width), jnp.bfloat16, transforms=tiles.TILED),
            plgpu.SMEM((stages, TOKENS, width), jnp.bfloat16, transforms=tiles.TILED),
            plgpu.SMEM((rings, TOKENS), jnp.int32),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
            *(exchange_types if how.handed_on else ()),
        ],
        compiler_params=online_softmax.COMPILER_PARAMS,
    )  # fmt: skip
    arrays = [array for each in rows for array in (each.hot_rows, each.group.reshape(1), each.place)]
    if sink is not None:
        sinks = sink.reshape(head_programs, own_heads)
        arrays.append(jnp.pad(sinks, ((0, 0), (0, HEADS - own_heads)), constant_values=-jnp.inf))
    outs, sums = run(query, *arrays)
    return online_softmax.merge(outs, sums, out_dtype)
