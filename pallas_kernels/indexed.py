# SPDX-License-Identifier: Apache-2.0
"""What the kernels are written in: indexed access, counting, a bitmap with rank, row copies, for Pallas Mosaic GPU.

Pallas has no gather, scatter or scan on refs for this backend, so each word here emits its instructions lane by lane.
This is the only file that imports private parts of JAX. Under the CPU interpreter, which can't run emitted code, every
word but the cluster barrier is its `jax.numpy` twin on whole refs (so interpret with one thread and one program).

A *program* is one thread block of `threads` Pallas threads (warpgroups of 128 lanes). A register array has
`n = 128 * per_lane` int32 elements per thread, and each lane holds `per_lane` neighbours; masks are 0/1 and an index
of -1 means "nothing", in every word. (The file is long because private imports are to stay in one place.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax._src import config as _config
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, memref, nvvm, scf
from jax._src.lib.mlir.dialects import gpu as gpu_dialect
from jax._src.lib.mlir.dialects import math as math_dialect
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

LANES = 128  # of a Pallas thread, which is a warpgroup
WARP = 32
LINE_BYTES = 128  # what one request over the link carries at most
MAX_WARPS = 32

_REF = plgpu.RefType()
_SCALAR = plgpu.Layout.WG_SPLAT(())


def interpreting() -> bool:
    """Whether kernels traced now run under the CPU interpreter."""
    return _config.pallas_tpu_interpret_mode_context_manager.value is not None


def spread(n: int) -> Any:
    """Layout of an `[n]` register array: each lane holds n / 128 neighbours."""
    return plgpu.Layout.WG_STRIDED((n,), vec_size=n // LANES)


def positions(n: int) -> Array:
    """int32 `[n]`: 0..n-1."""
    if interpreting():
        return jnp.arange(n, dtype=jnp.int32)
    return plgpu.broadcasted_iota(jnp.int32, (n,), 0, layout=spread(n))


# Emission: int32 values of one lane ----------------------------------------------------------------------------------
def _i32() -> Any:
    return ir.IntegerType.get_signless(32)


def _c(value: int) -> Any:
    return mgpu.c(value, _i32())


def _index(value: Any) -> Any:
    return arith.index_cast(ir.IndexType.get(), value)


def _compare(kind: str, a: Any, b: Any) -> Any:
    return arith.cmpi(getattr(arith.CmpIPredicate, kind), a, b)


def _block_lane() -> Any:
    """Number of this lane in its program."""
    return arith.index_cast(_i32(), gpu_dialect.thread_id(gpu_dialect.Dimension.x))


def _popcount(value: Any) -> Any:
    return math_dialect.ctpop(value)


def _load(ref: Any, *index: Any) -> Any:
    """An element as int32, whatever the integer type of the ref."""
    value = memref.load(ref, [_index(i) for i in index])
    return value if value.type == _i32() else arith.extsi(_i32(), value)


def _store(value: Any, ref: Any, *index: Any) -> None:
    kind = ir.MemRefType(ref.type).element_type
    value = value if value.type == kind else arith.trunci(kind, value)
    memref.store(value, ref, [_index(i) for i in index])


def _row_address(ref: Any, row: Any, row_bytes: int, offset: Any) -> Any:
    """64-bit address of byte `offset` of a row of a ref in GMEM."""
    i64 = ir.IntegerType.get_signless(64)
    base = llvm.ptrtoint(i64, mgpu_utils.memref_ptr(ref))
    return arith.addi(arith.addi(base, arith.muli(arith.extsi(i64, row), mgpu.c(row_bytes, i64))),
                      arith.extsi(i64, offset))  # fmt: skip


def _elements(array: Any) -> list[Any]:
    out: list[Any] = []
    array.foreach(lambda value, _: out.append(value))
    return out


def _replace(array: Any, elements: Sequence[Any]) -> Any:
    """An array of the same layout with other elements."""
    rest = iter(elements)
    return array.foreach(lambda _value, _: next(rest), create_array=True, is_signed=True)


def _emit(arg_types: Sequence[Any], n: int | None = None, scalars: int = 0) -> Callable[..., Any]:
    """Decorator for emitted code giving back one `[n]` array (if n), then some scalars."""
    results = [plgpu.ShapeDtypeStruct((n,), jnp.int32, layout=spread(n))] if n else []
    results += [plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR)] * scalars
    return plgpu.inline_mgpu(arg_types=tuple(arg_types), return_type=tuple(results) if results else None)


def _splat(value: Any) -> Any:
    return mgpu.FragmentedArray.splat(value, (), is_signed=True)


# Words: access -------------------------------------------------------------------------------------------------------
def gather(ref: Any, index: Array, default: int = -1) -> Array:
    """`ref[index]` as int32, `default` where the index is negative; `ref` is 1-D, in GMEM or SMEM."""
    if interpreting():
        return jnp.where(index >= 0, ref[...].astype(jnp.int32)[jnp.maximum(index, 0)], jnp.int32(default))
    (n,) = index.shape

    @_emit((_REF, spread(n)), n)
    def emit(ctx: Any, ref: Any, index: Any) -> Any:
        wanted = _elements(index)
        loaded = [_load(ref, arith.maxsi(i, _c(0))) for i in wanted]
        values = [arith.select(_compare("sge", i, _c(0)), v, _c(default)) for i, v in zip(wanted, loaded, strict=True)]
        return (_replace(index, values),)

    return emit(ref, index)[0]


def scatter(ref: Any, index: Array, value: Array | int) -> None:
    """`ref[index] = value` where the index is not negative; `ref` is 1-D, in GMEM or SMEM.

    A constant must come as a Python int: an array that is one value in all lanes has a layout of its own.
    """
    if interpreting():
        old = ref[...]
        where = jnp.where(index >= 0, index, old.shape[0])
        ref[...] = old.at[where].set(jnp.asarray(value).astype(old.dtype), mode="drop")
        return
    (n,) = index.shape
    constant = isinstance(value, int)

    @_emit((_REF, spread(n)) if constant else (_REF, spread(n), spread(n)))
    def emit(ctx: Any, ref: Any, index: Any, *values: Any) -> None:
        where = _elements(index)
        for i, v in zip(where, [_c(value)] * len(where) if constant else _elements(values[0]), strict=True):
            with mgpu.when(_compare("sge", i, _c(0))):
                _store(v, ref, i)

    emit(ref, index, *([] if constant else [value]))


def take(counters: Any, index: Array) -> Array:
    """Adds 1 to `counters[index]` for every lane and gives each the value it found; 1-D int32 in SMEM, -1: nothing.

    Which lane comes first is not determined.
    """
    if interpreting():
        earlier = jnp.tril(index[:, None] == index[None], -1).sum(-1, dtype=jnp.int32)
        before = gather(counters, index, 0) + earlier
        size = counters.shape[0]
        counters[...] = counters[...].at[jnp.where(index >= 0, index, size)].add(1, mode="drop")
        return jnp.where(index >= 0, before, -1)
    (n,) = index.shape

    @_emit((_REF, spread(n)), n)
    def emit(ctx: Any, counters: Any, index: Any) -> Any:
        base, found = mgpu_utils.memref_ptr(counters), []
        for i in _elements(index):
            branch = scf.IfOp(_compare("sge", i, _c(0)), results_=[_i32()], has_else=True)
            with ir.InsertionPoint(branch.then_block):
                where = mgpu_utils.getelementptr(base, [i], _i32())
                add = llvm.atomicrmw(llvm.AtomicBinOp.add, where, _c(1), llvm.AtomicOrdering.monotonic)
                scf.yield_([add])
            with ir.InsertionPoint(_block(branch.else_block)):
                scf.yield_([_c(-1)])
            found.append(branch.results[0])
        return (_replace(index, found),)

    return emit(counters, index)[0]


def put(ref: Any, *scalars: Array) -> None:
    """`ref[i] = scalars[i]`; one lane of the program writes."""
    if interpreting():
        for i, value in enumerate(scalars):
            ref[i] = value
        return

    @_emit((_REF, *[_SCALAR] * len(scalars)))
    def emit(ctx: Any, ref: Any, *scalars: Any) -> None:
        with mgpu.when(_compare("eq", _block_lane(), _c(0))):
            for i, value in enumerate(scalars):
                _store(value.registers.item(), ref, _c(i))

    emit(ref, *scalars)


def fill(ref: Any, value: int, threads: int) -> None:
    """Sets every element of a 1-D ref in SMEM, all lanes of the program together."""
    if interpreting():
        ref[...] = jnp.full(ref.shape, value, ref.dtype)
        return

    @_emit((_REF,))
    def emit(ctx: Any, ref: Any) -> None:
        kind = ir.MemRefType(ref.type).element_type
        (size,) = ir.MemRefType(ref.type).shape
        lane, step = _index(_block_lane()), threads * LANES
        loop = scf.ForOp(lane, mgpu.c(size, ir.IndexType.get()), mgpu.c(step, ir.IndexType.get()))
        with ir.InsertionPoint(loop.body):
            memref.store(arith.constant(kind, value), ref, [loop.induction_variable])
            scf.yield_([])

    emit(ref)


def barrier() -> None:
    """All lanes of the program wait for each other, and see each other's writes."""
    if interpreting():
        return

    @_emit(())
    def emit(ctx: Any) -> None:
        gpu_dialect.barrier()

    emit()


