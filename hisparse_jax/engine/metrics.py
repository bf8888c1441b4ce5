# SPDX-License-Identifier: Apache-2.0
"""What a run counted: hits and misses, bytes, times. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

HITS, RING_HITS, MISSES = range(3)


@dataclass
class Metrics:
    """Counters of every decode step, and seconds by stage.

    Attributes:
      tables: tables of the cache.
      counters: int32 `[tables, R, 3]` for each step: hits, ring hits, misses.
      compile_s: seconds of compilation.
      prefill_s: seconds of prefill and admission.
      decode_s: seconds of decode chunks.
      prefill_tokens: prompt tokens.
      decode_tokens: tokens that decode steps emitted.
    """

    tables: int
    counters: list[np.ndarray] = field(default_factory=list)
    compile_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0

    def by_step(self) -> np.ndarray:
        """int64 `[steps, tables, 3]`, all requests together."""
        if not self.counters:
            return np.zeros((0, self.tables, 3), np.int64)
        return np.stack(self.counters).sum(axis=2, dtype=np.int64)

    def hit_rate(self, axis: tuple[int, ...] = (0, 1)) -> np.ndarray:
        """Share of selected records that were on the device; NaN where nothing was selected.

        Args:
          axis: what to sum over: steps are axis 0, tables axis 1.
        """
        total = self.by_step().sum(axis=axis)
        hits, misses = total[..., HITS], total[..., MISSES]
        return np.divide(hits, hits + misses, out=np.full(np.shape(hits), np.nan), where=hits + misses > 0)

    def misses_by_table(self) -> np.ndarray:
        """int64 `[tables]`."""
        return self.by_step()[..., MISSES].sum(axis=0)

    def fetched_bytes(self, row_bytes: int, group_sizes: tuple[int, ...]) -> int:
        """Bytes that came from the host pool: a miss of a table fetches a row for every space that shares it."""
        return int((self.misses_by_table() * np.array(group_sizes)).sum() * row_bytes)

    @property
    def tokens_per_s(self) -> float:
        """Decoded tokens a second, without compilation and prefill."""
        return self.decode_tokens / self.decode_s if self.decode_s else float("nan")
