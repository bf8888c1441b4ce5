# SPDX-License-Identifier: Apache-2.0
"""Decode attention over selected latent records as a Mosaic GPU kernel.

A program attends with up to 64 heads of one request to one part of its places, 64 records (a tile) at a time. Three
warpgroups, with two tiles in shared memory:

* the producer looks up places and copies rows into a swizzled tile `[64, 576]`; fp8 rows it then dequantises there;
* the leader computes the logits of the tile, `q k^T`, and its softmax, in registers, and hands the weights on through
  shared memory;
* leader and follower each add up half of the columns: the value of a record is the first 512 columns of the tile it has
  as a key.

```
producer: rows of tile t+1 -> copies of tile t (when both released its stage) -> ready[stage]
leader:   ready[stage] -> logits -> softmax -> taken -> weights -> made -> values -> consumed[stage]
follower: made -> values -> taken, consumed[stage]
```
With `Tuning.handed_on` false there is no leader: both compute the same logits, which takes a third more products than
needed and no exchange. Either way the sums are the same to the last bit.
With several parts the results are merged by their log-sum-exp, in order. How many parts there are depends on shapes
alone, and places only on where a row is read: results don't depend on where rows lie.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import indexed, online_softmax, tiles
from pallas_kernels.online_softmax import HEADS, TOKENS
from pallas_kernels.row_format import RowFormat
from pallas_kernels.sparse_mla.tuning import Tuning, head_tiles, tuning

CONSUMERS = 2
LATENT, ROPE = 512, 64


def unsupported(query: Array, place: Array, row: RowFormat) -> str | None:
    """Why the kernel can't take these arguments, or None."""
    heads = query.shape[1]
    if (row.latent, row.rope) != (LATENT, ROPE):
        return f"the kernel has records of {LATENT} + {ROPE} numbers, got {row.latent} + {row.rope}"
    if row.record == "float32":
        return "the kernel has bfloat16 and fp8 records, got float32"
    if not query.size or not place.size:
        return f"there is nothing to do for a query of {list(query.shape)} and places of {list(place.shape)}"
    if heads % head_tiles(heads):
        return f"{heads} heads can't be shared out evenly over {head_tiles(heads)} programs of at most {HEADS}"
    return online_softmax.needs_hopper()


def sparse_mla(
    query: Array, hot_rows: Array, group: Array, place: Array, *, row: RowFormat, scale: float,
    how: Tuning | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """See `pallas_kernels.sparse_mla.sparse_mla`. `how.split` must cover all places."""
    requests, heads, width = query.shape
    selected, slots = place.shape[1], hot_rows.shape[1]
    how = how or tuning(requests, heads, selected, row.record)
    (parts, part_tiles), stages = how.split, how.stages
    head_programs = head_tiles(heads)
    own_heads = heads // head_programs
    columns = row.latent // CONSUMERS
    rings = stages + 1
    query = query.astype(jnp.bfloat16)

    def mla_kernel(
        query_ref: Any, hot_ref: Any, group_ref: Any, place_ref: Any, out_ref: Any, sum_ref: Any, query_tile: Any,
        tile: Any, items: Any, ready: Any, consumed: Any, *exchange: Any,
    ) -> None:  # fmt: skip
        program, thread = lax.axis_index("program"), lax.axis_index("thread")
        first_head = lax.rem(program, jnp.int32(head_programs)) * own_heads
        rest = lax.div(program, jnp.int32(head_programs))
        part, request = lax.rem(rest, jnp.int32(parts)), lax.div(rest, jnp.int32(parts))
        rows_ref, place_ref = hot_ref.at[group_ref[0]], place_ref.at[request]

        def locate(number: Any) -> None:
            """Slots of the records of a tile, -1 where there is none, into its place in the ring."""
            lane = indexed.positions(indexed.LANES)
            at = (part * part_tiles + number) * TOKENS + lane
            slot = indexed.gather(place_ref, jnp.where((lane < TOKENS) & (at < selected), at, -1))
            slot = jnp.minimum(slot, slots - 1)
            if how.prefetch:
                tiles.prefetch_rows(rows_ref, slot, row.row_bytes)
            indexed.scatter(items.at[lax.rem(number, jnp.int32(rings))], jnp.where(lane < TOKENS, lane, -1), slot)

        def copy(number: Any, stage: Any) -> None:
            rows = (tile.at[stage], rows_ref, items.at[lax.rem(number, jnp.int32(rings))])
            if row.record != "fp8":
                tiles.gather_tile(*rows, item_bytes=row.row_bytes)
            elif how.in_place:
                tiles.copy_fp8_tile(*rows, item_bytes=row.row_bytes, latent=row.latent)
            else:
                tiles.gather_fp8_tile(*rows, item_bytes=row.row_bytes, latent=row.latent)

        def convert(stage: Any) -> None:
            tiles.convert_fp8_tile(tile.at[stage], latent=row.latent)

        def produce() -> None:
            lane = indexed.positions(indexed.LANES)
            head = jnp.where(lane < own_heads, request * heads + first_head + lane, -1)
            indexed.scatter(items.at[rings - 1], jnp.where(lane < HEADS, lane, -1), head)
            locate(jnp.int32(0))
            plgpu.commit_smem()
            tiles.gather_tile(query_tile, query_ref, items.at[rings - 1], item_bytes=2 * width)
            finish = convert if row.record == "fp8" and how.in_place else None
            tiles.produce(part_tiles, stages, copy, locate, ready=ready, consumed=consumed, finish=finish)

        def shown_in(number: Any) -> Callable[[], Array]:
            def shown() -> Array:
                item = online_softmax.per_token(items.at[lax.rem(number, jnp.int32(rings))])
                return lax.broadcast_in_dim(item, (HEADS, TOKENS), [1]) >= 0

            return shown

        def value_of(stage: Any, own: int) -> Any:
            return tile.at[stage, :, pl.ds(own * columns, columns)]

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

            out, top, total = lax.fori_loop(0, part_tiles, one, online_softmax.start(columns))
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

            out, top, total = lax.fori_loop(0, part_tiles, one, online_softmax.start(columns))
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
            jax.ShapeDtypeStruct((parts, requests, heads, row.latent), jnp.float32),
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
    return online_softmax.merge(*run(query, hot_rows, group.reshape(1), place))