def cluster_arrive() -> None:
    """Says that this program has done its reads; see `cluster_wait`."""

    @_emit(())
    def emit(ctx: Any) -> None:
        nvvm.cluster_arrive(aligned=True)

    emit()


def cluster_wait() -> None:
    """Waits until every program of the cluster has arrived."""

    @_emit(())
    def emit(ctx: Any) -> None:
        nvvm.cluster_wait(aligned=True)

    emit()


def _block(block: Any) -> Any:
    """A block that is there by construction; its accessor may give None."""
    return block


# Words: counting -----------------------------------------------------------------------------------------------------
def _across_warps(scratch: Any, row: int, warp_total: Any, threads: int) -> Callable[[], tuple[Any, Any]]:
    """Publishes a warp's total; gives a function for (sum over earlier warps, sum over all) to call after a barrier."""
    lane, warp = arith.andi(_block_lane(), _c(WARP - 1)), arith.shrui(_block_lane(), _c(5))
    with mgpu.when(_compare("eq", lane, _c(0))):
        _store(warp_total, scratch, arith.addi(warp, _c(row * MAX_WARPS)))

    def read() -> tuple[Any, Any]:
        inside = arith.minsi(lane, _c(threads * 4 - 1))
        total = _load(scratch, arith.addi(inside, _c(row * MAX_WARPS)))
        total = arith.select(_compare("slt", lane, _c(threads * 4)), total, _c(0))
        before = arith.select(_compare("slt", lane, warp), total, _c(0))

        def add(x):
            return mgpu_utils.redux(x, _c(-1), nvvm.ReductionKind.ADD)

        return add(before), add(total)

    return read


