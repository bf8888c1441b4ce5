# SPDX-License-Identifier: Apache-2.0
"""Words of the exact top-k, beyond `indexed`: digits of keys counted, keys marked in bitmaps, set bits written out.

And shared memory of the other programs of a cluster. Like the words of `indexed`, whose emission helpers these are
written with, each has its `jax.numpy` twin under interpretation, but for the cluster's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils

from pallas_kernels.indexed import (
    _REF,
    _SCALAR,
    LANES,
    WARP,
    _block_lane,
    _c,
    _compare,
    _elements,
    _emit,
    _i32,
    _popcount,
    _reduce,
    _replace,
    _splat,
    _store,
    arith,
    interpreting,
    ir,
    llvm,
    math_dialect,
    nvvm,
    scf,
    spread,
)


# Words: exact top-k --------------------------------------------------------------------------------------------------
def order_key(scores: Array) -> Array:
    """int32 that sort as the float32 do, with -0.0 equal to +0.0 (no NaN)."""
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    bits = jnp.where(bits == jnp.iinfo(jnp.int32).min, 0, bits)
    return bits ^ (lax.shift_right_arithmetic(bits, jnp.int32(31)) & jnp.int32(0x7FFFFFFF))


def _twin_keys(source: Any, begin: Array, end: Array, offset: Array) -> tuple[Array, Array]:
    """Keys of a whole ref, and which of them lie in [begin, end)."""
    values = source[...]
    at = jnp.arange(values.shape[0], dtype=jnp.int32) + offset
    return (order_key(values) if values.dtype == jnp.float32 else values), (at >= begin) & (at < end)


def _each_key(
    source: Any, begin: Any, end: Any, offset: Any, *, threads: int, vector: int, in_flight: int,
    step: Callable[[Any, list[Any], list[Any]], None],
) -> None:  # fmt: skip
    """Emits `step(position of the first, keys, which are in range)` for all of [begin, end), `vector` a lane at a time.

    The source starts at position `offset`. All lanes of a program take the same number of steps, so that a step may
    vote; one past the end sees keys of the last places, out of range.
    """
    stride = threads * LANES * vector
    last = arith.andi(arith.subi(end, _c(1)), _c(-vector))
    pointer, i64 = mgpu_utils.memref_ptr(source), ir.IntegerType.get_signless(64)
    convert = isinstance(ir.MemRefType(source.type).element_type, ir.F32Type)
    kind = ir.VectorType.get((vector,), _i32())
    loop = scf.ForOp(begin, end, _c(stride * in_flight))
    with ir.InsertionPoint(loop.body):
        found = []
        for k in range(in_flight):
            at = arith.addi(loop.induction_variable, arith.addi(_c(k * stride), arith.muli(_block_lane(), _c(vector))))
            place = arith.extsi(i64, arith.subi(arith.minsi(at, last), offset))
            where = mgpu_utils.getelementptr(pointer, [place], _i32())
            found.append((at, llvm.load(kind, where, alignment=4 * vector)))
        for at, values in found:
            keys = [llvm.extractelement(values, _c(i)) for i in range(vector)]
            if convert:
                keys = [arith.select(_compare("eq", v, _c(-(2**31))), _c(0), v) for v in keys]
                keys = [arith.xori(v, arith.andi(arith.shrsi(v, _c(31)), _c(0x7FFFFFFF))) for v in keys]
            step(at, keys, [_compare("slt", arith.addi(at, _c(i)), end) for i in range(vector)])
        scf.yield_([])


def count_digits(
    source: Any, counts: Any, begin: Array, end: Array, offset: Array, prefix: Array, *, shift: int, above: int,
    keep: Any = None, threads: int, vector: int, in_flight: int = 2,
) -> None:  # fmt: skip
    """Adds to `counts[d]` how many keys of a program's share have digit d, among those that begin with `prefix`.

    Args:
      source: 1-D, float32 scores (see `order_key`) or int32 keys, in GMEM or SMEM; element 0 is position `offset`.
      counts: int32 `[digits]` in SMEM, a power of two, zeroed before.
      begin, end: positions of the share; `begin - offset` is a multiple of `vector`, whose bytes the ref is aligned to.
      prefix: what `key >> above` must be; digit = `key >> shift` modulo the digits. With `above` 32 all keys count, and
        the digits are ordered as signed ones.
      keep: int32 ref in SMEM that gets the keys, element 0 for position `begin`; None: kept nowhere.
    """
    (digits,) = counts.shape
    flip = digits // 2 if above == 32 else 0  # the sign bit
    if interpreting():
        keys, inside = _twin_keys(source, begin, end, offset)
        if keep is not None:
            at = jnp.arange(keys.shape[0], dtype=jnp.int32) + offset - begin
            keep[...] = keep[...].at[jnp.where(inside, at, keep.shape[0])].set(keys, mode="drop")
        if above < 32:
            inside &= lax.shift_right_arithmetic(keys, jnp.int32(above)) == prefix
        digit = (lax.shift_right_arithmetic(keys, jnp.int32(shift)) & (digits - 1)) ^ flip
        counts[...] = counts[...].at[jnp.where(inside, digit, digits)].add(1, mode="drop")
        return

    @_emit((_REF, _REF, *([_REF] if keep is not None else []), *[_SCALAR] * 4))
    def emit(ctx: Any, source: Any, counts: Any, *rest: Any) -> None:
        *kept, begin, end, offset, prefix = rest
        begin, end, offset, prefix = (s.registers.item() for s in (begin, end, offset, prefix))
        base = mgpu_utils.memref_ptr(counts)

        def step(at: Any, keys: list[Any], inside: list[Any]) -> None:
            if kept:
                where = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(kept[0]), [arith.subi(at, begin)], _i32())
                value = llvm.mlir_undef(ir.VectorType.get((vector,), _i32()))
                for i, key in enumerate(keys):
                    value = llvm.insertelement(value, key, _c(i))
                with mgpu.when(inside[0]):
                    llvm.store(value, where, alignment=4 * vector)
            for key, ok in zip(keys, inside, strict=True):
                if above < 32:
                    ok = arith.andi(ok, _compare("eq", arith.shrsi(key, _c(above)), prefix))
                digit = arith.xori(arith.andi(arith.shrsi(key, _c(shift)), _c(digits - 1)), _c(flip))
                with mgpu.when(ok):
                    counter = mgpu_utils.getelementptr(base, [digit], _i32())
                    llvm.atomicrmw(llvm.AtomicBinOp.add, counter, _c(1), llvm.AtomicOrdering.monotonic)

        _each_key(
            source, begin, end, offset, threads=threads, vector=vector, in_flight=in_flight, step=step
        )  # fmt: skip

    scalars = [jnp.asarray(s, jnp.int32) for s in (begin, end, offset, prefix)]
    emit(source, counts, *([keep] if keep is not None else []), *scalars)


def mark_keys(
    source: Any, larger: Any, equal: Any, begin: Array, end: Array, offset: Array, threshold: Array, *, threads: int,
    vector: int, in_flight: int = 2,
) -> None:  # fmt: skip
    """Bitmaps of the keys of a program's share that are larger than, and equal to, a threshold.

    Args:
      source, begin, end, offset: as in `count_digits`; bit b of word w is position begin + 32 w + b.
      larger, equal: int32 in SMEM; words up to the last position are written, the others aren't.
    """
    if interpreting():
        keys, inside = _twin_keys(source, begin, end, offset)
        at = jnp.arange(keys.shape[0], dtype=jnp.int32) + offset - begin
        bit = jnp.left_shift(jnp.int32(1), at & 31)
        for ref, chosen in ((larger, keys > threshold), (equal, keys == threshold)):
            word = jnp.where(inside, lax.shift_right_arithmetic(at, jnp.int32(5)), ref.shape[0])
            ref[...] = jnp.zeros(ref.shape, jnp.int32).at[word].add(jnp.where(chosen, bit, 0), mode="drop")
        return

    @_emit((_REF, _REF, _REF, *[_SCALAR] * 4))
    def emit(ctx: Any, source: Any, larger: Any, equal: Any, *scalars: Any) -> None:
        begin, end, offset, threshold = (s.registers.item() for s in scalars)

        def word_of(flags: list[Any]) -> Any:
            """Votes of the lanes that share a word: all of a warp, or groups of 32 / vector."""
            if vector == 1:
                return nvvm.vote_sync(_c(-1), flags[0], nvvm.VoteSyncKind.ballot, results=[_i32()])
            bits = _reduce(arith.ori, [arith.shli(arith.extui(_i32(), f), _c(i)) for i, f in enumerate(flags)])
            group = WARP // vector
            bits = arith.shli(bits, arith.muli(arith.andi(_block_lane(), _c(group - 1)), _c(vector)))
            distance = 1
            while distance < group:
                other = nvvm.shfl_sync(_c(-1), bits, _c(distance), _c(WARP - 1), nvvm.ShflKind.bfly)
                bits, distance = arith.ori(bits, other), 2 * distance
            return bits

        def step(at: Any, keys: list[Any], inside: list[Any]) -> None:
            words = [
                word_of([arith.andi(ok, _compare(kind, key, threshold)) for key, ok in zip(keys, inside, strict=True)])
                for kind in ("sgt", "eq")
            ]
            first = _compare("eq", arith.andi(_block_lane(), _c(WARP // vector - 1)), _c(0))
            with mgpu.when(arith.andi(first, inside[0])):
                place = arith.shrui(arith.subi(at, begin), _c(5))
                for ref, word in zip((larger, equal), words, strict=True):
                    _store(word, ref, place)

        _each_key(
            source, begin, end, offset, threads=threads, vector=vector, in_flight=in_flight, step=step
        )  # fmt: skip

    emit(source, larger, equal, *(jnp.asarray(s, jnp.int32) for s in (begin, end, offset, threshold)))


def write_set_bits(out: Any, words: Array, rank: Array, position: Array) -> None:
    """Writes the places of the set bits: `out[rank + j] = position + (place of set bit j)`, for each word.

    Args:
      out: int32 `[K]` in GMEM.
      words, rank, position: int32 `[n]`; a word of 0 writes nothing.
    """
    if interpreting():
        bit = jnp.arange(32, dtype=jnp.int32)[None]
        ones = lax.shift_right_logical(words[:, None], jnp.broadcast_to(bit, (words.shape[0], 32))) & 1
        where = rank[:, None] + jnp.cumsum(ones, axis=1, dtype=jnp.int32) - ones
        where = jnp.where(ones != 0, where, out.shape[0])
        out[...] = out[...].at[where.reshape(-1)].set((position[:, None] + bit).reshape(-1), mode="drop")
        return
    (n,) = words.shape

    @_emit((_REF, *[spread(n)] * 3))
    def emit(ctx: Any, out: Any, *arrays: Any) -> None:
        for word, rank, position in zip(*(_elements(a) for a in arrays), strict=True):
            loop = scf.ForOp(_c(0), _popcount(word), _c(1), [word])
            with ir.InsertionPoint(loop.body):
                rest = loop.inner_iter_args[0]
                bit = math_dialect.cttz(rest)
                _store(arith.addi(position, bit), out, arith.addi(rank, loop.induction_variable))
                scf.yield_([arith.andi(rest, arith.subi(rest, _c(1)))])

    emit(out, words, rank, position)


# Words: shared memory of other programs of the cluster ---------------------------------------------------------------
def gather_of(ref: Any, index: Array, program: int) -> Array:
    """`gather` from the same SMEM ref of program `program` of the cluster (of one axis); int32, 0 for an index of -1.

    What the other one wrote is there after a `cluster_arrive` and `cluster_wait` of both, and until the other one ends.
    """
    (n,) = index.shape

    @_emit((_REF, spread(n)), n)
    def emit(ctx: Any, ref: Any, index: Any) -> Any:
        base = mgpu_utils.get_cluster_ptr(mgpu_utils.memref_ptr(ref), _c(program), generic=False)
        wanted = _elements(index)
        places = [mgpu_utils.getelementptr(base, [arith.maxsi(i, _c(0))], _i32()) for i in wanted]
        loaded = [llvm.load(_i32(), place) for place in places]
        values = [arith.select(_compare("sge", i, _c(0)), v, _c(0)) for i, v in zip(wanted, loaded, strict=True)]
        return (_replace(index, values),)

    return emit(ref, index)[0]


def read_of(ref: Any, place: int, program: int) -> Array:
    """One int32 of the same SMEM ref of another program: see `gather_of`."""

    @_emit((_REF,), scalars=1)
    def emit(ctx: Any, ref: Any) -> Any:
        base = mgpu_utils.get_cluster_ptr(mgpu_utils.memref_ptr(ref), _c(program), generic=False)
        return (_splat(llvm.load(_i32(), mgpu_utils.getelementptr(base, [_c(place)], _i32()))),)

    return emit(ref)[0]
