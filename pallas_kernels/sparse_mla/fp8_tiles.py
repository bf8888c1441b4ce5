# SPDX-License-Identifier: Apache-2.0
"""Tiles of fp8 records: 512 e4m3 values, a float32 scale for each 128 of them, and 64 bfloat16 numbers.

`tile[i, :512] = bf16(float32(value) * scale)`, rounded to nearest even as in the reference, then the 64 numbers. A tile
is made in two steps, `copy_fp8_tile` and `convert_fp8_tile`, so that the copies of the next one can be on their way
while it is converted. Like the words of `tiles`, both have a `jax.numpy` twin under interpretation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.indexed import (
    LANES,
    WARP,
    _block_lane,
    _c,
    _compare,
    _emit,
    _i32,
    _load,
    arith,
    interpreting,
    ir,
    llvm,
)
from pallas_kernels.tiles import _CHUNK, _REF, _ROWS_A_PASS, TILED, _copy_async, _row_address, _tile_places

_SCALED = 128  # values of a record that share a scale
_PIECE = 1024  # bytes of 8 rows x 64 columns
_WARP_ROWS = WARP // 8  # rows of a pass that a warp converts


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


class _Place(NamedTuple):
    """Where a tile's raw bytes wait, for a lane; 32-bit addresses of the first pass, `step` bytes for each more."""

    copied: list[Any]  # of the lane's chunk of each row of a pass that its warp copies
    converted: Any  # of its chunk of the first 128 columns of the row that it converts
    second: Any  # 1 if that is chunk 1 of two, else 0
    scales: Any  # of the scales of that row
    step: int


def _places(tile: Any) -> _Place:
    """Raw bytes wait where their numbers will be, so that a lane that has read its own needs no other to write them.

    16 values become two chunks (16 bytes), 2 c and 2 c + 1, and wait in the first of them in even pieces of 64 columns,
    in the second in odd ones: so the 8 lanes of a row are in 8 different chunks, as are any 8 that copy one. The scales
    of a row wait in its chunk 1, which is free.
    """
    _, across, _, _ = ir.MemRefType(tile.type).shape
    lane = arith.andi(_block_lane(), _c(LANES - 1))
    base = llvm.ptrtoint(_i32(), mgpu_utils.memref_ptr(tile))

    def at(row: Any, piece: Any, chunk: Any) -> Any:
        in_piece = arith.andi(row, _c(7))
        inside = arith.addi(arith.muli(in_piece, _c(128)), arith.muli(arith.xori(chunk, in_piece), _c(_CHUNK)))
        down = arith.muli(arith.shrui(row, _c(3)), _c(across * _PIECE))
        return arith.addi(base, arith.addi(arith.addi(down, arith.muli(piece, _c(_PIECE))), inside))

    def waiting(number: Any) -> tuple[Any, Any]:
        """Piece and chunk of the 16 values of this number in a row."""
        piece = arith.shrui(number, _c(2))
        return piece, arith.addi(arith.muli(arith.andi(number, _c(3)), _c(2)), arith.andi(piece, _c(1)))

    first = arith.muli(arith.shrui(lane, _c(5)), _c(_WARP_ROWS))
    own = waiting(arith.andi(lane, _c(WARP - 1)))
    row, number = arith.shrui(lane, _c(3)), arith.andi(lane, _c(7))
    return _Place(
        copied=[at(arith.addi(first, _c(i)), *own) for i in range(_WARP_ROWS)],
        converted=at(row, *waiting(number)),
        second=arith.shrui(number, _c(2)),
        scales=at(row, _c(0), _c(1)),
        step=_ROWS_A_PASS // 8 * across * _PIECE,
    )