def prefix_count(scratch: Any, flags: Array, *others: Array, threads: int) -> tuple[Array, ...]:
    """Exclusive prefix count of `flags` over the program, by ballots, and the totals of `flags` and of `others`.

    Args:
      scratch: int32 `[32 * (1 + len(others))]` in SMEM; two calls in a row need two of them. Contains a barrier.
      flags, others: int32 `[n]`, 0 or 1.
    Returns:
      int32 `[n]`, then scalars.
    """
    if interpreting():
        return (jnp.cumsum(flags, dtype=jnp.int32) - flags, *(jnp.sum(f, dtype=jnp.int32) for f in (flags, *others)))
    (n,) = flags.shape

    @_emit((_REF, *[spread(n)] * (1 + len(others))), n, 1 + len(others))
    def emit(ctx: Any, scratch: Any, flags: Any, *others: Any) -> Any:
        def ballot(f):
            return nvvm.vote_sync(_c(-1), _compare("ne", f, _c(0)), nvvm.VoteSyncKind.ballot, results=[_i32()])

        below = nvvm.read_ptx_sreg_lanemask_lt()

        def add(xs):
            return _reduce(arith.addi, xs)

        reads, lanes_before = [], _c(0)
        for row, mask in enumerate((flags, *others)):
            votes = [ballot(f) for f in _elements(mask)]
            if row == 0:
                lanes_before = add([_popcount(arith.andi(v, below)) for v in votes])
            reads.append(_across_warps(scratch, row, add([_popcount(v) for v in votes]), threads))
        gpu_dialect.barrier()
        sums = [read() for read in reads]
        running, out = arith.addi(sums[0][0], lanes_before), []
        for f in _elements(flags):
            out.append(running)
            running = arith.addi(running, f)
        return (_replace(flags, out), *(_splat(total) for _, total in sums))

    return emit(scratch, flags, *others)


