# SPDX-License-Identifier: Apache-2.0
"""Tiles of fp8 records: 512 e4m3 values, a float32 scale for each 128 of them, and 64 bfloat16 numbers.

`tile[i, :512] = bf16(float32(value) * scale)`, rounded to nearest even as in the reference, then the 64 numbers. Values
and scales are loaded into registers while their tile is still in use, and converted on the way from there: shared
memory, which the tensor cores keep busy, sees no more of them than of bfloat16 records. Like the words of `tiles`, both
steps have a `jax.numpy` twin under interpretation.
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
_PASS_ROWS = LANES // 4  # rows of which all lanes load 64 values at a time, 16 each


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


def load_fp8_tile(rows: int, source: Any, items: Any, *, item_bytes: int, latent: int) -> Array:
    """Begins to load values and scales of the records at `items`, zeros where that is negative.

    Args:
      rows: records, a multiple of 32.
      source, items, item_bytes: as of `tiles.gather_tile`.
      latent: values of a record, 512: four scales, one for each lane of a row.
    Returns:
      What `store_fp8_tile` takes: int32 `[n]` in registers, values of 32 rows after the other, then scales.
    """
    passes, scales = rows // _PASS_ROWS, latent // _SCALED
    n = LANES * passes * (latent // 64 * 4 + 1)
    if interpreting():
        return jnp.zeros(n, jnp.int32)

    @_emit((_REF, _REF, spread(n)), n)
    def emit(ctx: Any, source: Any, items: Any, like: Any) -> Any:
        warp, row, quarter = _own()
        own = [arith.addi(row, arith.addi(arith.muli(warp, _c(8)), _c(p * _PASS_ROWS))) for p in range(passes)]
        wanted = [_load(items, each) for each in own]
        values, factors = [], []
        for item in wanted:
            known, item = arith.extui(_i32(), _compare("sge", item, _c(0))), arith.maxsi(item, _c(0))
            address = _row_address(source, item, item_bytes, arith.muli(quarter, _c(_CHUNK)))
            values += [w for piece in range(latent // 64) for w in _load_global(address, piece * 64, 4, known)]
            address = _row_address(source, item, item_bytes, arith.muli(quarter, _c(4)))
            factors += _load_global(address, latent, 1, known)
            address = _row_address(source, item, item_bytes, arith.muli(quarter, _c(32)))
            _prefetch(address, latent + 4 * scales, known)  # the rest, which is copied when there is room for it
        return (_replace(like, values + factors),)

    return emit(source, items, positions(n))[0]


def store_fp8_tile(tile: Any, source: Any, items: Any, words: Array, *, item_bytes: int, latent: int) -> None:
    """Makes a tile of what `load_fp8_tile` loaded; its last 64 columns are copies to wait for by `tiles.copies_done`.

    Args:
      tile: bf16 `[rows, latent + 64]` in SMEM, `TILED`.
      source, items, item_bytes, latent: as they were loaded from.
    """
    if interpreting():
        _fp8_records(tile, source, items, latent)
        return
    scales = latent // _SCALED

    @_emit((plgpu.RefType(TILED), _REF, _REF, spread(words.shape[0])))
    def emit(ctx: Any, tile: Any, source: Any, items: Any, words: Any) -> None:
        down, across, _, _ = ir.MemRefType(tile.type).shape
        places, chunk = _tile_places(tile)
        wanted = [_load(items, row) for row, _ in places]
        for item, (_, to) in zip(wanted, places, strict=True):
            take = arith.select(_compare("sge", item, _c(0)), _c(_CHUNK), _c(0))
            rest = _row_address(source, arith.maxsi(item, _c(0)), item_bytes, arith.muli(chunk, _c(_CHUNK)))
            _copy_async(to, rest, take, latent // 64 * _PIECE, latent + 4 * scales)
        warp, row, quarter = _own()
        inside = arith.muli(arith.xori(arith.muli(quarter, _c(2)), row), _c(_CHUNK))
        inside = arith.addi(inside, arith.addi(arith.muli(row, _c(128)), arith.muli(warp, _c(across * _PIECE))))
        first = arith.addi(llvm.ptrtoint(_i32(), mgpu_utils.memref_ptr(tile)), inside)
        second = arith.xori(first, _c(_CHUNK))
        row_lane = arith.andi(_block_lane(), _c(WARP - 4))  # of the row's first lane, in its warp
        passes, elements = range(down * 8 // _PASS_ROWS), iter(_elements(words))
        values = [[[next(elements) for _ in range(4)] for _ in range(latent // 64)] for _ in passes]
        for p, factor in zip(passes, elements, strict=True):
            for piece, own in enumerate(values[p]):
                lane = arith.addi(row_lane, _c(piece * 64 // _SCALED))
                scale = nvvm.shfl_sync(_c(-1), factor, lane, _c(WARP - 1), nvvm.ShflKind.idx)
                scale = llvm.bitcast(ir.F32Type.get(), scale)
                offset = _c(p * (_PASS_ROWS // 8 * across * _PIECE) + piece * _PIECE)
                for pair, to in ((own[:2], first), (own[2:], second)):
                    _store_chunk([w for word in pair for w in _scaled(word, scale)], arith.addi(to, offset))

    emit(tile, source, items, words)


def _own() -> tuple[Any, Any, Any]:
    """A lane's warp, its row of the 8 that the warp has of each 32, and its quarter of every 64 values of that row.

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
