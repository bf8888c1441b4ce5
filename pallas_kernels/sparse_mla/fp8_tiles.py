# SPDX-License-Identifier: Apache-2.0
"""Tiles of fp8 records: 512 e4m3 values, a float32 scale for each 128 of them, and 64 bfloat16 numbers.

`tile[i, :512] = bf16(float32(value) * scale)`, rounded to nearest even as in the reference, then the 64 numbers. There
are two ways of making one (see `Tuning.in_place`): `copy_fp8_tile` and `convert_fp8_tile`, or `load_fp8_tile` and
`store_fp8_tile`. Like the words of `tiles`, each has a `jax.numpy` twin under interpretation.

There are two ways of converting a value, too (see `Tuning.convert`), which give the same bits but for the codes 0x7F
and 0xFF: NaN by "cvt", as in the reference, +-480 times the scale by "bits". `hisparse_jax.records` never makes these
codes of finite numbers, and of others gives the scale 2^120, by which 480 becomes an infinity.
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
    scf,
    spread,
)
from pallas_kernels.sparse_mla.tuning import Convert
from pallas_kernels.tiles import _CHUNK, _REF, _ROWS_A_PASS, TILED, _copy_async, _row_address, _tile_places

_SCALED = 128  # values of a record that share a scale


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


def _shared(address: Any) -> Any:
    """Pointer from a 32-bit address."""
    return llvm.inttoptr(llvm.PointerType.get(3), address)


def _scaled(word: Any, scale: Any, convert: Convert) -> list[Any]:
    """Four e4m3 times a float32, as two words of two bf16."""
    values = {"cvt": _by_instructions, "bits": _by_bits}[convert](word)
    low_high = [[arith.mulf(value, scale) for value in values[i : i + 2]] for i in (0, 2)]
    pack = "cvt.rn.bf16x2.f32 $0, $1, $2;"
    return [mgpu_utils.inline_ptx(pack, high, low, result_types=_i32()) for low, high in low_high]


def _by_instructions(word: Any) -> list[Any]:
    """Four e4m3 as float32, by way of float16."""
    f32, i16, half2 = ir.F32Type.get(), ir.IntegerType.get_signless(16), ir.VectorType.get((2,), ir.F16Type.get())
    out = []
    for shift in (0, 16):
        two = arith.trunci(i16, arith.shrui(word, _c(shift)))
        halves = mgpu_utils.inline_ptx("cvt.rn.f16x2.e4m3x2 $0, $1;", two, result_types=_i32())
        halves = llvm.bitcast(half2, halves)
        out += [arith.extf(f32, llvm.extractelement(halves, _c(i))) for i in (0, 1)]
    return out


def _by_bits(word: Any) -> list[Any]:
    """Four e4m3 as float32 without conversion instructions.

    A code in the top byte, shifted right by 4 with its sign, has its exponent and mantissa where float32 has the last 4
    bits of its exponent and the first 3 of its mantissa. Without the copies of the sign that is the value times 2^-120,
    exactly, also where it is subnormal in either format (so no multiplication here may flush). A scale times 2^120 may
    overflow, so the value is multiplied by one after the other.
    """
    f32, out = ir.F32Type.get(), []
    for shift in (24, 16, 8, 0):
        bits = arith.shrsi(arith.shli(word, _c(shift)) if shift else word, _c(4))
        small = llvm.bitcast(f32, arith.andi(bits, _c(0x87F00000 - (1 << 32))))
        out.append(arith.mulf(small, arith.constant(f32, 2.0**120)))
    return out


def _store_chunk(words: list[Any], address: Any) -> None:
    """Four words to shared memory at once."""
    value = llvm.mlir_undef(ir.VectorType.get((4,), _i32()))
    for i, word in enumerate(words):
        value = llvm.insertelement(value, word, _c(i))
    llvm.store(value, _shared(address), alignment=_CHUNK)


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
    inside = arith.addi(inside, arith.muli(piece, _c(1024)))
    base = arith.addi(llvm.ptrtoint(_i32(), mgpu_utils.memref_ptr(tile)), inside)
    step = _ROWS_A_PASS // 8 * pieces_across * 1024
    return [arith.addi(base, _c(p * step)) for p in range(pieces_down * 8 // _ROWS_A_PASS)], second


def copy_fp8_tile(tile: Any, source: Any, items: Any, *, item_bytes: int, latent: int) -> None:
    """Begins a tile of the records at `items`, zeros where that is negative; arguments as of `tiles.gather_tile`.

    Records are copied as they are to where their numbers will be: 16 values wait in the first or second half of the 32
    bytes that they become, so that the lane that copied them can put the numbers there without waiting for another;
    scales wait in the other half of the first 32. Each pass of 16 rows but the last is a group of copies by itself.

    Args:
      latent: values of a record, a multiple of 128.
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