def prefix_sum(scratch: Any, values: Array, *, threads: int) -> tuple[Array, Array]:
    """Exclusive prefix sum over the program, by shuffles, and the total. `scratch` as in `prefix_count`, `[32]`."""
    if interpreting():
        return jnp.cumsum(values, dtype=jnp.int32) - values, jnp.sum(values, dtype=jnp.int32)
    (n,) = values.shape

    @_emit((_REF, spread(n)), n, 1)
    def emit(ctx: Any, scratch: Any, values: Any) -> Any:
        lane = arith.andi(_block_lane(), _c(WARP - 1))
        own = _reduce(arith.addi, _elements(values))
        scan = own
        for distance in (1, 2, 4, 8, 16):
            other = nvvm.shfl_sync(_c(-1), scan, _c(distance), _c(0), nvvm.ShflKind.up)
            scan = arith.addi(scan, arith.select(_compare("sge", lane, _c(distance)), other, _c(0)))
        last = nvvm.shfl_sync(_c(-1), scan, _c(WARP - 1), _c(WARP - 1), nvvm.ShflKind.idx)
        read = _across_warps(scratch, 0, last, threads)
        gpu_dialect.barrier()
        before, total = read()
        running, out = arith.addi(before, arith.subi(scan, own)), []
        for v in _elements(values):
            out.append(running)
            running = arith.addi(running, v)
        return _replace(values, out), _splat(total)

    return emit(scratch, values)


def _reduce(op: Callable[..., Any], values: Sequence[Any]) -> Any:
    out = values[0]
    for value in values[1:]:
        out = op(out, value)
    return out


# Words: a set of ascending ids with rank -----------------------------------------------------------------------------
def bitmap_insert(words: Any, first: Any, ids: Array, before: Array, places: Array) -> None:
    """Adds ids (-1: none) to a bitmap that `bitmap_rank` asks.

    Args:
      words: int32 `[bits / 32]` in SMEM, zeroed; bit b of word w is id 32 w + b.
      first: int16 `[bits / 32]` in SMEM: place of the smallest id of each word, valid where the word is not 0.
      ids: int32 `[n]`, ascending over the program; `before`: the id one place earlier (-1 for the first).
      places: int32 `[n]`, place of each id in the ascending list.
    """
    bits = words.shape[0] * 32
    ids = jnp.where(ids < bits, ids, -1)
    word = lax.shift_right_arithmetic(ids, jnp.int32(5))
    scatter(first, jnp.where((ids >= 0) & (lax.shift_right_arithmetic(before, jnp.int32(5)) != word), word, -1), places)
    if interpreting():
        bit = jnp.where(ids >= 0, jnp.left_shift(jnp.int32(1), ids & 31), 0)
        words[...] = words[...].at[jnp.where(ids >= 0, word, words.shape[0])].add(bit, mode="drop")
        return
    (n,) = ids.shape

    @_emit((_REF, spread(n)))
    def emit(ctx: Any, words: Any, ids: Any) -> None:
        base = mgpu_utils.memref_ptr(words)
        for i in _elements(ids):
            with mgpu.when(_compare("sge", i, _c(0))):
                where = mgpu_utils.getelementptr(base, [arith.shrui(i, _c(5))], _i32())
                bit = arith.shli(_c(1), arith.andi(i, _c(31)))
                llvm.atomicrmw(llvm.AtomicBinOp._or, where, bit, llvm.AtomicOrdering.monotonic)

    emit(words, ids)


def bitmap_rank(words: Any, first: Any, ids: Array) -> Array:
    """Place of each id in the ascending list, -1 if it isn't there: first[word] + popcount(bits of the word below)."""
    bits = words.shape[0] * 32
    known = (ids >= 0) & (ids < bits)
    word = jnp.where(known, lax.shift_right_arithmetic(ids, jnp.int32(5)), -1)
    mask, start = gather(words, word, 0), gather(first, word, 0)
    below = popcount(mask & (jnp.left_shift(jnp.int32(1), ids & 31) - 1))
    return jnp.where((lax.shift_right_logical(mask, ids & 31) & 1) != 0, start + below, -1)


def popcount(values: Array) -> Array:
    """Number of bits set, int32 `[n]`."""
    if interpreting():
        return lax.population_count(values)
    (n,) = values.shape

    @_emit((spread(n),), n)
    def emit(ctx: Any, values: Any) -> Any:
        return (_replace(values, [_popcount(v) for v in _elements(values)]),)

    return emit(values)[0]


