# SPDX-License-Identifier: Apache-2.0
"""Exact top-k as a Mosaic GPU kernel: a threshold by radix digits, then a compaction that keeps the order of positions.

A row is served by a cluster of programs, each with a share of its positions. Scores become int32 keys that sort alike
(`digits.order_key`). For a row longer than k, k - newest are chosen among all but the newest, behind which the first
program writes those. With k for k - newest:

1. narrow   per digit of 11, 11 and 10 bits, from the top: a histogram of the keys that still may hold the threshold, in
            shared memory; the programs read each other's and find the digit in which the k-th largest key lies. When
            that digit's keys are all wanted, the rest of the digits need not be looked at;
2. mark     bitmaps of the keys above the threshold, and of those equal to it (whose first ones, by position, fill up);
3. compact  ranks are prefix sums of population counts, offset by what the programs before have: ids come out ascending.

The share is read from GMEM once and kept in shared memory (`resident`), or read again per pass where it doesn't fit.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import digits, indexed
from pallas_kernels.index_topk.tuning import SHARE, SHARED_BYTES, Tuning, share_of, shared_bytes, tuning
from pallas_kernels.program import Program

SHIFTS = (21, 10, 0)  # of the digits
DIGITS = (1 << 11, 1 << 11, 1 << 10)


def unsupported(context: int) -> str | None:
    """Why the kernel can't take rows of so many scores, or None."""
    if not context:
        return "rows without scores"
    need = shared_bytes(share_of(context, 8), resident=False)
    if need > SHARED_BYTES:
        return f"S = {context} needs {need} bytes of shared memory, it has {SHARED_BYTES}"
    return None


