# SPDX-License-Identifier: Apache-2.0
"""Tiles of fp8 records: 512 e4m3 values, a float32 scale for each 128 of them, and 64 bfloat16 numbers.

`tile[i, :512] = bf16(float32(value) * scale)`, rounded to nearest even as in the reference, then the 64 numbers. Like
the words of `tiles`, `fill_fp8_tile` has a `jax.numpy` twin under interpretation.
"""

from __future__ import annotations

from typing import Any

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
    _row_address,
    arith,
    interpreting,
    ir,
    llvm,
)
from pallas_kernels.tiles import _CHUNK, _REF, TILED, _copy_async

_SCALED = 128  # values of a record that share a scale
_ROWS = 8  # that a warp copies and converts at a time: they share pieces of 8 rows x 64 columns, of 1 KiB each
_PIECE = 1024
_RAW = 576  # bytes from a row's raw values and scales to the next ones, which so begin 64 bytes further on in the banks


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


def fill_fp8_tile(tile: Any, source: Any, items: Any, *, item_bytes: int, latent: int) -> None:
    """A tile of the records at `items`, zeros where that is negative; arguments as of `tiles.gather_tile`.

    A warp has 8 rows of every 32. It copies their values and scales as they are to where their numbers will be, reads
    them into registers, and writes the numbers over them, 8 rows while the next 8 are on their way. Raw values of a row
    lie in one piece: a copy that scatters its chunks of 16 bytes takes several times as long.

    Args:
      tile: bf16 `[rows, latent + 64]`, rows a multiple of 32.
      item_bytes: of a record, a multiple of 16.
      latent: values of a record, 512: as many chunks as a warp has lanes.
    """
    if interpreting():
        _fp8_records(tile, source, items, latent)
        return

    @_emit((plgpu.RefType(TILED), _REF, _REF))
    def emit(ctx: Any, tile: Any, source: Any, items: Any) -> None:
        down, across, _, _ = ir.MemRefType(tile.type).shape
        lane = arith.andi(_block_lane(), _c(LANES - 1))
        warp, in_warp = arith.shrui(lane, _c(5)), arith.andi(lane, _c(WARP - 1))
        base = llvm.ptrtoint(_i32(), mgpu_utils.memref_ptr(tile))
        base = arith.addi(base, arith.muli(warp, _c(across * _PIECE)))
        step = LANES // WARP * across * _PIECE  # bytes to a warp's next 8 rows
        passes = range(down * WARP // LANES)
        raw_begin = latent // 64 * _PIECE - _ROWS * _RAW
        rest = latent + 4 * (latent // _SCALED)

        def record(p: int, row: Any) -> tuple[Any, Any, Any]:
            """Of one of a warp's 8 rows: where it comes from, where it waits, and 16, or 0 if there is none."""
            item = _load(items, arith.addi(arith.muli(warp, _c(_ROWS)), arith.addi(row, _c(p * _ROWS * LANES // WARP))))
            take = arith.select(_compare("sge", item, _c(0)), _c(_CHUNK), _c(0))
            address = _row_address(source, arith.maxsi(item, _c(0)), item_bytes, _c(0))
            to = arith.addi(base, arith.muli(row, _c(_RAW)))
            return address, arith.addi(to, _c(p * step + raw_begin)), take

        def moved(address: Any, chunk: Any) -> Any:
            return arith.addi(address, arith.extui(address.type, arith.muli(chunk, _c(_CHUNK))))

        # Lanes for what is less than a row: 8 of a row for its last 64 numbers, 4 rows at a time; 1 for its scales.
        four, eighth = arith.shrui(in_warp, _c(3)), arith.andi(in_warp, _c(7))
        own, quarter = arith.shrui(in_warp, _c(2)), arith.andi(in_warp, _c(3))
        ends = [arith.addi(four, _c(i)) for i in (0, 4)]
        rows = [[record(p, _c(row)) for row in range(_ROWS)] for p in passes]
        last = [[record(p, row) for row in ends] for p in passes]
        quarters = [record(p, own) for p in passes]

        def copy(p: int) -> None:
            """Begins a warp's 8 rows: values and scales to where they wait, the last 64 numbers to their places."""
            for address, raw, take in rows[p]:
                _copy_async(arith.addi(raw, arith.muli(in_warp, _c(_CHUNK))), moved(address, in_warp), take, 0, 0)
            for row, (address, _, take) in zip(ends, last[p], strict=True):
                to = arith.addi(arith.muli(row, _c(128)), arith.muli(arith.xori(eighth, row), _c(_CHUNK)))
                to = arith.addi(base, arith.addi(to, _c(p * step + latent // 64 * _PIECE)))
                _copy_async(to, moved(address, eighth), take, 0, rest)
            with mgpu.when(_compare("eq", quarter, _c(0))):
                address, raw, take = quarters[p]
                _copy_async(raw, address, take, latent, latent)
            mgpu_utils.inline_ptx("cp.async.commit_group;", has_side_effects=True)

        for p in passes:
            copy(p)

        inside = arith.muli(arith.xori(arith.muli(quarter, _c(2)), own), _c(_CHUNK))
        first = arith.addi(base, arith.addi(inside, arith.muli(own, _c(128))))
        second = arith.xori(first, _c(_CHUNK))

        def convert(p: int) -> None:
            """Waits for these rows and writes their numbers over them.

            Four lanes convert a row, 16 values of 64 each at a time, which become two neighbouring chunks of a piece.
            In rows with even numbers the first of these are in even places, else in odd ones (see
            `tiles._tile_places`): so eight lanes, of two rows, store to eight different ones.
            """
            mgpu_utils.inline_ptx(f"cp.async.wait_group {len(passes) - 1 - p};", has_side_effects=True)
            _warp_barrier()
            _, raw, _ = quarters[p]
            mine = arith.addi(raw, arith.muli(quarter, _c(_CHUNK)))
            scales = _load_words(raw, latent, 4)
            values = [_load_words(mine, piece * 64, 4) for piece in range(latent // 64)]
            _warp_barrier()  # numbers are about to take the place of raw values and scales
            for piece, words in enumerate(values):
                scale = llvm.bitcast(ir.F32Type.get(), scales[piece * 64 // _SCALED])
                for pair, to in ((words[:2], first), (words[2:], second)):
                    numbers = [number for word in pair for number in _scaled(word, scale)]
                    _store_chunk(numbers, arith.addi(to, _c(p * step + piece * _PIECE)))

        for p in passes:
            convert(p)

    emit(tile, source, items)


def _warp_barrier() -> None:
    """What the lanes of the warp have copied or written is there for all of them."""
    mgpu_utils.inline_ptx("bar.warp.sync 0xffffffff;", has_side_effects=True)


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
    """Words of shared memory, in order with the barriers around them."""
    load = f"ld.shared.v{count}.b32 {{{', '.join(f'${i}' for i in range(count))}}}, [${count}+{offset}];"
    return mgpu_utils.inline_ptx(load, address, result_types=(_i32(),) * count, has_side_effects=True)
