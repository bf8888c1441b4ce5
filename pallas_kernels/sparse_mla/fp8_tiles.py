# SPDX-License-Identifier: Apache-2.0
"""Tiles of fp8 records: 512 e4m3 values, a float32 scale for each 128 of them, and 64 bfloat16 numbers.

`tile[i, :512] = bf16(float32(value) * scale)`, rounded to nearest even as in the reference, then the 64 numbers. Values
and scales are loaded into registers while their tile is still in use, and converted on the way from there: shared
memory, which the tensor cores keep busy, sees no more of them than of bfloat16 records. Under interpretation
`copy_fp8_rest` makes the whole tile, in `jax.numpy`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.indexed import (
    LANES,
    WARP,
    _block_lane,
    _c,
    _compare,
    _elements,
    _emit,
    _i32,
    _load,
    _replace,
    arith,
    interpreting,
    ir,
    llvm,
    nvvm,
    positions,
    spread,
)
from pallas_kernels.tiles import _CHUNK, _REF, TILED, _copy_async, _row_address, _tile_places

_SCALED = 128  # values of a record that share a scale
_PIECE = 1024  # bytes of 8 rows x 64 columns of a tile
ROWS = 32  # that are loaded and stored at a time: a warpgroup has four lanes for each


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


def own_row(lane: Array) -> Array:
    """Which of `ROWS` rows a lane loads and stores a quarter of; int32 `[128]` of lanes, of which four share a row."""
    return lax.shift_right_logical(lane, jnp.int32(2))


def load_fp8_rows(source: Any, item: Array, *, item_bytes: int, latent: int) -> Array:
    """Begins to load values and scales of records, zeros where the item is negative.

    Args:
      source, item_bytes: as of `tiles.gather_tile`.
      item: int32 `[128]` in registers, for each lane that of its `own_row`.
      latent: values of a record, 512: four scales, one for each lane of a row.
    Returns:
      What `store_fp8_rows` takes: int32 `[n]` in registers.
    """
    scales = latent // _SCALED
    n = LANES * (latent // 64 * 4 + 1)
    if interpreting():
        return jnp.zeros(n, jnp.int32)

    @_emit((_REF, spread(LANES), spread(n)), n)
    def emit(ctx: Any, source: Any, item: Any, like: Any) -> Any:
        _, _, quarter = _own()
        (item,) = _elements(item)
        known, item = arith.extui(_i32(), _compare("sge", item, _c(0))), arith.maxsi(item, _c(0))

        def address(step: int) -> Any:
            return _row_address(source, item, item_bytes, arith.muli(quarter, _c(step)))

        values = [w for piece in range(latent // 64) for w in _load_global(address(_CHUNK), piece * 64, 4, known)]
        factor = _load_global(address(4), latent, 1, known)
        _prefetch(address(32), latent + 4 * scales, known)  # the rest, which is copied when there is room for it
        mgpu_utils.inline_ptx("bar.warp.sync 0xffffffff;", has_side_effects=True)  # or the compiler begins them later
        return (_replace(like, values + factor),)

    return emit(source, item, positions(n))[0]


def store_fp8_rows(tile: Any, words: Array, number: int, *, latent: int) -> None:
    """Converts what `load_fp8_rows` loaded and stores it to rows `number * ROWS...` of a tile.

    Args:
      tile: bf16 `[rows, latent + 64]` in SMEM, `TILED`.
    """
    if interpreting():
        return

    @_emit((plgpu.RefType(TILED), spread(words.shape[0])))
    def emit(ctx: Any, tile: Any, words: Any) -> None:
        _, across, _, _ = ir.MemRefType(tile.type).shape
        warp, row, quarter = _own()
        inside = arith.muli(arith.xori(arith.muli(quarter, _c(2)), row), _c(_CHUNK))
        inside = arith.addi(inside, arith.addi(arith.muli(row, _c(128)), arith.muli(warp, _c(across * _PIECE))))
        first = arith.addi(llvm.ptrtoint(_i32(), mgpu_utils.memref_ptr(tile)), inside)
        second = arith.xori(first, _c(_CHUNK))
        row_lane = arith.andi(_block_lane(), _c(WARP - 4))  # of the row's first lane, in its warp
        *values, factor = _elements(words)
        for piece in range(latent // 64):
            lane = arith.addi(row_lane, _c(piece * 64 // _SCALED))
            scale = nvvm.shfl_sync(_c(-1), factor, lane, _c(WARP - 1), nvvm.ShflKind.idx)
            scale = llvm.bitcast(ir.F32Type.get(), scale)
            own = values[4 * piece : 4 * piece + 4]
            offset = _c(number * (ROWS // 8) * across * _PIECE + piece * _PIECE)
            for pair, to in ((own[:2], first), (own[2:], second)):
                _store_chunk([w for word in pair for w in _scaled(word, scale)], arith.addi(to, offset))

    emit(tile, words)


def copy_fp8_rest(tile: Any, source: Any, items: Any, *, item_bytes: int, latent: int) -> None:
    """Begins the last 64 columns of a tile: copies to wait for by `tiles.copies_done`.

    Arguments as of `tiles.gather_tile` and `load_fp8_rows`.
    """
    if interpreting():
        _fp8_records(tile, source, items, latent)
        return

    @_emit((plgpu.RefType(TILED), _REF, _REF))
    def emit(ctx: Any, tile: Any, source: Any, items: Any) -> None:
        places, chunk = _tile_places(tile)
        wanted = [_load(items, row) for row, _ in places]
        for item, (_, to) in zip(wanted, places, strict=True):
            take = arith.select(_compare("sge", item, _c(0)), _c(_CHUNK), _c(0))
            rest = _row_address(source, arith.maxsi(item, _c(0)), item_bytes, arith.muli(chunk, _c(_CHUNK)))
            _copy_async(to, rest, take, latent // 64 * _PIECE, latent + 4 * (latent // _SCALED))

    emit(tile, source, items)


def _own() -> tuple[Any, Any, Any]:
    """A lane's warp, its row of the 8 that the warp has of `ROWS`, and its quarter of every 64 values of that row.

    16 values become two chunks of 16 bytes, 2 q and 2 q + 1 of a piece of 64 columns. In rows with even numbers the
    first of them are in even places, else in odd ones (see `tiles._tile_places`): so 8 lanes, of two rows, store to 8
    different places.
    """
    lane = arith.andi(_block_lane(), _c(LANES - 1))
    return arith.shrui(lane, _c(5)), arith.andi(arith.shrui(lane, _c(2)), _c(7)), arith.andi(lane, _c(3))


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


def _load_global(address: Any, offset: int, count: int, known: Any) -> list[Any]:
    """Words of global memory, zeros where `known` is 0; begun where it stands, and not kept in the L1 cache.

    What is under way for a tile is more than the L1 cache has room for beside two tiles.
    """
    names = [f"%w{i}" for i in range(count)]
    vector, braced = (f".v{count}", f"{{{', '.join(names)}}}") if count > 1 else ("", names[0])
    lines = [f".reg .b32 {', '.join(names)};", ".reg .pred %known;", f"setp.ne.s32 %known, ${count + 1}, 0;"]
    lines += [f"mov.b32 {name}, 0;" for name in names]
    lines += [f"@%known ld.global.L1::no_allocate{vector}.b32 {braced}, [${count}+{offset}];"]
    lines += [f"mov.b32 ${i}, {name};" for i, name in enumerate(names)]
    block, types = f"{{ {' '.join(lines)} }}", (_i32(),) * count
    return list(mgpu_utils.inline_ptx(block, address, known, result_types=types, has_side_effects=True))


def _prefetch(address: Any, offset: int, known: Any) -> None:
    """Asks for a line of global memory to be in the L2 cache soon, unless `known` is 0."""
    lines = ".reg .pred %known;", "setp.ne.s32 %known, $1, 0;", f"@%known prefetch.global.L2 [$0+{offset}];"
    mgpu_utils.inline_ptx(f"{{ {' '.join(lines)} }}", address, known, has_side_effects=True)