def copy_fp8_tile(tile: Any, source: Any, items: Any, *, item_bytes: int, latent: int) -> None:
    """Begins a tile of the records at `items`, zeros where that is negative; arguments as of `tiles.gather_tile`.

    A warp copies the rows that it will convert: the values of a row, 512 bytes one after the other, by one instruction.

    Args:
      latent: values of a record: 512, as many chunks as a warp has lanes.
    """
    if interpreting():
        _fp8_records(tile, source, items, latent)
        return

    @_emit((plgpu.RefType(TILED), _REF, _REF))
    def emit(ctx: Any, tile: Any, source: Any, items: Any) -> None:
        (rest, chunk), to = _tile_places(tile), _places(tile)
        lane = arith.andi(_block_lane(), _c(LANES - 1))
        in_warp, first = arith.andi(lane, _c(WARP - 1)), arith.muli(arith.shrui(lane, _c(5)), _c(_WARP_ROWS))

        def copy(row: Any, to_address: Any, chunk: Any, offset: int, to_offset: int) -> None:
            item = _load(items, row)
            take = arith.select(_compare("sge", item, _c(0)), _c(_CHUNK), _c(0))
            begin = arith.muli(chunk, _c(_CHUNK))
            _copy_async(to_address, _row_address(source, arith.maxsi(item, _c(0)), item_bytes, begin), take,
                        to_offset, offset)  # fmt: skip

        for p in range(len(rest)):
            for i, to_address in enumerate(to.copied):
                copy(arith.addi(first, _c(p * _ROWS_A_PASS + i)), to_address, in_warp, 0, p * to.step)
        for row, to_address in rest:
            copy(row, to_address, chunk, latent + 4 * (latent // _SCALED), latent // 64 * _PIECE)
        with mgpu.when(_compare("eq", chunk, _c(0))):
            for p, (row, _) in enumerate(rest):
                copy(row, to.scales, _c(0), latent, p * to.step)

    emit(tile, source, items)


def convert_fp8_tile(tile: Any, *, latent: int) -> None:
    """Ends what `copy_fp8_tile` began, once this lane's copies are there. Of no record, values and scales are zeros."""
    if interpreting():
        return

    @_emit((plgpu.RefType(TILED),))
    def emit(ctx: Any, tile: Any) -> None:
        at, scaled = _places(tile), latent // _SCALED
        offsets = [arith.muli(arith.xori(at.second, _c(i)), _c(8)) for i in (0, 1)]
        passes = range(ir.MemRefType(tile.type).shape[0] * 8 // _ROWS_A_PASS)
        all_lanes = "bar.warp.sync 0xffffffff;"
        mgpu_utils.inline_ptx(all_lanes, has_side_effects=True)  # the copies of the warp's other lanes
        scales = [_load_words(at.scales, p * at.step, scaled) for p in passes]
        mgpu_utils.inline_ptx(all_lanes, has_side_effects=True)  # numbers are about to take the place of scales

        def values(p: int) -> list[Any]:
            # Lanes with chunk 0 begin with its values, the others with those of chunk 1: no two of 8 lanes, nor of 16,
            # are in the same banks.
            addresses = [arith.addi(at.converted, x) for x in offsets]
            return [_load_words(a, p * at.step + i * 2 * _PIECE, 2) for i in range(scaled) for a in addresses]

        raw = values(0)
        for p in passes:
            now, raw = raw, values(p + 1) if p + 1 in passes else []
            for i in range(scaled):
                scale = llvm.bitcast(ir.F32Type.get(), scales[p][i])
                for words, to in zip(now[2 * i : 2 * i + 2], (0, _CHUNK), strict=True):
                    chunk = [w for word in words for w in _scaled(word, scale)]
                    address = arith.xori(at.converted, _c(to)) if to else at.converted
                    _store_chunk(chunk, arith.addi(address, _c(p * at.step + i * 2 * _PIECE)))

    emit(tile)


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
    llvm.store(value, llvm.inttoptr(llvm.PointerType.get(3), address), alignment=_CHUNK)


def _load_words(address: Any, offset: int, count: int) -> tuple[Any, ...]:
    """Words of shared memory, in order with the copies that are waited for."""
    load = f"ld.shared.v{count}.b32 {{{', '.join(f'${i}' for i in range(count))}}}, [${count}+{offset}];"
    return mgpu_utils.inline_ptx(load, address, result_types=(_i32(),) * count, has_side_effects=True)