def search_last(ascending: Any, ids: Array) -> Array:
    """Last place of a sorted int32 `[K]` ref that is not above each id, -1 if there is none."""
    (size,) = ascending.shape
    if interpreting():
        return jnp.searchsorted(ascending[...], ids, side="right").astype(jnp.int32) - 1
    (n,) = ids.shape

    @_emit((_REF, spread(n)), n)
    def emit(ctx: Any, ascending: Any, ids: Any) -> Any:
        def search(i: Any) -> Any:
            place, step = _c(0), 1 << (size.bit_length() - 1)
            while step:  # place = how many are not above
                probe = arith.addi(place, _c(step))
                value = _load(ascending, arith.subi(arith.minsi(probe, _c(size)), _c(1)))
                further = arith.andi(_compare("sle", probe, _c(size)), _compare("sle", value, i))
                place, step = arith.select(further, probe, place), step // 2
            return arith.subi(place, _c(1))

        return (_replace(ids, [search(i) for i in _elements(ids)]),)

    return emit(ascending, ids)[0]


def search_rank(ascending: Any, ids: Array) -> Array:
    """Place of each id in a sorted int32 `[K]` ref, -1 if it isn't there: `bitmap_rank` for sets that are too wide."""
    place = search_last(ascending, ids)
    return jnp.where((ids >= 0) & (gather(ascending, place) == ids), place, -1)


