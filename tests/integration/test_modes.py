# SPDX-License-Identifier: Apache-2.0
"""The decode chunk with every mode's program: the same bits, in place, compiled once."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hisparse_jax import simulated
from hisparse_jax.cache.layout import Layout
from hisparse_jax.cache.state import create
from hisparse_jax.decode import compile_decode, place
from hisparse_jax.synthetic import compile_admission, random_index, state_of
from hisparse_jax.workload import FITTED
from models.dsa import DsaDecoder, DsaOptions
from models.functional import Functional
from models.sizes import PUBLISHED
from tests.pallas_kernels.kernel_cases import ON_GPU

# Two groups of four layers. Widths are those that the kernels take; the rest is small.
WIDE = replace(
    PUBLISHED["GLM-5.2"], vocab=512, hidden=256, heads=16, query_latent=128, nope=32, value=32, index_heads=8,
    selected=128, mlp_width=256, expert_width=128, experts=8, experts_used=2, anchors=(True, False, False, False) * 2,
    dense=(True, *(False,) * 7),
)  # fmt: skip
SMALL = replace(WIDE, hidden=64, heads=4, query_latent=32, latent=32, rope=8, nope=16, value=16, index_dim=16)
MODES = {mode: how for mode, how in simulated.MODES.items() if mode != "no_io"}  # whose output is valid
REQUESTS, CONTEXT, STEPS, CHUNKS = 3, 2048, 4, 3


def run(config, mode: str, dtype, parts: int | None = None, workload=FITTED, draws: bool = False):
    """Logits and counters of a few chunks; the compiled chunk; addresses of the state before and after."""
    residency, prefetch = MODES[mode]
    options = DsaOptions("bfloat16", "fp8", prefetch=prefetch, parts=parts, workload=workload)
    module = DsaDecoder(config, options, dtype=dtype, rngs=nnx.Rngs(0))
    model, params = Functional(module), Functional.parameters(module)
    layout = Layout(
        residency=residency, request_slots=REQUESTS, context_tokens=CONTEXT, hot_slots=256, ring_slots=16,
        page_records=64, host_pages=REQUESTS * CONTEXT // 64, **model.records(CONTEXT)._asdict(),
    )  # fmt: skip
    cache = create(layout, random_index(model.new_index(layout)))
    admit = compile_admission(cache)
    for slot in range(REQUESTS):
        cache = admit(cache, np.int32(slot), np.int32(CONTEXT - 64 - 5 * slot))
    state = place(state_of(layout, cache, config.vocab, STEPS * CHUNKS))
    decode = compile_decode(model, state, steps=STEPS, keep_logits=True, draws=draws)
    compiled = decode.lower(params, state).compile()
    outs, addresses = [], []
    for _ in range(CHUNKS):
        addresses.append([leaf.unsafe_buffer_pointer() for leaf in (*state.cache.hot_rows, state.cache.pool)])
        state, out = decode(params, state)
        outs.append(jax.tree.map(np.asarray, out))
    assert decode._cache_size() == 1, "lengths grow without compiling again"
    return np.concatenate([out.logits for out in outs]), outs, compiled, addresses, params, state


def check_modes(config, dtype, workload) -> None:
    """The same bits in full residency, with fetches just before their attention, ahead of it, in parts, with draws."""
    want, *_ = run(config, "full", dtype, workload=workload)
    for mode, parts, draws in (
        ("sync", 1, False), ("prefetch", 1, False), ("sync", 2, False), ("prefetch", 3, False), ("prefetch", 1, True),
    ):  # fmt: skip
        got, outs, *_ = run(config, mode, dtype, parts, workload, draws)
        assert got.tobytes() == want.tobytes(), (mode, parts, draws)
        counters = np.concatenate([out.counters for out in outs])
        assert (counters[0, ..., 2] > 64).all(), "the first step finds nothing but what is in the ring"
        assert (counters[1:, ..., 2].sum(axis=(0, 2)) > 0).all(), "every table missed later too"


@pytest.mark.parametrize("workload", [FITTED, None])
def test_modes_on_any_device(workload):
    check_modes(SMALL, jnp.float32, workload)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("workload", [FITTED, None])
def test_modes_with_the_kernels(workload):
    check_modes(WIDE, jnp.bfloat16, workload)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("mode", MODES)
def test_the_chunk_is_in_place(mode):
    """Hot rows and pool keep their buffers; nothing of the size of one layer's rows or weights is allocated."""
    _, _, compiled, addresses, params, state = run(WIDE, mode, jnp.bfloat16)
    assert all(now == addresses[0] for now in addresses)
    memory, rows = compiled.memory_analysis(), state.cache.hot_rows[0]
    largest_weight = max(leaf.nbytes for leaf in params)
    assert memory.host_temp_size_in_bytes == 0
    assert memory.temp_size_in_bytes < rows.nbytes // rows.shape[0] + largest_weight
    text = compiled.as_text()
    assert '_xla_compute_type="host"' not in text, "no work for the host inside a chunk"
    assert " conditional(" not in text, "nor anything that it decides"