def convert_fp8_tile(tile: Any, *, latent: int, convert: Convert = "cvt", rolled: bool = False) -> None:
    """Ends what `copy_fp8_tile` began, once its last group is committed. Of no record, values and scales are zeros.

    Args:
      convert, rolled: see `Tuning`.
    """
    if interpreting():
        return

    @_emit((plgpu.RefType(TILED),))
    def emit(ctx: Any, tile: Any) -> None:
        raw_places, second = _raw_places(tile)
        offsets = [arith.muli(arith.xori(second, _c(i)), _c(8)) for i in (0, 1)]
        if rolled:
            mgpu_utils.inline_ptx("cp.async.wait_group 0;", has_side_effects=True)
            pieces_across = ir.MemRefType(tile.type).shape[1]
            step = _ROWS_A_PASS // 8 * pieces_across * 1024
            loop = scf.ForOp(_c(0), _c(step * len(raw_places)), _c(step))
            with ir.InsertionPoint(loop.body):
                one_pass(arith.addi(raw_places[0], loop.induction_variable), offsets)
                scf.yield_([])
            return
        for number, address in enumerate(raw_places):
            mgpu_utils.inline_ptx(f"cp.async.wait_group {len(raw_places) - 1 - number};", has_side_effects=True)
            one_pass(address, offsets)

    def one_pass(address: Any, offsets: list[Any]) -> None:
        other = arith.xori(address, _c(_CHUNK))
        scales = [llvm.bitcast(ir.F32Type.get(), word) for word in _load_words(other, 0, latent // _SCALED)]
        # Lanes with chunk 0 begin with its values, the others with those of chunk 1: no two of 8 lanes, nor of 16,
        # are in the same banks.
        raw = [_load_words(arith.addi(address, x), i * 2048, 2) for i in range(len(scales)) for x in offsets]
        for i, scale in enumerate(scales):
            for words, to in zip(raw[2 * i : 2 * i + 2], (address, other), strict=True):
                chunk = [w for word in words for w in _scaled(word, scale, convert)]
                _store_chunk(chunk, arith.addi(to, _c(i * 2048)))

    emit(tile)


def _load_words(address: Any, offset: int, count: int) -> tuple[Any, ...]:
    """Words of shared memory, in order with the copies that are waited for."""
    load = f"ld.shared.v{count}.b32 {{{', '.join(f'${i}' for i in range(count))}}}, [${count}+{offset}];"
    return mgpu_utils.inline_ptx(load, address, result_types=(_i32(),) * count, has_side_effects=True)


def load_fp8_tile(rows: int, source: Any, items: Any, *, item_bytes: int, latent: int) -> Array:
    """Loads of the records that `copy_fp8_tile` copies, into registers: to begin before there is a place in a tile.

    Returns:
      A lane's words, for `store_fp8_tile`: for each pass of 16 rows its 16 values of each 128, and one of the scales.
    """
    passes, scales = rows // _ROWS_A_PASS, latent // _SCALED
    n = LANES * passes * (4 * scales + 1)
    if interpreting():
        return jnp.zeros(n, jnp.int32)

    @_emit((_REF, _REF, spread(n)), n)
    def emit(ctx: Any, source: Any, items: Any, like: Any) -> Any:
        lane = arith.andi(_block_lane(), _c(LANES - 1))
        number, row = arith.andi(lane, _c(7)), arith.shrui(lane, _c(3))
        # Lanes l >= 4 begin with the second half of their 16 values; see `_raw_places`.
        first = arith.muli(arith.shrui(number, _c(2)), _c(8))
        words = []
        for p in range(passes):
            item = _load(items, arith.addi(row, _c(p * _ROWS_A_PASS)))
            known = _compare("sge", item, _c(0))
            address = _row_address(source, arith.maxsi(item, _c(0)), item_bytes, arith.muli(number, _c(_CHUNK)))
            halves = [arith.addi(address, arith.extui(address.type, arith.xori(first, _c(x)))) for x in (0, 8)]
            for i in range(scales):
                for half in halves:
                    words += _load_global(half, i * _SCALED, 2, known)
            scale = arith.muli(arith.andi(number, _c(scales - 1)), _c(4))
            words += _load_global(_row_address(source, arith.maxsi(item, _c(0)), item_bytes, scale), latent, 1, known)
        return (_replace(like, words),)

    return emit(source, items, positions(n))[0]


def store_fp8_tile(
    tile: Any, source: Any, items: Any, words: Array, *, item_bytes: int, latent: int, convert: Convert = "cvt"
) -> None:
    """A tile of what `load_fp8_tile` gave; its last 64 columns are copies to wait for by `copies_done`."""
    if interpreting():
        _fp8_records(tile, source, items, latent)
        return
    scales = latent // _SCALED

    @_emit((plgpu.RefType(TILED), _REF, _REF, spread(words.shape[0])))
    def emit(ctx: Any, tile: Any, source: Any, items: Any, words: Any) -> None:
        (places, chunk), (raw_places, _) = _tile_places(tile), _raw_places(tile)
        segment = arith.andi(_block_lane(), _c(WARP - 8))  # first lane of the row in its warp
        taken = iter(_elements(words))
        for row, rope_address in places:
            item = _load(items, row)
            take = arith.select(_compare("sge", item, _c(0)), _c(_CHUNK), _c(0))
            offset = arith.muli(chunk, _c(_CHUNK))
            address = _row_address(source, arith.maxsi(item, _c(0)), item_bytes, offset)
            _copy_async(rope_address, address, take, latent // 64 * 1024, latent + 4 * scales)
        for address in raw_places:
            raw = [[next(taken), next(taken)] for _ in range(2 * scales)]
            scale = next(taken)
            for i in range(scales):
                lane = arith.addi(segment, _c(i))
                one = nvvm.shfl_sync(_c(-1), scale, lane, _c(WARP - 1), nvvm.ShflKind.idx)
                factor = llvm.bitcast(ir.F32Type.get(), one)
                for pair, to in zip(raw[2 * i : 2 * i + 2], (address, arith.xori(address, _c(_CHUNK))), strict=True):
                    chunk = [w for word in pair for w in _scaled(word, factor, convert)]
                    _store_chunk(chunk, arith.addi(to, _c(i * 2048)))

    emit(tile, source, items, words)


def _load_global(address: Any, offset: int, count: int, known: Any) -> list[Any]:
    """Words of global memory, or zeros; where it stands, not where they are used."""
    names = [f"%w{i}" for i in range(count)]
    vector = (".v2", "{%w0, %w1}") if count == 2 else ("", "%w0")
    lines = [f".reg .b32 {', '.join(names)};", ".reg .pred %known;", f"setp.ne.s32 %known, ${count + 1}, 0;"]
    lines += [f"mov.b32 {name}, 0;" for name in names]
    lines += [f"@%known ld.global{vector[0]}.b32 {vector[1]}, [${count}+{offset}];"]
    lines += [f"mov.b32 ${i}, {name};" for i, name in enumerate(names)]
    found = mgpu_utils.inline_ptx(
        f"{{ {' '.join(lines)} }}", address, arith.extui(_i32(), known), result_types=(_i32(),) * count,
        has_side_effects=True,
    )  # fmt: skip
    return list(found)