# Words: rows ---------------------------------------------------------------------------------------------------------
def lines_of_row(words: int) -> int:
    """Link lines (128 B) that a row of so many uint32 touches at most, at any row number."""
    line = LINE_BYTES // 4
    return -(-(words + line - math.gcd(words, line)) // line)


def copy_unsupported(words: int, rows: int) -> str | None:
    """Why `copy_rows` can't move so many rows of so many words, or None."""
    if words % 2:
        return f"rows must be a multiple of 8 bytes, got {4 * words}"
    items = rows * lines_of_row(words) * (8 if words % 4 == 0 else 16)
    if items + (1 << 20) * 16 >= 1 << 31:
        return f"{rows} rows of {4 * words} bytes are more than one call can count"
    return None


def copy_rows(
    source: Any, target: Any, source_row: Any, target_row: Any, rows: Array, worker: Array | int = 0, workers: int = 1,
    *, threads: int, aligned: str, source_offset: Array | int = 0, target_offset: Array | int = 0, in_flight: int = 4,
    copiers: int = 0,
) -> None:  # fmt: skip
    """Copies rows of uint32 words, shared out over `workers` programs: `target[target_row[m]] = source[source_row[m]]`.

    Eight lanes with 16 bytes each (or 16 with 8 where rows aren't a multiple of 16) move one aligned 128-byte line of
    the host side, so that no request over the link is split or made twice; each lane has `in_flight` loads under way.

    Args:
      source, target: uint32 `[., words]`; one of them may lie in pinned host memory: the `aligned` one.
      source_row, target_row: int32 `[N]` in GMEM or SMEM; None: m itself; a negative target row is skipped.
      rows: scalar, how many; worker: scalar, number of this program among the workers.
      aligned: "source" or "target", the side that is behind the link.
      source_offset, target_offset: scalars added to the rows.
      copiers: how many of the threads copy; 0: all. Fewer keep rows that are on their way closer together.
    """
    words = source.shape[-1]
    if interpreting():
        offsets = source_offset, target_offset
        _copy_rows_twin(source, target, source_row, target_row, rows, worker, workers, *offsets)
        return
    refs = [r for r in (source, target, source_row, target_row) if r is not None]
    scalars = [jnp.asarray(s, jnp.int32) for s in (rows, worker, source_offset, target_offset)]

    @_emit((*[_REF] * len(refs), *[_SCALAR] * 4))
    def emit(ctx: Any, *args: Any) -> None:
        given = iter(args[: len(refs)])
        source_, target_, source_row_, target_row_ = (
            next(given) if r is not None else None for r in (source, target, source_row, target_row)
        )
        rows_, worker_, source_offset_, target_offset_ = (s.registers.item() for s in args[len(refs) :])
        vector = 4 if words % 4 == 0 else 2
        group, lines = LINE_BYTES // (4 * vector), lines_of_row(words)
        straight = words % (LINE_BYTES // 4) == 0
        items = arith.muli(rows_, _c(lines * group))
        last = arith.subi(rows_, _c(1))
        lanes = (copiers or threads) * LANES
        step = workers * lanes
        begin = arith.addi(arith.muli(worker_, _c(lanes)), _block_lane())
        begin = arith.select(_compare("slt", _block_lane(), _c(lanes)), begin, items)

        def locate(m: Any) -> tuple[Any, Any, Any]:
            """Source and target row of row m of the count, and whether it is to be skipped."""
            m = arith.minsi(m, last)
            from_row = m if source_row_ is None else _load(source_row_, m)
            to_row = m if target_row_ is None else _load(target_row_, m)
            skip = _compare("slt", to_row, _c(0))
            return arith.addi(from_row, source_offset_), arith.addi(to_row, target_offset_), skip

        def address(ref: Any, row: Any, word: Any) -> Any:
            i64 = ir.IntegerType.get_signless(64)  # a pool may have more than 2^31 words
            flat = arith.addi(arith.muli(arith.extsi(i64, row), mgpu.c(words, i64)), arith.extsi(i64, word))
            pointer = mgpu_utils.memref_ptr(ref)
            dynamic = -(2**31)
            return llvm.getelementptr(pointer.type, pointer, [flat], [dynamic], _i32(), llvm.GEPNoWrapFlags.none)

        kind = ir.VectorType.get((vector,), _i32())
        loop = scf.ForOp(begin, items, _c(step * in_flight))
        with ir.InsertionPoint(loop.body):
            found = []
            for k in range(in_flight):
                item = arith.addi(loop.induction_variable, _c(k * step))
                line, lane = arith.divui(item, _c(group)), arith.remui(item, _c(group))
                m, part = arith.divui(line, _c(lines)), arith.remui(line, _c(lines))
                from_row, to_row, skip = locate(m)
                word = arith.addi(arith.muli(part, _c(LINE_BYTES // 4)), arith.muli(lane, _c(vector)))
                ok = arith.andi(_compare("slt", item, items), arith.xori(skip, mgpu.c(1, skip.type)))
                if not straight:
                    row = from_row if aligned == "source" else to_row
                    shift = arith.andi(arith.muli(row, _c(words)), _c(LINE_BYTES // 4 - 1))
                    word = arith.subi(word, shift)
                    ok = arith.andi(ok, _compare("ult", word, _c(words)))
                found.append((ok, from_row, to_row, word))
            values = []
            for ok, from_row, _, word in found:
                branch = scf.IfOp(ok, results_=[kind], has_else=True)
                with ir.InsertionPoint(branch.then_block):
                    scf.yield_([llvm.load(kind, address(source_, from_row, word), alignment=4 * vector)])
                with ir.InsertionPoint(_block(branch.else_block)):
                    scf.yield_(
                        [arith.constant(kind, ir.DenseElementsAttr.get_splat(kind, ir.IntegerAttr.get(_i32(), 0)))]
                    )
                values.append(branch.results[0])
            for (ok, _, to_row, word), value in zip(found, values, strict=True):
                with mgpu.when(ok):
                    llvm.store(value, address(target_, to_row, word), alignment=4 * vector)
            scf.yield_([])

    emit(*refs, *scalars)


def _copy_rows_twin(
    source: Any, target: Any, source_row: Any, target_row: Any, rows: Array, worker: Array | int, workers: int,
    source_offset: Array | int, target_offset: Array | int,
) -> None:  # fmt: skip
    """Row by row, so that two programs that touch one row are a race the interpreter sees."""

    def one(i: Array, _: None) -> None:
        m = worker + i * workers

        @pl.when(m < rows)
        def _() -> None:
            from_row = m if source_row is None else source_row[m].astype(jnp.int32)
            to_row = m if target_row is None else target_row[m].astype(jnp.int32)

            @pl.when(to_row >= 0)
            def _() -> None:
                target.at[to_row + target_offset][...] = source.at[from_row + source_offset][...]

    lax.fori_loop(0, (rows + workers - 1) // workers, one, None)


# Words: time ---------------------------------------------------------------------------------------------------------
def now() -> Array:
    """The GPU's global timer in ns, its low 32 bits as int32."""

    @_emit((), scalars=1)
    def emit(ctx: Any) -> Any:
        return (_splat(mgpu_utils.globaltimer("low")),)

    return emit()[0]


def sleep(us: int) -> None:
    """Holds the program for up to twice so many microseconds, at most 1000."""

    @_emit(())
    def emit(ctx: Any) -> None:
        mgpu_utils.nanosleep(_c(1000 * us))

    emit()
