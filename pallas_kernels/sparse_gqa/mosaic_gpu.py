# SPDX-License-Identifier: Apache-2.0
"""Decode attention over selected pages as a Mosaic GPU kernel.

A program attends with the query heads of two neighbouring KV heads (one, if there is an odd number) of a request to one
part of its tokens, 64 tokens (a tile) at a time: 4 pages of 16. A record holds, token by token, the keys of all KV
heads and then their values, so the tiles of a head are 64 keys and 64 values of 256 bytes each, picked out by item
number `slot * tokens + token` and a fixed offset.

* the producer warpgroup looks up slots, and copies keys and values into swizzled tiles `[64, C]`;
* a consumer for each KV head computes logits, softmax and sums of values in registers. The query heads are the rows of
  the products, 64 of them, so that with 4 per KV head 60 rows are zeros: the tensor cores have the time, memory rules.

Tokens past `visible` are zeroed when they are copied. With `head_mask` a word of bits per token says who sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels import indexed, online_softmax, tiles
from pallas_kernels.online_softmax import HEADS, TOKENS
from pallas_kernels.sparse_gqa.tuning import Tuning, tuning

CHANNELS = 128
MASK_BITS = 32


def unsupported(query: Array, hot_rows: Array, place: Array, dtype: jnp.dtype, *, masked: bool) -> str | None:
    """Why the kernel can't take these arguments, or None."""
    _, kv_heads, heads, channels = query.shape
    if not query.size or not place.size:
        return f"there is nothing to do for a query of {list(query.shape)} and places of {list(place.shape)}"
    if dtype != jnp.bfloat16:
        return f"the kernel has bfloat16 records, got {dtype}"
    if channels != CHANNELS:
        return f"the kernel has heads of {CHANNELS} channels, got {channels}"
    if heads > HEADS:
        return f"the kernel has at most {HEADS} heads per KV head, got {heads}"
    if masked and heads > MASK_BITS:
        return f"with head_mask the kernel has at most {MASK_BITS} heads per KV head, got {heads}"
    tokens = hot_rows.shape[1] * (hot_rows.shape[2] // (2 * kv_heads * channels // 2))
    if tokens >= 1 << 31:
        return f"the slots of a group hold {tokens} tokens, more than int32 can count"
    return online_softmax.needs_hopper()


def mask_words(head_mask: Array) -> Array:
    """bool `[R, G, heads, K]` as int32 `[R, G, K]`, bit h for head h."""
    bit = jnp.left_shift(jnp.uint32(1), jnp.arange(head_mask.shape[2], dtype=jnp.uint32))
    bits = jnp.where(head_mask, bit[None, None, :, None], jnp.uint32(0))
    return lax.bitcast_convert_type(jnp.sum(bits, axis=2, dtype=jnp.uint32), jnp.int32)


def sparse_gqa(
    query: Array, hot_rows: Array, group: Array, place: Array, visible: Array, head_mask: Array | None, *,
    scale: float, out_dtype: DTypeLike = jnp.float32, how: Tuning | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """See `pallas_kernels.sparse_gqa.sparse_gqa`; bfloat16 records. `how.split` must cover all tokens."""
    requests, kv_heads, heads, channels = query.shape
    selected, slots = place.shape[1], hot_rows.shape[1]
    head_bytes = 2 * channels
    token_bytes = 2 * kv_heads * head_bytes
    tokens = 4 * hot_rows.shape[2] // token_bytes
    how = how or tuning(requests, kv_heads, selected * tokens, head_mask is not None)
    (parts, part_tiles), stages = how.split, how.stages
    rings, consumers = stages + 1, how.consumers
    head_programs, left = divmod(kv_heads, consumers)
    if left or not head_programs:
        raise ValueError(f"sparse_gqa: {kv_heads} KV heads can't be shared out over {consumers} consumers a program")
    masked = head_mask is not None
    query = query.astype(jnp.bfloat16)

    def gqa_kernel(
        query_ref: Any, hot_ref: Any, group_ref: Any, place_ref: Any, visible_ref: Any, *refs: Any
    ) -> None:  # fmt: skip
        mask_ref, refs = (refs[0], refs[1:]) if masked else (None, refs)
        out_ref, sum_ref, query_tile, key_tile, value_tile, items, ready, consumed, *mask_words_ring = refs
        program, thread = lax.axis_index("program"), lax.axis_index("thread")
        first_head: Any = lax.rem(program, jnp.int32(head_programs)) * consumers if head_programs > 1 else 0
        rest = lax.div(program, jnp.int32(head_programs))
        part, request = lax.rem(rest, jnp.int32(parts)), lax.div(rest, jnp.int32(parts))
        rows_ref, place_ref, visible_ref = hot_ref.at[group_ref[0]], place_ref.at[request], visible_ref.at[request]

        def locate(number: Any) -> Callable[[], None]:
            """Looks up items of the tokens of a tile, -1 where there is none, and who sees them; to be written down."""
            lane = indexed.positions(indexed.LANES)
            at = (part * part_tiles + number) * TOKENS + lane
            record, token = lax.div(at, jnp.int32(tokens)), lax.rem(at, jnp.int32(tokens))
            record = jnp.where((lane < TOKENS) & (record < selected), record, -1)
            slot, count = indexed.gather(place_ref, record), indexed.gather(visible_ref, record, 0)
            bits = []
            if mask_ref is not None:
                heads_at = [mask_ref.at[request, first_head + own] for own in range(consumers)]
                bits = [indexed.gather(head, record, 0) for head in heads_at]

            def write() -> None:
                ring, target = lax.rem(number, jnp.int32(rings)), jnp.where(lane < TOKENS, lane, -1)
                seen = (slot >= 0) & (token < count)
                item = jnp.minimum(slot, slots - 1) * tokens + token
                indexed.scatter(items.at[ring], target, jnp.where(seen, item, -1))
                for own, word in enumerate(bits):
                    indexed.scatter(mask_words_ring[0].at[ring, own], target, jnp.where(seen, word, 0))

            return write

        def produce() -> None:
            lane = indexed.positions(indexed.LANES)
            head = jnp.where(lane < heads, (request * kv_heads + first_head) * heads + lane, -1)
            indexed.scatter(items.at[rings - 1], jnp.where(lane < HEADS, lane, -1), head)
            locate(jnp.int32(0))()
            plgpu.commit_smem()
            for own in range(consumers):
                tiles.gather_tile(
                    query_tile.at[own], query_ref, items.at[rings - 1], item_bytes=head_bytes,
                    offset=own * heads * head_bytes,
                )  # fmt: skip

            def copy(number: Any, stage: Any) -> None:
                ring = lax.rem(number, jnp.int32(rings))
                for target, offset in ((key_tile, 0), (value_tile, kv_heads)):
                    for own in range(consumers):
                        tiles.gather_tile(
                            target.at[stage * consumers + own], rows_ref, items.at[ring], item_bytes=token_bytes,
                            offset=(first_head + (own + offset)) * head_bytes,
                        )  # fmt: skip

            tiles.produce(part_tiles, stages, copy, locate, ready=ready, consumed=consumed)

        def consume(own: int) -> None:
            def one(number: Any, state: Any) -> Any:
                stage, ring = lax.rem(number, jnp.int32(stages)), lax.rem(number, jnp.int32(rings))
                plgpu.barrier_wait(ready.at[stage])

                def shown() -> Array:
                    shape = (HEADS, TOKENS)
                    if not masked:
                        item = online_softmax.per_token(items.at[ring])
                        return lax.broadcast_in_dim(item, shape, [1]) >= 0
                    words = lax.broadcast_in_dim(online_softmax.per_token(mask_words_ring[0].at[ring, own]), shape, [1])
                    head = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
                    bit = jnp.left_shift(jnp.int32(1), jnp.minimum(head, MASK_BITS - 1))
                    return (words & bit) != 0

                key, value = (t.at[stage * consumers + own] for t in (key_tile, value_tile))
                state = online_softmax.step(state, query_tile.at[own], key, value, shown, scale)
                plgpu.barrier_arrive(consumed.at[stage])
                return state

            out, top, total = lax.fori_loop(0, part_tiles, one, online_softmax.start(channels))
            at = part, request, first_head + own
            tiles.store_rows(out_ref.at[at], online_softmax.mean(out, total), plgpu.Layout.WGMMA)
            sums = online_softmax.log_sum_exp(top, total)
            tiles.store_rows(sum_ref.at[at], sums, plgpu.Layout.WGMMA.reduce(1))

        for own in range(consumers):

            @pl.when(thread == own)
            def _consume(own: int = own) -> None:
                plgpu.set_max_registers(how.consumer_registers, action="increase")
                consume(own)

        @pl.when(thread == consumers)
        def _produce() -> None:
            plgpu.set_max_registers(how.producer_registers, action="decrease")
            produce()

    def tile(*shape: int) -> Any:
        return plgpu.SMEM((*shape, channels), jnp.bfloat16, transforms=tiles.TILED)

    scratch_types = [
        tile(consumers, HEADS), tile(stages * consumers, TOKENS), tile(stages * consumers, TOKENS),
        plgpu.SMEM((rings, TOKENS), jnp.int32), plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
    ]  # fmt: skip
    if masked:
        scratch_types.append(plgpu.SMEM((rings, consumers, TOKENS), jnp.int32))
    run = plgpu.kernel(
        gqa_kernel,
        out_type=(
            jax.ShapeDtypeStruct((parts, requests, kv_heads, heads, channels), jnp.float32),
            jax.ShapeDtypeStruct((parts, requests, kv_heads, heads), jnp.float32),
        ),
        grid=(requests * parts * head_programs,), grid_names=("program",), num_threads=consumers + 1,
        thread_name="thread", scratch_types=scratch_types, compiler_params=online_softmax.COMPILER_PARAMS,
    )  # fmt: skip
    masks = (mask_words(head_mask),) if head_mask is not None else ()
    outs, sums = run(query, hot_rows, group.reshape(1), place, visible, *masks)
    return online_softmax.merge(outs, sums, out_dtype)
