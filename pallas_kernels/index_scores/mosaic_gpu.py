# SPDX-License-Identifier: Apache-2.0
"""Index scores as Mosaic GPU kernels: tiles of keys through the copy engine, the tensor cores, a sum or a maximum.

Every row of scores has a few programs of one warpgroup; each takes every `parts`-th tile of records. A pipeline keeps
`stages` tiles on their way. A tile of records is the left operand (64 at a time), the row's queries, in shared memory,
are the right one, so that few heads don't leave the tensor cores empty; what comes out is [records, heads] in float32.

dsa     bfloat16 keys go to the tensor cores as they lie in shared memory; e4m3 keys are widened to float16 in
        registers, which is exact. Their bfloat16 queries become float16 after a shift of each head by a power of two
        that puts its largest value into [1, 2): exact but for values below 2^-14 of that.
quest   two products, of max(query, 0) with the maxima and of min(query, 0) with the minima of a page's keys.
msa     a tile is a block of bfloat16 keys, and what is written is its maximum over the visible ones, for each head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import indexed, tiles
from pallas_kernels.index_scores.tuning import Tuning, tuning

_SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_SWIZZLED_8BIT = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))
MAX_HEADS = 128
MAX_QUEST_HEADS = 16
MAX_MSA_HEADS = 32
MSA_BLOCKS = 64, 128  # tokens of a block that can be a tile


def dsa_unsupported(query: Array, keys: Array) -> str | None:
    """Why `dsa_scores` can't take these arrays, or None."""
    heads, records = query.shape[1], keys.shape[2]
    if keys.dtype not in (jnp.bfloat16, jnp.float8_e4m3fn):
        return f"keys must be bfloat16 or float8_e4m3fn, got {keys.dtype}"
    if keys.dtype == jnp.float8_e4m3fn and query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"float8_e4m3fn keys need a bfloat16 or float16 query, got {query.dtype}"
    if heads % 8 or heads > MAX_HEADS:
        return f"heads must be a multiple of 8 up to {MAX_HEADS}, got {heads}"
    return _unsupported(keys.shape[3], records)


def quest_unsupported(query: Array, key_min: Array) -> str | None:
    """Why `quest_scores` can't take these arrays, or None."""
    if query.dtype != jnp.bfloat16 or key_min.dtype != jnp.bfloat16:
        return f"query and bounds must be bfloat16, got {query.dtype} and {key_min.dtype}"
    if query.shape[2] > MAX_QUEST_HEADS:
        return f"at most {MAX_QUEST_HEADS} heads of a group, got {query.shape[2]}"
    return _unsupported(query.shape[3], key_min.shape[2])


def msa_unsupported(query: Array, keys: Array, block_tokens: int) -> str | None:
    """Why `msa_scores` can't take these arrays, or None."""
    if keys.dtype != jnp.bfloat16:
        return f"keys must be bfloat16, got {keys.dtype}"
    if query.shape[1] > MAX_MSA_HEADS:
        return f"at most {MAX_MSA_HEADS} index heads, got {query.shape[1]}"
    if block_tokens not in MSA_BLOCKS:
        return f"blocks must have {' or '.join(map(str, MSA_BLOCKS))} tokens, got {block_tokens}"
    if keys.shape[2] < block_tokens:
        return f"{keys.shape[2]} tokens are less than a block of {block_tokens}"
    return _unsupported(keys.shape[3], keys.shape[2])


def _unsupported(channels: int, records: int) -> str | None:
    if channels != 128:
        return f"channels must be 128, got {channels}"
    if records % 8 or records < 64:
        return f"the copy engine needs a multiple of 8 records, at least 64, got {records}"
    if jax.sharding.get_abstract_mesh().abstract_device is None:
        capability = getattr(jax.devices()[0], "compute_capability", "9.0")
        if float(capability) >= 10:
            return f"its tensor core instructions are those of compute capability 9.0, this device has {capability}"
    return None