def index_topk(
    scores: Array, length: Array, k: int, *, newest: int = 0, busy: int | None = None, how: Tuning | None = None
) -> Array:
    """See `pallas_kernels.index_topk.index_topk`."""
    rows, context = scores.shape
    how = how or tuning(busy or rows, context)
    programs, threads = how.programs, how.threads
    share_size = share_of(context, programs)
    words = share_size // 32
    vector = 4 if context % 4 == 0 else 1  # else rows aren't aligned to 16 bytes
    pass_options = {"threads": threads, "vector": vector, "in_flight": how.in_flight}

    def index_topk_kernel(scores_ref: Any, length_ref: Any, out_ref: Any, *shared: Any) -> None:
        *histograms, larger, equal, found, totals, scratch, keys = shared
        row, thread = lax.axis_index("row"), lax.axis_index("thread")
        number = lax.axis_index("program") if programs > 1 else jnp.int32(0)
        program = Program(threads, thread)
        places, rounds = program.places, program.rounds
        scores_ref, out_ref = scores_ref.at[row], out_ref.at[row]
        length = jnp.minimum(length_ref[row], context)
        others = jnp.maximum(length - newest, 0)
        share = lax.div(others + (programs * SHARE - 1), jnp.int32(programs * SHARE)) * SHARE
        begin = number * share
        end = jnp.minimum(begin + share, others)
        zero = jnp.int32(0)

        def together() -> None:
            """The cluster's programs wait for each other and see each other's shared memory."""
            if programs > 1:
                indexed.cluster_arrive()
                indexed.cluster_wait()
            else:
                indexed.barrier()

        def of_all(ref: Any, at: Array) -> Array:
            if programs == 1:
                return indexed.gather(ref, at, 0)
            total = digits.gather_of(ref, at, 0)
            for other in range(1, programs):
                total += digits.gather_of(ref, at, other)
            return total

        def earlier(place: int) -> Array:
            """The sum of a total over the programs before this one."""
            total = zero
            for other in range(programs - 1):
                total += jnp.where(other < number, digits.read_of(totals, place, other), 0)
            return total

        # All ids of a short row ---------------------------------------------------------------------------------------
        def short() -> None:
            def one(chunk: Any, _: Any) -> Any:
                at = places(k, chunk)
                indexed.scatter(out_ref, at, jnp.where(at < length, at, -1))
                return _

            rounds(k, one, zero)

        # Longer ones --------------------------------------------------------------------------------------------------
        def narrow(level: int, prefix: Array, wanted: Array, population: Array) -> tuple[Array, Array]:
            """Threshold, and how many equal to it are wanted: `wanted` of the `population` keys that begin so."""
            counts, shift, bins = histograms[level], SHIFTS[level], DIGITS[level]
            source, offset = (keys, begin) if how.resident and level else (scores_ref, zero)
            digits.count_digits(
                source, counts, begin, end, offset, prefix, shift=shift, above=SHIFTS[level - 1] if level else 32,
                keep=keys if how.resident and not level else None, **pass_options,
            )  # fmt: skip
            together()

            def find(chunk: Any, below: Array) -> Array:
                at = places(bins, chunk)
                here = of_all(counts, at)
                before, total = indexed.prefix_sum(scratch.at[chunk % 2], here, threads=threads)
                above = population - below - before - here
                it = (at >= 0) & (above < wanted) & (above + here >= wanted)
                indexed.scatter(found, jnp.where(it, 0, -1), at)
                indexed.scatter(found, jnp.where(it, 1, -1), wanted - above)
                indexed.scatter(found, jnp.where(it, 2, -1), here)
                return below + total

            rounds(bins, find, zero)
            indexed.barrier()
            digit, wanted, population = found[0], found[1], found[2]
            prefix = digit - bins // 2 if level == 0 else prefix * bins + digit
            if shift == 0:
                return prefix, wanted
            return lax.cond(
                population == wanted,
                lambda: (prefix * (1 << shift) - 1, zero),
                lambda: narrow(level + 1, prefix, wanted, population),
            )

        def long() -> None:
            for counts in histograms:
                indexed.fill(counts, 0, threads)
            indexed.barrier()
            threshold, wanted = narrow(0, zero, jnp.int32(k - newest), others)
            source, offset = (keys, begin) if how.resident else (scores_ref, zero)
            digits.mark_keys(source, larger, equal, begin, end, offset, threshold, **pass_options)
            indexed.barrier()
            filled = lax.div(jnp.maximum(end - begin, 0) + 31, jnp.int32(32))

            def bitmaps(chunk: Any) -> tuple[Array, Array, Array]:
                at = places(words, chunk)
                known = jnp.where(at < filled, at, -1)
                return at, indexed.gather(larger, known, 0), indexed.gather(equal, known, 0)

            def scratches(chunk: Any) -> tuple[Any, Any]:
                return scratch.at[2 * (chunk % 2)], scratch.at[2 * (chunk % 2) + 1]

            def count(chunk: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
                _, above, ties = bitmaps(chunk)
                one, two = scratches(chunk)
                _, more = indexed.prefix_sum(one, indexed.popcount(above), threads=threads)
                _, same = indexed.prefix_sum(two, indexed.popcount(ties), threads=threads)
                return sums[0] + more, sums[1] + same

            above, ties = rounds(words, count, (zero, zero))
            if programs > 1:
                indexed.put(totals, above, ties)
                together()
                above_before, ties_before = earlier(0), earlier(1)
                indexed.cluster_arrive()  # the others may end
            else:
                indexed.barrier()
                above_before = ties_before = zero
            start = above_before + jnp.minimum(wanted, ties_before)
            ties_left = jnp.maximum(wanted - ties_before, 0)

            def compact(chunk: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
                at, above, ties = bitmaps(chunk)
                one, two = scratches(chunk)
                tie_rank, ties_here = indexed.prefix_sum(one, indexed.popcount(ties), threads=threads)
                chosen = above | _lowest(ties, ties_left - sums[1] - tie_rank)
                rank, chosen_here = indexed.prefix_sum(two, indexed.popcount(chosen), threads=threads)
                digits.write_set_bits(out_ref, chosen, start + sums[0] + rank, begin + 32 * at)
                return sums[0] + chosen_here, sums[1] + ties_here

            rounds(words, compact, (zero, zero))

            def add_newest(chunk: Any, _: Any) -> Any:
                at = places(newest, chunk)
                indexed.scatter(out_ref, jnp.where(at >= 0, k - newest + at, -1), others + at)
                return _

            if newest:

                @pl.when(number == 0)
                def _() -> None:
                    rounds(newest, add_newest, zero)

            if programs > 1:
                indexed.cluster_wait()

        @pl.when(length <= k)
        def _() -> None:
            @pl.when(number == 0)
            def _() -> None:
                short()

        @pl.when(length > k)
        def _() -> None:
            long()

    scratch_types = [
        *(plgpu.SMEM((bins,), jnp.int32) for bins in DIGITS),
        plgpu.SMEM((words,), jnp.int32),
        plgpu.SMEM((words,), jnp.int32),
        plgpu.SMEM((32,), jnp.int32),
        plgpu.SMEM((32,), jnp.int32),
        plgpu.SMEM((4, indexed.MAX_WARPS), jnp.int32),
        plgpu.SMEM((share_size if how.resident else 32,), jnp.int32),
    ]
    cluster: dict[str, Any] = {"cluster": (programs,), "cluster_names": ("program",)} if programs > 1 else {}
    return plgpu.kernel(
        index_topk_kernel, out_type=jax.ShapeDtypeStruct((rows, k), jnp.int32), grid=(rows,), grid_names=("row",),
        num_threads=threads, thread_name="thread", scratch_types=scratch_types, **cluster,
    )(scores, length)  # fmt: skip


def _lowest(words: Array, n: Array) -> Array:
    """The n lowest set bits of each word (all if it has fewer, none if n is not positive); int32 `[m]` both."""
    cut, left = jnp.zeros_like(words), n
    for step in (16, 8, 4, 2, 1):
        low = indexed.popcount(lax.shift_right_logical(words, cut) & ((1 << step) - 1))
        taken = low <= left
        cut, left = jnp.where(taken, cut + step, cut), jnp.where(taken, left - low, left)
    some = words & (jnp.left_shift(jnp.int32(1), cut) - 1)
    return jnp.where(n >= indexed.popcount(words), words, jnp.where(n > 0, some, 0))
