# SPDX-License-Identifier: Apache-2.0
"""Cases of the attention kernels, with NaN wherever nothing may be read, and what they should give in float64.

Tolerances. The kernels round the weights of the softmax to bfloat16 (2^-9 of each) and sum in float32: as weights sum
to 1, an output moves by at most 2^-9 of the largest value, which is below 6 for the normal numbers here. Logits are
float32 sums of up to 576 products of the tensor cores, which cut off each addition at 2^-23 of the largest term: below
1e-4 for the logits here, of a few units.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.row_format import RecordType, RowFormat
from pallas_kernels.sparse_mla import entry_bytes, read_entries, read_rows
from pallas_kernels.words import from_words, to_words

OUT_TOLERANCE, SUM_TOLERANCE = 6 * 2.0**-9, 1e-4
NAN_WORD = np.uint32(0xFFFFFFFF)  # NaN as float32, bfloat16 and e4m3
MLA_SCALE, GQA_SCALE = 0.05, 0.1
GROUPS = 2


class MlaCase(NamedTuple):
    """Arguments of `sparse_mla`, `group` 1."""

    row: RowFormat
    query: jax.Array
    words: np.ndarray
    place: np.ndarray

    def args(self, words: np.ndarray | None = None, place: np.ndarray | None = None) -> tuple[jax.Array, ...]:
        words, place = self.words if words is None else words, self.place if place is None else place
        return self.query, jnp.asarray(words), jnp.int32(1), jnp.asarray(place)

    def want(self) -> tuple[np.ndarray, np.ndarray]:
        requests, heads, _ = self.query.shape
        query = np.asarray(self.query).astype(np.float64)
        out, total = np.zeros((requests, heads, self.row.latent)), np.full((requests, heads), -np.inf)
        for r in range(requests):
            at = self.place[r][self.place[r] >= 0]
            if len(at):
                record = np.asarray(read_rows(jnp.asarray(self.words[1, at]), self.row)).astype(np.float64)
                logits = MLA_SCALE * query[r] @ record.T
                top = logits.max(-1, keepdims=True)
                weight = np.exp(logits - top)
                total[r] = np.log(weight.sum(-1)) + top[:, 0]
                out[r] = weight / weight.sum(-1, keepdims=True) @ record[:, : self.row.latent]
        return out, total


def mla_case(record: str, requests: int, heads: int, selected: int, *, slots: int = 0) -> MlaCase:
    """Random rows and places; the last requests are ragged, with gaps, with one place, and inactive."""
    row, rng = RowFormat(512, 64, record), np.random.default_rng(0)  # type: ignore[arg-type]
    slots = slots or selected + 9
    latent, rope = (jnp.asarray(rng.standard_normal((slots, n)), jnp.float32) for n in (512, 64))
    if record == "fp8":
        scales = np.exp2(rng.integers(-6, -3, (slots, 4))).astype(np.float32) * np.float32(1.1)
        parts = [jnp.asarray(latent / jnp.repeat(scales, 128, axis=1), jnp.float8_e4m3fn), jnp.asarray(scales)]
    else:
        parts = [jnp.asarray(latent, jnp.bfloat16)]
    good = np.concatenate([np.asarray(to_words(x)) for x in (*parts, jnp.asarray(rope, jnp.bfloat16))], axis=-1)
    place = np.stack([1 + rng.permutation(slots - 1)[:selected] for _ in range(requests)]).astype(np.int32)
    if requests > 1:
        place[-1] = -1
    if requests > 2:
        place[-2, 1:] = -1
        place[-2] = np.roll(place[-2], selected // 2)
    if requests > 3:
        place[-3, rng.random(selected) < 0.5] = -1
    if requests > 4:
        place[-4, selected - selected // 3 :] = -1
    words = np.full((GROUPS, slots, row.words), NAN_WORD, np.uint32)
    used = np.unique(place[place >= 0])
    words[1, used] = good[used]
    return MlaCase(row, jnp.asarray(rng.standard_normal((requests, heads, 576)), jnp.bfloat16), words, place)


class EntryCase(NamedTuple):
    """Arguments of `sparse_entries`: entries in group 1, the window in group 0."""

    record: RecordType
    query: jax.Array
    words: np.ndarray
    place: np.ndarray
    window_words: np.ndarray
    window_place: np.ndarray
    sink: np.ndarray

    def args(self, words: np.ndarray | None = None, place: np.ndarray | None = None) -> tuple[jax.Array, ...]:
        words, place = self.words if words is None else words, self.place if place is None else place
        entries = jnp.asarray(words), jnp.int32(1), jnp.asarray(place)
        window = jnp.asarray(self.window_words), jnp.int32(0), jnp.asarray(self.window_place)
        return self.query, *entries, *window, jnp.asarray(self.sink)

    def want(self) -> tuple[np.ndarray, np.ndarray]:
        requests, heads, width = self.query.shape
        dtype = jnp.float32 if self.record == "float32" else jnp.bfloat16
        query = np.asarray(self.query.astype(dtype)).astype(np.float64)
        out, total = np.zeros((requests, heads, width)), np.zeros((requests, heads))
        both = (self.words[1], self.place), (self.window_words[0], self.window_place)
        numbers = [(np.asarray(read_entries(jnp.asarray(x), width, self.record)), at) for x, at in both]
        for r in range(requests):
            record = [x[at[r][at[r] >= 0]] for x, at in numbers]
            record = np.concatenate([*record, np.zeros((1, width))]).astype(np.float64)  # the sink has no value
            logits = np.concatenate([MLA_SCALE * query[r] @ record[:-1].T, self.sink[:, None]], axis=1)
            top = np.maximum(logits.max(-1, keepdims=True), -1e30)
            weight = np.exp(logits - top)
            with np.errstate(divide="ignore"):
                total[r] = np.log(weight.sum(-1)) + top[:, 0]
            out[r] = weight / np.maximum(weight.sum(-1, keepdims=True), 1e-300) @ record
        return out, total


def entry_case(
    record: RecordType, requests: int, heads: int, selected: int, window: int, *, width: int = 512
) -> EntryCase:
    """Random entries, windows and sinks, one of them -inf and one large.

    The last requests are inactive, without entries, without a window, and with gaps in both.
    """
    rng = np.random.default_rng(0)
    words = entry_bytes(width, record) // 4

    def rows(group: int, each: int) -> tuple[np.ndarray, np.ndarray]:
        slots = max(1, requests * each) + 9
        place = (1 + rng.permutation(slots - 1)[: requests * each]).reshape(requests, each).astype(np.int32)
        if requests > 1:
            place[-1] = -1
        if requests > 2 + group:
            place[-3 if group == 0 else -2] = -1
        if requests > 4:
            place[-4, rng.random(each) < 0.5] = -1
        out = np.full((GROUPS, slots, words), NAN_WORD, np.uint32)
        used = np.unique(place[place >= 0])
        if len(used):
            out[group, used] = _entries(rng, len(used), width, record)
        return out, place

    hot, place = rows(1, selected)
    window_words, window_place = rows(0, window)
    sink = rng.standard_normal(heads).astype(np.float32)
    sink[:2] = (6.0, -np.inf)[: len(sink)]
    query = jnp.asarray(rng.standard_normal((requests, heads, width)), jnp.bfloat16)
    return EntryCase(record, query, hot, place, window_words, window_place, sink)


def _entries(rng: np.random.Generator, count: int, width: int, record: RecordType) -> np.ndarray:
    numbers = jnp.asarray(rng.standard_normal((count, width)), jnp.float32)
    if record != "fp8":
        return np.asarray(to_words(numbers.astype(record)))
    tiles = (width - 64) // 64
    exponent = rng.integers(127 - 4, 127, (count, tiles)).astype(np.uint8)
    values = numbers[:, :-64] / jnp.repeat(jnp.exp2(exponent.astype(np.float32) - 127), 64, axis=-1)
    scales = np.pad(exponent, ((0, 0), (0, -tiles % 8)))
    parts = values.astype(jnp.float8_e4m3fn), numbers[:, -64:].astype(jnp.bfloat16), jnp.asarray(scales)
    return np.concatenate([np.asarray(to_words(part)) for part in parts], axis=-1)


class GqaCase(NamedTuple):
    """Arguments of `sparse_gqa`, `group` 1."""

    query: jax.Array
    words: np.ndarray
    place: np.ndarray
    visible: np.ndarray
    head_mask: np.ndarray | None
    tokens: int

    def args(self, words: np.ndarray | None = None, place: np.ndarray | None = None) -> tuple[jax.Array | None, ...]:
        words, place = self.words if words is None else words, self.place if place is None else place
        mask = None if self.head_mask is None else jnp.asarray(self.head_mask)
        arrays = (jnp.asarray(x) for x in (words, np.int32(1), place, self.visible))
        return self.query, *arrays, mask

    def want(self) -> tuple[np.ndarray, np.ndarray]:
        requests, kv_heads, heads, channels = self.query.shape
        query = np.asarray(self.query).astype(np.float64)
        out, total = np.zeros(self.query.shape), np.full((requests, kv_heads, heads), -np.inf)
        for r in range(requests):
            known = np.flatnonzero(self.place[r] >= 0)
            if not len(known):
                continue
            kv = from_words(jnp.asarray(self.words[1, self.place[r, known]]), jnp.bfloat16)
            kv = np.asarray(kv).reshape(len(known), self.tokens, 2, kv_heads, channels)
            seen = np.arange(self.tokens) < self.visible[r, known][:, None]
            kv = np.where(seen[..., None, None, None], kv.astype(np.float64), 0)
            for g in range(kv_heads):
                key, value = (kv[:, :, i, g].reshape(-1, channels) for i in (0, 1))
                for h in range(heads):
                    mask = seen if self.head_mask is None else seen & self.head_mask[r, g, h, known][:, None]
                    logits = np.where(mask.reshape(-1), GQA_SCALE * key @ query[r, g, h], -np.inf)
                    if mask.any():
                        weight = np.exp(logits - logits.max())
                        total[r, g, h] = np.log(weight.sum()) + logits.max()
                        out[r, g, h] = weight / weight.sum() @ value
        return out, total


def gqa_case(requests: int, kv_heads: int, heads: int, selected: int, tokens: int, *, masked: bool = False) -> GqaCase:
    """Random pages; tokens past `visible` and pages of no request are NaN, and the last request has no page."""
    rng = np.random.default_rng(0)
    slots = requests * selected + 5
    kv = jnp.asarray(rng.standard_normal((slots, tokens, 2 * kv_heads * 128)), jnp.bfloat16)
    good = np.asarray(to_words(kv))
    place = (1 + rng.permutation(slots - 1)[: requests * selected]).reshape(requests, selected).astype(np.int32)
    visible = np.full((requests, selected), tokens, np.int32)
    visible[:, -1] = rng.integers(1, tokens + 1, requests)
    if requests > 1:
        place[-1] = -1
    if requests > 2:
        place[-2, rng.random(selected) < 0.5] = -1
        visible[-2] = rng.integers(0, tokens + 1, selected)
    words = np.full((GROUPS, slots, *good.shape[1:]), NAN_WORD, np.uint32)
    for r, k in np.ndindex(requests, selected):
        if place[r, k] >= 0:
            words[1, place[r, k], : visible[r, k]] = good[place[r, k], : visible[r, k]]
    mask = rng.random((requests, kv_heads, heads, selected)) < 0.6 if masked else None
    if mask is not None:
        mask[0, 0, 0] = False
    query = jnp.asarray(rng.standard_normal((requests, kv_heads, heads, 128)), jnp.bfloat16)
    return GqaCase(query, words.reshape(GROUPS, slots, -1), place, visible, mask, tokens)


def agree(got, want) -> None:
    """Output and log-sum-exp within the tolerances above; zeros and -inf exactly where nothing is attended."""
    out, total = (np.asarray(x) for x in got)
    assert out.dtype == total.dtype == np.float32
    np.testing.assert_array_equal(np.isneginf(total), np.isneginf(want[1]))
    some = ~np.isneginf(want[1])
    np.testing.assert_allclose(total[some], want[1][some], rtol=0, atol=SUM_TOLERANCE)
    np.testing.assert_allclose(out, want[0], rtol=0, atol=OUT_TOLERANCE)
    assert not out[~some].any()


def moved(words: np.ndarray, place: np.ndarray, extra: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The same rows elsewhere: permuted, among `extra` more slots of NaN."""
    slots = words.shape[1]
    to = np.random.default_rng(seed).permutation(slots + extra)[:slots]
    out = np.full((GROUPS, slots + extra, words.shape[2]), NAN_WORD, np.uint32)
    out[:, to] = words
    return out, np.where(place >= 0, to[np.maximum(place, 0)], -1).astype(np.int32)