def dsa_scores(
    query: Array, weight: Array, keys: Array, key_scale: Array | None, layer: Array, *, scale: float,
    length: Array | None = None, busy: int | None = None, how: Tuning | None = None,
) -> Array:  # fmt: skip
    """See `pallas_kernels.index_scores.dsa_scores`."""
    rows, heads, channels = query.shape
    records, fp8 = keys.shape[2], key_scale is not None
    # The scale is positive, so it may leave the relu. Without the barrier some programs would make one constant of it
    # and of what the weights were multiplied by before, and round them otherwise.
    weight = lax.optimization_barrier(weight) * jnp.float32(scale)
    if fp8:
        _, exponent = jnp.frexp(jnp.max(jnp.abs(query), axis=2).astype(jnp.float32))
        shift = exponent - 1
        query = jnp.ldexp(query.astype(jnp.float32), -shift[..., None]).astype(jnp.float16)
        weight = jnp.ldexp(weight, shift)
    else:
        query = query.astype(keys.dtype)
    how = how or tuning(busy or rows, records, channels * keys.dtype.itemsize + 4 * fp8)
    if length is None:
        length = jnp.full(rows, records, jnp.int32)

    def dsa_scores_kernel(query_ref: Any, weight_ref: Any, keys_ref: Any, *refs: Any) -> None:
        *scale_ref, layer_ref, length_ref, out_ref, queries, ready, arrived, keys_smem = refs[: 7 + fp8]
        scales = refs[7 + fp8 :]
        row, part = lax.axis_index("row"), lax.axis_index("part")
        layer = layer_ref[0]
        plgpu.copy_gmem_to_smem(query_ref.at[row], queries, ready)
        weights = plgpu.load(weight_ref.at[row], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
        weights = lax.broadcast_in_dim(weights, (how.block, heads), (1,))
        plgpu.barrier_wait(ready)

        def tile(slot: Array, here: Any) -> None:
            left = keys_smem[slot].astype(jnp.float16) if fp8 else keys_smem.at[slot]
            products = _products((how.block, heads), (left, queries))
            score = jnp.sum(jnp.maximum(products, 0.0) * weights, axis=1)
            if fp8:
                by_record = plgpu.Layout.WGMMA.reduce(1)
                score = score * plgpu.load(scales[0].at[slot], layout=by_record, optimized=False)
            out_ref.at[row, here][...] = score

        def blank(here: Any) -> None:
            nothing = jnp.zeros(how.block, jnp.float32)
            out_ref.at[row, here][...] = plgpu.layout_cast(nothing, plgpu.Layout.WGMMA.reduce(1))

        sources = [(lambda here: keys_ref.at[layer, row, here], keys_smem)]
        if fp8:
            sources.append((lambda here: scale_ref[0].at[layer, row, here], scales[0]))
        _over_tiles(tile, blank, sources, arrived, part, how, jnp.minimum(length_ref[row], records), records)

    scratch_types = [
        plgpu.SMEM((heads, channels), query.dtype, transforms=_SWIZZLED),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=1 + fp8, num_barriers=how.stages),
        plgpu.SMEM((how.stages, how.block, channels), keys.dtype, transforms=_SWIZZLED_8BIT if fp8 else _SWIZZLED),
        *([plgpu.SMEM((how.stages, how.block), jnp.float32)] if fp8 else []),
    ]
    return plgpu.kernel(
        dsa_scores_kernel, out_type=jax.ShapeDtypeStruct((rows, records), jnp.float32), grid=(rows, how.parts),
        grid_names=("row", "part"), scratch_types=scratch_types,
    )(query, weight, keys, *([key_scale] if fp8 else []), layer.reshape(1), length)  # fmt: skip


