# SPDX-License-Identifier: Apache-2.0
"""A Flax model of your own that calls the sparse layer with a cache: no engine, no config, no checkpoint."""

import jax
import jax.numpy as jnp
from flax import nnx

from hisparse_jax import Address, Layout, begin_step, create, end_step, entering
from hisparse_jax.selection import QuestRule, quest_index
from models.config import GqaConfig
from models.gqa import QuestAttention

SHAPE = GqaConfig(
    vocab=256, hidden=64, layers=2, query_heads=4, kv_heads=2, head_dim=16, mlp_width=128, rope_theta=1e4,
    rope_pairing="halves", norm_eps=1e-6, max_tokens=4096,
)  # fmt: skip
RULE = QuestRule("shared", budget_pages=4, recent_pages=1, page_tokens=8)


class Mine(nnx.Module):
    """Two sparse attention layers in a model of any other kind."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(SHAPE.vocab, SHAPE.hidden, rngs=rngs)
        self.attention = nnx.List([QuestAttention(SHAPE, RULE, dtype=jnp.float32, rngs=rngs) for _ in range(2)])
        self.mix = nnx.Linear(SHAPE.hidden, SHAPE.hidden, rngs=rngs)

    def __call__(self, token, cache):
        x = self.embed(token)
        for number, attention in enumerate(self.attention):
            out, cache, _ = attention.decode(x, cache, Address(space=number, table=number, position=0, group=number))
            x = x + jax.nn.gelu(self.mix(x + out))
        return x @ self.embed.embedding[...].T, cache


def generate(residency: str, steps: int = 400) -> jax.Array:
    layout = Layout(
        residency=residency, request_slots=1, context_tokens=steps, record_tokens=8, row_bytes=8 * SHAPE.token_bytes(4),
        group_sizes=(1, 1), selected=4, hot_slots=6, ring_slots=1, page_records=8, host_pages=-(-steps // 64),
    )  # fmt: skip
    cache = create(layout, quest_index(layout, 2, SHAPE.kv_heads, SHAPE.head_dim, jnp.float32))
    if residency == "hisparse":
        cache = cache.replace(page_table=jnp.arange(layout.host_pages, dtype=jnp.int32)[None])
    graph, state = nnx.split(Mine(nnx.Rngs(0)))

    def step(carry, _):
        token, cache = carry
        logits, cache = nnx.merge(graph, state)(token, begin_step(cache, jnp.array([True])))
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return (token, end_step(cache)), (token[0], jnp.sum(cache.counters[:, 0, 2]))

    def loop(cache):
        return jax.lax.scan(step, (jnp.zeros(1, jnp.int32), entering(cache)), length=steps)[1]

    return jax.jit(loop)(cache)


if __name__ == "__main__":
    (tokens, _), (hot_tokens, misses) = generate("full"), generate("hisparse")
    print(f"same tokens: {bool((tokens == hot_tokens).all())}, records fetched from the host: {int(misses.sum())}")
