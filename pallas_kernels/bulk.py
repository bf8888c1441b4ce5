# SPDX-License-Identifier: Apache-2.0
"""Row copies by the bulk copy engine: few lanes, no registers, and hardly a load of a lane's own.

`indexed.copy_rows` moves lines through registers, so a program that is to keep the link busy fills a multiprocessor
with lanes that wait. Here a lane asks the engine for a whole piece of a row, waits until it is in shared memory, and
asks for it to be stored. The rest of the multiprocessor is left to whatever runs beside it.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import indexed
from pallas_kernels.indexed import _block_lane, _c, _compare, _emit, _i32, _load, _row_address, arith, ir, llvm, scf

LARGEST_PIECE = 2048  # bytes of a row that are moved at once
_GRANULE = 16  # bytes
_REF = plgpu.RefType()
_SCALAR = plgpu.Layout.WG_SPLAT(())
# What a lane does, one instruction each; operands are addresses in shared (i32) and global memory (i64).
_INIT = "mbarrier.init.shared::cta.b64 [$0], 1;"
_INIT_SEEN = "fence.mbarrier_init.release.cluster; fence.proxy.async;"
_EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"
_LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
_WAIT = (
    "{ .reg .pred there; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 there, [$0], $1; @there bra DONE; bra AGAIN; "
    "DONE: }"
)
_STORE = "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;"
_COMMIT = "cp.async.bulk.commit_group;"
_STORE_READ = "cp.async.bulk.wait_group.read 0;"  # shared memory may be filled again
_STORES_DONE = "cp.async.bulk.wait_group 0;"
_INVALIDATE = "mbarrier.inval.shared::cta.b64 [$0];"


def piece_words(words: int) -> int:
    """Words of a row that are moved at once: an equal part of the row, the largest that `LARGEST_PIECE` allows."""
    granules = 4 * words // _GRANULE
    most = LARGEST_PIECE // _GRANULE
    return max(d for d in range(1, min(granules, most) + 1) if granules % d == 0) * _GRANULE // 4


def can_copy(words: int) -> bool:
    """Whether the engine copies rows of so many words: addresses and sizes are multiples of 16 bytes."""
    return 4 * words % _GRANULE == 0


def held_bytes(words: int) -> int:
    """Shared memory for each piece on its way: itself and its barrier."""
    return 4 * piece_words(words) + 8


def scratch_types(words: int, lanes: int) -> tuple[Any, Any]:
    """Shared memory of `copy_rows`: a piece on its way for each lane that copies, and a 64-bit barrier for each."""
    return plgpu.SMEM((lanes, piece_words(words)), jnp.uint32), plgpu.SMEM((2 * lanes,), jnp.uint32)


def copy_rows(
    source: Any, target: Any, source_row: Any, target_row: Any, rows: Array, held: Any, barriers: Any, *,
    source_offset: Array | int = 0,
) -> None:  # fmt: skip
    """Copies rows of uint32 words: `target[target_row[m]] = source[source_offset + source_row[m]]` for `m < rows`.

    As many lanes of the program as `held` has pieces share the pieces of the rows out, and each has one under way. All
    lanes must have written the rows before their last barrier.

    Args:
      source, target: uint32 `[., words]` in GMEM; the source may lie in pinned host memory.
      source_row, target_row: int32 `[N]` in SMEM, none of the first `rows` negative.
      rows: scalar, how many.
      held, barriers: of `scratch_types`, for at most all lanes of the program.
      source_offset: scalar.
    """
    if indexed.interpreting():
        indexed._copy_rows_twin(source, target, source_row, target_row, rows, 0, 1, source_offset, 0)
        return
    lanes, size, row_bytes = held.shape[0], 4 * held.shape[1], 4 * source.shape[-1]
    pieces = row_bytes // size
    scalars = [jnp.asarray(s, jnp.int32) for s in (rows, source_offset)]

    @_emit((*[_REF] * 6, *[_SCALAR] * 2))
    def emit(
        ctx: Any, source: Any, target: Any, source_row: Any, target_row: Any, held: Any, barriers: Any, rows: Any,
        source_offset: Any,
    ) -> None:  # fmt: skip
        lane, items = _block_lane(), arith.muli(rows.registers.item(), _c(pieces))

        def own(ref: Any, stride: int) -> Any:
            """32-bit address of this lane's part of a scratch array."""
            base = llvm.ptrtoint(_i32(), mgpu_utils.memref_ptr(ref))
            return arith.addi(base, arith.muli(lane, _c(stride)))

        place, barrier = own(held, size), own(barriers, 8)
        with mgpu.when(_compare("slt", lane, _c(lanes))):
            _ptx(_INIT, barrier)
            _ptx(_INIT_SEEN)
            loop = scf.ForOp(lane, items, _c(lanes), [_c(0)])
            with ir.InsertionPoint(loop.body):
                (parity,), item = loop.inner_iter_args, loop.induction_variable
                m, offset = arith.divui(item, _c(pieces)), arith.muli(arith.remui(item, _c(pieces)), _c(size))
                row = arith.addi(_load(source_row, m), source_offset.registers.item())
                _ptx(_EXPECT, barrier, _c(size))
                _ptx(_LOAD, place, _row_address(source, row, row_bytes, offset), _c(size), barrier)
                to_address = _row_address(target, _load(target_row, m), row_bytes, offset)
                _ptx(_WAIT, barrier, parity)
                _ptx(_STORE, to_address, place, _c(size))
                _ptx(_COMMIT)
                _ptx(_STORE_READ)
                scf.yield_([arith.xori(parity, _c(1))])
            _ptx(_STORES_DONE)
            _ptx(_INVALIDATE, barrier)

    emit(source, target, source_row, target_row, held, barriers, *scalars)


def _ptx(instruction: str, *operands: Any) -> None:
    mgpu_utils.inline_ptx(instruction, *operands, has_side_effects=True)
