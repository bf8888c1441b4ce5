# SPDX-License-Identifier: Apache-2.0
"""What prefill stores against the reference's caches. For logits and selections see test_verify.py."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from hisparse_jax.cache.layout import Layout
from models.registry import open_folder

TOLERANCE = 2e-5  # float32 through at most 11 layers


def deinterleaved(x: np.ndarray) -> np.ndarray:
    """Pairs of channels as the reference stores them: all first members, then all second ones."""
    return np.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)


@pytest.mark.parametrize("family", ["deepseek_v32", "glm5", "glm52_indexshare"])
def test_caches_after_a_prompt(family, data):
    case = load_file(data / family / "case_mid.safetensors")
    opened = open_folder(data / family)
    config, model, params = opened.config, opened.model, opened.load()
    prompt = case["input_ids"]
    sizes = Layout(residency="full", request_slots=1, context_tokens=64, hot_slots=16, ring_slots=1, page_records=8,
                   host_pages=8, **model.records(64)._asdict())  # fmt: skip
    scratch = model.new_scratch(sizes, 64)
    tokens = jnp.asarray(np.pad(prompt, (0, 64 - len(prompt))))
    _, scratch = jax.jit(model.prefill)(params, tokens, jnp.int32(0), scratch)

    for layer in range(config.layers):
        row = np.asarray(model.rows(scratch, layer, sizes)).view(np.float32)[: len(prompt)]
        latent, rope = row[:, : config.latent], row[:, config.latent :]
        np.testing.assert_allclose(latent, case[f"cache.layer{layer}.latent"], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(deinterleaved(rope), case[f"cache.layer{layer}.k_rope"], rtol=0, atol=TOLERANCE)

    keys = np.asarray(model.index_of(scratch, jnp.int32(len(prompt)), sizes).keys)[:, : len(prompt)]
    anchors = [layer for layer, anchor in enumerate(config.anchors) if anchor]
    assert {name for name in case if "index_keys" in name} == {f"cache.layer{layer}.index_keys" for layer in anchors}
    assert len(keys) == len(anchors)
    for key, layer in zip(keys, anchors, strict=True):
        if config.index_pairing == "pairs":
            key = np.concatenate([deinterleaved(key[:, : config.rope]), key[:, config.rope :]], axis=-1)
        np.testing.assert_allclose(key, case[f"cache.layer{layer}.index_keys"], rtol=0, atol=TOLERANCE)
