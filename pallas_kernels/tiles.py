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
    _elements,
    _emit,
    _i32,
    _load,
    arith,
    interpreting,
    ir,
    llvm,
    spread,
)

_REF = plgpu.RefType()
_SCALAR = plgpu.Layout.WG_SPLAT(())
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # how a bf16 tile lies in shared memory
_CHUNK = 16  # bytes a lane copies at once; 8 lanes share a row, so that a warp reads 4 times 128 bytes
_ROWS_A_PASS = LANES // 8
_SCALED = 128  # e4m3 values of a record that share a scale


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


def _row_address(source: Any, row: Any, row_bytes: int, offset: Any) -> Any:
    """64-bit address of byte `offset` of a row."""
    i64 = ir.IntegerType.get_signless(64)
    base = llvm.ptrtoint(i64, mgpu_utils.memref_ptr(source))
    return arith.addi(arith.addi(base, arith.muli(arith.extsi(i64, row), mgpu.c(row_bytes, i64))),
                      arith.extsi(i64, offset))  # fmt: skip


def _copy_async(to_address: Any, from_address: Any, take: Any, to_offset: int, from_offset: int) -> None:
    """16 bytes from global to shared memory without waiting, or 16 zero bytes where `take` is 0 instead of 16."""
    copy = f"cp.async.cg.shared.global [$0+{to_offset}], [$1+{from_offset}], 16, $2;"
    mgpu_utils.inline_ptx(copy, to_address, from_address, take, has_side_effects=True)


def prefetch_rows(source: Any, rows: Array, row_bytes: int) -> None:
    """Asks for rows of `source` to be in the L2 cache soon, one for each lane, none where it is negative.

    Args:
      rows: int32 `[128]` in registers; row_bytes: a multiple of 16, where the rows begin too.
    """
    if interpreting():
        return
    (n,) = rows.shape

    @_emit((_REF, spread(n)))
    def emit(ctx: Any, source: Any, rows: Any) -> None:
        for row in _elements(rows):
            with mgpu.when(_compare("sge", row, _c(0))):
                address = _row_address(source, row, row_bytes, _c(0))
                fetch = f"cp.async.bulk.prefetch.L2.global [$0], {row_bytes};"
                mgpu_utils.inline_ptx(fetch, address, has_side_effects=True)

    emit(source, rows)


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


