# SPDX-License-Identifier: Apache-2.0
"""What the attention kernels need beyond `indexed`: selected rows into swizzled tiles for the tensor cores, rows out.

TMA can't gather single rows into a tile that wgmma reads (a one-row slice of a tiled ref is refused), so each lane
copies 16 bytes, without waiting, to where the swizzle wants them. Like the words of `indexed`, whose emission helpers
these are written with, each has its `jax.numpy` twin under interpretation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.indexed import (
    LANES,
    _block_lane,
    _c,
    _compare,
    _emit,
    _i32,
    _load,
    _row_address,
    arith,
    interpreting,
    ir,
    llvm,
)

_REF = plgpu.RefType()
_SCALAR = plgpu.Layout.WG_SPLAT(())
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # how a bf16 tile lies in shared memory
_CHUNK = 16  # bytes a lane copies at once; 8 lanes share a row, so that a warp reads 4 times 128 bytes
_ROWS_A_PASS = LANES // 8


def _tile_places(tile: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """For a lane: row and 32-bit address of its chunk of the first 64 columns, for each pass; and its chunk's number.

    In a piece of 8 rows x 64 columns (1 KiB), chunk c of row r lies at chunk c xor r; the pieces of 8 rows follow each
    other in a row of pieces, so the next 64 columns are 1 KiB further on.
    """
    pieces_down, pieces_across, _, _ = ir.MemRefType(tile.type).shape
    lane = arith.andi(_block_lane(), _c(LANES - 1))
    chunk, row = arith.andi(lane, _c(7)), arith.shrui(lane, _c(3))
    base = llvm.ptrtoint(_i32(), mgpu_utils.memref_ptr(tile))
    inside = arith.addi(
        arith.muli(arith.andi(row, _c(7)), _c(128)), arith.muli(arith.xori(chunk, arith.andi(row, _c(7))), _c(_CHUNK))
    )
    base = arith.addi(arith.addi(base, inside), arith.muli(arith.shrui(row, _c(3)), _c(pieces_across * 1024)))
    passes = range(pieces_down * 8 // _ROWS_A_PASS)
    step = _ROWS_A_PASS // 8 * pieces_across * 1024
    return [(arith.addi(row, _c(p * _ROWS_A_PASS)), arith.addi(base, _c(p * step))) for p in passes], chunk


def _copy_async(to_address: Any, from_address: Any, take: Any, to_offset: int, from_offset: int) -> None:
    """16 bytes from global to shared memory without waiting, or 16 zero bytes where `take` is 0 instead of 16."""
    copy = f"cp.async.cg.shared.global [$0+{to_offset}], [$1+{from_offset}], 16, $2;"
    mgpu_utils.inline_ptx(copy, to_address, from_address, take, has_side_effects=True)


def gather_tile(tile: Any, source: Any, items: Any, *, item_bytes: int, offset: Array | int = 0) -> None:
    """`tile[i] = bytes of source at item items[i]`, zeros where that is negative; a copy to wait for by `copies_done`.

    One warpgroup; `items` must have been written before its last barrier.

    Args:
      tile: bf16 `[rows, columns]` in SMEM, `TILED`; rows a multiple of 16.
      source: anything in GMEM whose first byte is 16-byte aligned; item i begins at byte `i * item_bytes + offset`,
        which must be a multiple of 16 too.
      items: int32 `[at least rows]` in SMEM.
      item_bytes, offset: bytes; the offset may be a scalar of the kernel.
    """
    rows, columns = tile.shape
    if interpreting():
        at = jnp.maximum(items[...][:rows], 0)
        data = lax.bitcast_convert_type(source[...].reshape(-1), jnp.uint8).reshape(-1)
        columns_at = jnp.asarray(offset, jnp.int32) + jnp.arange(2 * columns, dtype=jnp.int32)
        taken = data[at[:, None] * item_bytes + columns_at[None]]
        taken = jnp.where(items[...][:rows, None] >= 0, taken, 0)
        tile[...] = lax.bitcast_convert_type(taken.reshape(rows, columns, 2), jnp.bfloat16)
        return

    fixed = isinstance(offset, int)

    @_emit((plgpu.RefType(TILED), _REF, _REF) if fixed else (plgpu.RefType(TILED), _REF, _REF, _SCALAR))
    def emit(ctx: Any, tile: Any, source: Any, items: Any, *offsets: Any) -> None:
        places, chunk = _tile_places(tile)
        begin = arith.addi(_c(offset) if fixed else offsets[0].registers.item(), arith.muli(chunk, _c(_CHUNK)))
        for row, to_address in places:
            item = _load(items, row)
            take = arith.select(_compare("sge", item, _c(0)), _c(_CHUNK), _c(0))
            address = _row_address(source, arith.maxsi(item, _c(0)), item_bytes, begin)
            for piece in range(columns // 64):
                _copy_async(to_address, address, take, piece * 1024, piece * 128)

    emit(tile, source, items, *(() if fixed else (offset,)))


def commit_copies() -> None:
    """The copies this lane has begun since the last call are one group."""
    _each_lane("cp.async.commit_group;")


def copies_done(but: int = 0) -> None:
    """All groups of copies but the last `but` are there for the tensor cores too, whichever lane began them."""
    _each_lane(f"cp.async.wait_group {but};")
    plgpu.commit_smem()


def _each_lane(instruction: str) -> None:
    if not interpreting():

        @_emit(())
        def emit(ctx: Any) -> None:
            mgpu_utils.inline_ptx(instruction, has_side_effects=True)

        emit()


def produce(
    count: int, stages: int, copy: Callable[[Any, Any], None], locate: Callable[[Any], Callable[[], None]], *,
    ready: Any, consumed: Any,
) -> None:  # fmt: skip
    """The producer's loop over a ring of `stages` tiles: copies run ahead of the consumers.

    Args:
      count: tiles in all.
      stages: tiles in shared memory, at least 2.
      copy: starts the copies of a tile, given its number and its stage.
      locate: looks up what the tile of a number consists of, and gives back what writes it down, called when the tile
        before has been begun; done one tile ahead, and once past the last one.
      ready: barriers `[stages]`, arrived at when a tile is there.
      consumed: barriers `[stages]`, waited for before a tile is overwritten, and all of them in the end.
    """
    lag = stages - 2  # tiles whose copies may still be on their way when the next one begins

    def one(number: Any, _: Any) -> Any:
        stage = lax.rem(number, jnp.int32(stages))
        write = locate(number + 1)

        @pl.when(number >= stages)
        def _wait() -> None:
            plgpu.barrier_wait(consumed.at[stage])

        copy(number, stage)
        commit_copies()
        write()
        copies_done(lag)

        @pl.when(number >= lag)
        def _arrive() -> None:
            plgpu.barrier_arrive(ready.at[lax.rem(number - lag, jnp.int32(stages))])

        return _

    lax.fori_loop(0, count, one, jnp.int32(0))
    for number in range(max(0, count - lag), count):
        copies_done(count - 1 - number)
        plgpu.barrier_arrive(ready.at[number % stages])
    for number in range(max(0, count - stages), count):  # leaves no phase unobserved
        plgpu.barrier_wait(consumed.at[number % stages])


def store_rows(target: Any, values: Array, layout: Any) -> None:
    """The first rows of a register array to GMEM: `target[...] = values[: rows of target]`.

    Args:
      target: float32 `[rows, n]` or `[rows]` in GMEM.
      values: float32, at least as many rows, in this (tiled) layout.
    """
    rows = target.shape[0]
    if interpreting():
        target[...] = values[:rows]
        return

    @_emit((_REF, layout))
    def emit(ctx: Any, target: Any, values: Any) -> None:
        strides, _ = ir.MemRefType(target.type).get_strides_and_offset()
        base = mgpu_utils.memref_ptr(target)
        places = values.layout.thread_idxs(values.shape)
        for where, value in zip(places, values.registers.flat, strict=True):
            row, *column = (arith.index_cast(_i32(), i) for i in where)
            at = arith.addi(arith.muli(row, _c(strides[0])), column[0]) if column else row
            with mgpu.when(_compare("slt", row, _c(rows))):
                llvm.store(value, mgpu_utils.getelementptr(base, [at], ir.F32Type.get()))

    emit(target, values)
