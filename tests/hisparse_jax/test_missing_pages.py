# SPDX-License-Identifier: Apache-2.0
"""A request without a host page writes nowhere: not into the page before its space."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from hisparse_jax.cache.admission import admit
from hisparse_jax.cache.append import append
from hisparse_jax.cache.backup import end_step
from hisparse_jax.cache.layout import Layout
from hisparse_jax.cache.state import begin_step, create, entering

LAYOUT = Layout("hisparse", 2, 16, 1, 8, (1, 1), 2, 3, 1, page_records=4, host_pages=8)


def test_backup_of_a_request_without_a_page() -> None:
    @jax.jit
    def step(cache):
        cache = begin_step(entering(cache), jnp.array([True, False]))
        for address in LAYOUT.addresses():
            cache = append(cache, address, jnp.full((2, 2), 7, jnp.uint32))
        return end_step(cache, "xla")

    assert not np.asarray(step(create(LAYOUT)).pool).any()


def test_admission_of_a_request_without_pages() -> None:
    rows = jnp.full((LAYOUT.records, LAYOUT.words), 7, jnp.uint32)
    pages = jnp.array([2, -1, -1, -1], jnp.int32)

    @jax.jit
    def one(cache):
        return admit(entering(cache), jnp.int32(1), pages, jnp.int32(10), lambda space: rows, (), "xla")

    pool = np.asarray(one(create(LAYOUT)).pool).reshape(2, 8, 4, 2)
    assert (pool[:, 2] == 7).all()
    assert not np.delete(pool, 2, axis=1).any()