def quest_scores(query: Array, key_min: Array, key_max: Array, layer: Array, *, how: Tuning | None = None) -> Array:
    """See `pallas_kernels.index_scores.quest_scores`."""
    rows, groups, heads, channels = query.shape
    pages = key_min.shape[2]
    columns = -(-heads // 8) * 8
    query = jnp.pad(query, ((0, 0), (0, 0), (0, columns - heads), (0, 0)))
    how = how or tuning(rows * groups, pages, 2 * channels * key_min.dtype.itemsize)

    def quest_scores_kernel(
        up_ref: Any, down_ref: Any, min_ref: Any, max_ref: Any, layer_ref: Any, out_ref: Any, up: Any, down: Any,
        ready: Any, arrived: Any, mins: Any, maxs: Any,
    ) -> None:  # fmt: skip
        row, group, part = lax.axis_index("row"), lax.axis_index("group"), lax.axis_index("part")
        layer = layer_ref[0]
        plgpu.copy_gmem_to_smem(up_ref.at[row, group], up, ready)
        plgpu.copy_gmem_to_smem(down_ref.at[row, group], down, ready)
        plgpu.barrier_wait(ready)
        column = plgpu.broadcasted_iota(jnp.int32, (how.block, columns), 1, layout=plgpu.Layout.WGMMA)

        def tile(slot: Array, here: Any) -> None:
            products = _products((how.block, columns), (maxs.at[slot], up), (mins.at[slot], down))
            for head in range(heads):
                out_ref.at[row, group, head, here][...] = jnp.sum(jnp.where(column == head, products, 0.0), axis=1)

        sources = [
            (lambda here: min_ref.at[layer, row, here, group], mins),
            (lambda here: max_ref.at[layer, row, here, group], maxs),
        ]
        _over_tiles(tile, lambda here: None, sources, arrived, part, how, jnp.int32(pages), pages)

    queries = plgpu.SMEM((columns, channels), query.dtype, transforms=_SWIZZLED)
    bounds = plgpu.SMEM((how.stages, how.block, channels), key_min.dtype, transforms=_SWIZZLED)
    arrived = plgpu.Barrier(num_arrivals=2, num_barriers=how.stages)
    return plgpu.kernel(
        quest_scores_kernel, out_type=jax.ShapeDtypeStruct((rows, groups, heads, pages), jnp.float32),
        grid=(rows, groups, how.parts), grid_names=("row", "group", "part"),
        scratch_types=[queries, queries, plgpu.Barrier(num_arrivals=2), arrived, bounds, bounds],
    )(jnp.maximum(query, 0), jnp.minimum(query, 0), key_min, key_max, layer.reshape(1))  # fmt: skip


def msa_scores(
    query: Array, keys: Array, layer: Array, length: Array, *, block_tokens: int, how: Tuning | None = None
) -> Array:
    """See `pallas_kernels.index_scores.msa_scores`; the launch's tiles are the blocks."""
    rows, heads, channels = query.shape
    records, columns = keys.shape[2], -(-heads // 8) * 8
    query = jnp.pad(query.astype(keys.dtype), ((0, 0), (0, columns - heads), (0, 0)))
    how = (how or tuning(rows, records, channels * keys.dtype.itemsize))._replace(block=block_tokens)

    def msa_scores_kernel(
        query_ref: Any, keys_ref: Any, layer_ref: Any, length_ref: Any, out_ref: Any, queries: Any, ready: Any,
        arrived: Any, keys_smem: Any,
    ) -> None:  # fmt: skip
        row, part = lax.axis_index("row"), lax.axis_index("part")
        layer, visible = layer_ref[0], jnp.minimum(length_ref[row], records)
        plgpu.copy_gmem_to_smem(query_ref.at[row], queries, ready)
        plgpu.barrier_wait(ready)
        token = plgpu.broadcasted_iota(jnp.int32, (block_tokens, columns), 0, layout=plgpu.Layout.WGMMA)

        def write(here: Any, score: Array) -> None:
            block = lax.div(here.start + (block_tokens - 1), jnp.int32(block_tokens))
            # Blocks of few heads are less than a line of 128 bytes, which an assignment must not write in JAX 0.12.
            tiles.store_rows(out_ref.at[row, block], score, plgpu.Layout.WGMMA.reduce(0))

        def tile(slot: Array, here: Any) -> None:
            products = _products((block_tokens, columns), (keys_smem.at[slot], queries))
            # A last block that is shorter lies in a tile that begins with tokens of the block before.
            before = lax.rem(block_tokens - lax.rem(here.start, jnp.int32(block_tokens)), jnp.int32(block_tokens))
            seen = (token >= before) & (token < visible - here.start)
            write(here, jnp.max(jnp.where(seen, products, -jnp.inf), axis=0))

        def blank(here: Any) -> None:
            write(here, plgpu.layout_cast(jnp.full(columns, -jnp.inf, jnp.float32), plgpu.Layout.WGMMA.reduce(0)))

        sources = [(lambda here: keys_ref.at[layer, row, here], keys_smem)]
        _over_tiles(tile, blank, sources, arrived, part, how, visible, records)

    run = plgpu.kernel(
        msa_scores_kernel, out_type=jax.ShapeDtypeStruct((rows, -(-records // block_tokens), columns), jnp.float32),
        grid=(rows, how.parts), grid_names=("row", "part"),
        scratch_types=[
            plgpu.SMEM((columns, channels), keys.dtype, transforms=_SWIZZLED), plgpu.Barrier(),
            plgpu.Barrier(num_barriers=how.stages),
            plgpu.SMEM((how.stages, block_tokens, channels), keys.dtype, transforms=_SWIZZLED),
        ],
    )  # fmt: skip
    # Written by block, as a block's scores then lie side by side; turning them is little work for XLA.
    return run(query, keys, layer.reshape(1), length)[..., :heads].transpose(0, 2, 1)


def _products(shape: tuple[int, int], *pairs: tuple[Any, Any]) -> Array:
    """float32 `[records, heads]`: the sum over pairs of `left @ right.T`; left `[records, C]` a ref or an array."""
    if indexed.interpreting() and isinstance(pairs[0][0], Array):  # the interpreter's wgmma takes refs only
        ((left, right),) = pairs
        return jnp.dot(left, right[...].T, preferred_element_type=jnp.float32)

    def product(acc: Any) -> Array:
        for left, right in pairs:
            plgpu.wgmma(acc, left, right.T)
        return acc[...]

    return pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))


def _over_tiles(
    tile: Callable[[Array, Any], None], blank: Callable[[Any], None],
    sources: Sequence[tuple[Callable[[Any], Any], Any]], arrived: Any, part: Array, how: Tuning, length: Array,
    records: int,
) -> None:  # fmt: skip
    """Runs `tile(slot, records)` on every tile of this part that begins before `length`, `blank(records)` on the rest.

    The last tile ends with the last record: where it overlaps the one before, both write the same values.

    Args:
      sources: what to copy of some records, and the SMEM ref `[stages, ...]` that holds it.
      arrived: barriers `[stages]` for as many copies as there are sources.
      records: of the row, at least `how.block`.
    """
    total, last = -(-records // how.block), records - how.block

    def of(step: Any) -> Any:
        """The records of this part's tile number `step`."""
        return pl.ds(jnp.minimum((step * how.parts + part) * how.block, last), how.block)

    def mine(count: Any) -> Any:
        """How many of the first `count` tiles are this part's."""
        return lax.div(jnp.maximum(count - part + (how.parts - 1), 0), jnp.int32(how.parts))

    def fetch(step: Any, slot: Any) -> None:
        for source, buffer in sources:
            plgpu.copy_gmem_to_smem(source(of(step)), buffer.at[slot], arrived.at[slot])

    begun = jnp.where(length > last, jnp.int32(total), lax.div(length + (how.block - 1), jnp.int32(how.block)))
    count = mine(begun)
    for step in range(how.stages):
        pl.when(step < count)(lambda step=step: fetch(jnp.int32(step), step))

    def one(step: Array, _: Any) -> Any:
        slot = lax.rem(step, jnp.int32(how.stages))
        plgpu.barrier_wait(arrived.at[slot])
        tile(slot, of(step))
        plgpu.commit_smem()  # all lanes are done with the slot
        pl.when(step + how.stages < count)(lambda: fetch(step + how.stages, slot))
        return _

    lax.fori_loop(0, count, one, jnp.int32(0))

    def empty(step: Array, _: Any) -> Any:
        blank(of(step))
        return _

    lax.fori_loop(count, mine(jnp.int32(total)), empty, jnp.int32(0))