def _fp8_records(tile: Any, source: Any, items: Any, latent: int) -> None:
    """Twin of the words for fp8 records."""
    rows, columns = tile.shape
    words = source[...][jnp.maximum(items[...][:rows], 0)]
    values, scales, rest = jnp.split(words, [latent // 4, latent // 4 + latent // _SCALED], axis=-1)
    values = lax.bitcast_convert_type(values, jnp.float8_e4m3fn).reshape(rows, latent).astype(jnp.float32)
    scales = jnp.repeat(lax.bitcast_convert_type(scales, jnp.float32), _SCALED, axis=-1)
    rope = lax.bitcast_convert_type(rest[:, : (columns - latent) // 2], jnp.bfloat16).reshape(rows, -1)
    record = jnp.concatenate([(values * scales).astype(jnp.bfloat16), rope], axis=-1)
    tile[...] = jnp.where(items[...][:rows, None] >= 0, record, jnp.bfloat16(0))


def _global(address: Any, byte: int) -> Any:
    """Pointer from a 64-bit address."""
    return llvm.inttoptr(llvm.PointerType.get(1), arith.addi(address, mgpu.c(byte, address.type)))


def _shared(address: Any) -> Any:
    """Pointer from a 32-bit address."""
    return llvm.inttoptr(llvm.PointerType.get(3), address)


def _scaled(word: Any, scale: Any) -> list[Any]:
    """Four e4m3 times a float32, as two words of two bf16."""
    f32, i16, half2 = ir.F32Type.get(), ir.IntegerType.get_signless(16), ir.VectorType.get((2,), ir.F16Type.get())
    out = []
    for shift in (0, 16):
        two = arith.trunci(i16, arith.shrui(word, _c(shift)))
        halves = mgpu_utils.inline_ptx("cvt.rn.f16x2.e4m3x2 $0, $1;", two, result_types=_i32())
        halves = llvm.bitcast(half2, halves)
        low, high = (arith.mulf(arith.extf(f32, llvm.extractelement(halves, _c(i))), scale) for i in (0, 1))
        out.append(mgpu_utils.inline_ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", high, low, result_types=_i32()))
    return out


def _store_chunk(words: list[Any], address: Any) -> None:
    """Four words to shared memory at once."""
    value = llvm.mlir_undef(ir.VectorType.get((4,), _i32()))
    for i, word in enumerate(words):
        value = llvm.insertelement(value, word, _c(i))
    llvm.store(value, _shared(address), alignment=_CHUNK)


def gather_fp8_tile(tile: Any, source: Any, items: Any, *, item_bytes: int, latent: int, ahead: int = 2) -> None:
    """As `gather_tile`, for records of e4m3 values, float32 scales of 128 of them each, and 64 bf16 numbers.

    `tile[i, :latent] = bf16(float32(value) * scale)`, rounded to nearest even, then the 64 numbers as they are. Values
    go through registers: nothing but the loads of `ahead` passes of 16 rows is under way at a time.

    Args:
      latent: values of a record, a multiple of 128.
      ahead: passes whose loads are under way while one is converted.
    """
    if interpreting():
        _fp8_records(tile, source, items, latent)
        return
    pieces = latent // 64

    @_emit((plgpu.RefType(TILED), _REF, _REF))
    def emit(ctx: Any, tile: Any, source: Any, items: Any) -> None:
        pair, four_scales = ir.VectorType.get((2,), _i32()), ir.VectorType.get((latent // _SCALED,), ir.F32Type.get())
        places, chunk = _tile_places(tile)

        def begin(number: int) -> tuple[Any, Any, list[Any]]:
            """Loads of a pass; its last 64 columns are copied as they are."""
            row, to_address = places[number]
            item = _load(items, row)
            known = _compare("sge", item, _c(0))
            address = _row_address(source, arith.maxsi(item, _c(0)), item_bytes, _c(0))
            scales = llvm.load(four_scales, _global(address, latent), alignment=16)
            own = arith.addi(address, arith.extsi(address.type, arith.muli(chunk, _c(8))))
            loaded = [llvm.load(pair, _global(own, 64 * piece), alignment=8) for piece in range(pieces)]
            take = arith.select(known, _c(_CHUNK), _c(0))
            rope = arith.addi(own, arith.extsi(own.type, arith.muli(chunk, _c(8))))
            _copy_async(to_address, rope, take, pieces * 1024, latent + latent // 32)
            return known, scales, loaded

        begun = [begin(number) for number in range(min(ahead, len(places)))]
        for number, (_, to_address) in enumerate(places):
            if number + ahead < len(places):
                begun.append(begin(number + ahead))
            known, scales, loaded = begun[number]
            for piece, words in enumerate(loaded):
                scale = llvm.extractelement(scales, _c(piece // 2))
                made = [w for i in (0, 1) for w in _scaled(llvm.extractelement(words, _c(i)), scale)]
                made = [arith.select(known, word, _c(0)) for word in made]
                _store_chunk(made, arith.addi(to_address, _c(piece * 1024)))

    emit(tile, source, items)


def _raw_places(tile: Any) -> tuple[list[Any], Any]:
    """For a lane: 32-bit address of its raw chunk of the first 128 columns, for each pass; and 1 if that is chunk 1.

    Lane l of the 8 of a row has the 16 values that become chunks 2 (l & 3) and 2 (l & 3) + 1 of the 64 columns l >> 2.
    They wait in the first of the two, for l >= 4 in the second: so 8 lanes are in 8 different chunks.
    """
    pieces_down, pieces_across, _, _ = ir.MemRefType(tile.type).shape
    lane = arith.andi(_block_lane(), _c(LANES - 1))
    number, row = arith.andi(lane, _c(7)), arith.shrui(lane, _c(3))
    second, in_piece = arith.shrui(number, _c(2)), arith.andi(row, _c(7))
    chunk = arith.addi(arith.muli(arith.andi(number, _c(3)), _c(2)), second)
    inside = arith.addi(arith.muli(in_piece, _c(128)), arith.muli(arith.xori(chunk, in_piece), _c(_CHUNK)))
    piece = arith.addi(arith.muli(arith.shrui(row, _c(3)), _c(pieces_across)), second)
    base = arith.addi(
        llvm.ptrtoint(_i32(), mgpu_utils.memref_ptr(tile)), arith.addi(inside, arith.muli(piece, _c(1024)))
    )
    step = _ROWS_A_PASS // 8 * pieces_across * 1024
    return [arith.addi(base, _c(p * step)) for p in range(pieces_down * 8 // _ROWS_A_PASS)], second


def copy_fp8_tile(tile: Any, source: Any, items: Any, *, item_bytes: int, latent: int) -> None:
    """Begins what `gather_fp8_tile` does: copies records as they are to where their numbers will be.

    16 values wait in the first or second half of the 32 bytes that they become, so that the lane that copied them can
    put the numbers there without waiting for another; scales wait in the other half of the first 32. Each pass of 16
    rows but the last is a group of copies by itself.
    """
    if interpreting():
        _fp8_records(tile, source, items, latent)
        return

    @_emit((plgpu.RefType(TILED), _REF, _REF))
    def emit(ctx: Any, tile: Any, source: Any, items: Any) -> None:
        (places, chunk), (raw_places, _) = _tile_places(tile), _raw_places(tile)
        for number, ((row, rope_address), raw_address) in enumerate(zip(places, raw_places, strict=True)):
            item = _load(items, row)
            take = arith.select(_compare("sge", item, _c(0)), _c(_CHUNK), _c(0))
            address = _row_address(source, arith.maxsi(item, _c(0)), item_bytes, _c(0))
            own = arith.addi(address, arith.extsi(address.type, arith.muli(chunk, _c(_CHUNK))))
            for i in range(latent // _SCALED):
                _copy_async(raw_address, own, take, i * 2048, i * _SCALED)
            _copy_async(arith.xori(raw_address, _c(_CHUNK)), address, take, 0, latent)
            _copy_async(rope_address, own, take, latent // 64 * 1024, latent + latent // 32)
            if number + 1 < len(places):
                mgpu_utils.inline_ptx("cp.async.commit_group;", has_side_effects=True)

    emit(tile, source, items)


def convert_fp8_tile(tile: Any, *, latent: int) -> None:
    """Ends what `copy_fp8_tile` began, once its last group is committed. Of no record, values and scales are zeros."""
    if interpreting():
        return

    @_emit((plgpu.RefType(TILED),))
    def emit(ctx: Any, tile: Any) -> None:
        raw_places, second = _raw_places(tile)
        offsets = [arith.muli(arith.xori(second, _c(i)), _c(8)) for i in (0, 1)]
        for number, address in enumerate(raw_places):
            mgpu_utils.inline_ptx(f"cp.async.wait_group {len(raw_places) - 1 - number};", has_side_effects=True)
            other = arith.xori(address, _c(_CHUNK))
            scales = [llvm.bitcast(ir.F32Type.get(), word) for word in _load_words(other, 0, latent // _SCALED)]
            # Lanes with chunk 0 begin with its values, the others with those of chunk 1: no two of 8 lanes, nor of 16,
            # are in the same banks.
            raw = [_load_words(arith.addi(address, x), i * 2048, 2) for i in range(len(scales)) for x in offsets]
            for i, scale in enumerate(scales):
                for words, to in zip(raw[2 * i : 2 * i + 2], (address, other), strict=True):
                    _store_chunk([w for word in words for w in _scaled(word, scale)], arith.addi(to, _c(i * 2048)))

    emit(tile)


def _load_words(address: Any, offset: int, count: int) -> tuple[Any, ...]:
    """Words of shared memory, in order with the copies that are waited for."""
    load = f"ld.shared.v{count}.b32 {{{', '.join(f'${i}' for i in range(count))}}}, [${count}+{offset}];"
    return mgpu_utils.inline_ptx(load, address, result_types=(_i32(),) * count, has_side_effects=True)


def commit_copies() -> None:
    """The copies this lane has begun since the last call are one group."""
    if interpreting():
        return

    @_emit(())
    def emit(ctx: Any) -> None:
        mgpu_utils.inline_ptx("cp.async.commit_group;", has_side_effects=True)

    emit()


def copies_done(but: int = 0) -> None:
    """All groups of copies but the last `but` are there for the tensor cores too, whichever lane began them."""
    if not interpreting():

        @_emit(())
        def emit(ctx: Any) -> None:
            mgpu_utils.inline_ptx(f"cp.async.wait_group {but};", has_side_effects=True)

        emit()
    plgpu.commit_smem()


def produce(
    count: int, stages: int, copy: Callable[[Any, Any], None], locate: Callable[[Any], None], *, ready: Any,
    consumed: Any, finish: Callable[[Any], None] | None = None,
) -> None:  # fmt: skip
    """The producer's loop over a ring of `stages` tiles: copies run ahead of the consumers.

    Args:
      count: tiles in all.
      stages: tiles in shared memory, at least 2.
      copy: starts the copies of a tile, given its number and its stage.
      locate: finds what the tile of a number consists of; called one tile ahead, and once past the last one.
      ready: barriers `[stages]`, arrived at when a tile is there.
      consumed: barriers `[stages]`, waited for before a tile is overwritten, and all of them in the end.
      finish: ends what `copy` began, given its stage; then no copies run ahead of it.
    """
    lag = 0 if finish else stages - 2  # tiles whose copies may still be on their way when the next one begins

    def one(number: Any, _: Any) -> Any:
        stage = lax.rem(number, jnp.int32(stages))

        @pl.when(number >= stages)
        def _wait() -> None:
            plgpu.barrier_wait(consumed.at[stage])

        copy(number, stage)
        commit_copies()
        locate(number + 1)
        if finish:
            finish(stage)
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
