# SPDX-License-Identifier: Apache-2.0
"""Rules of replacement as data, and what each costs on a recorded trace of selections.

A rule is an `Order`: the function that resolve itself takes (`pallas_kernels.resolve.reference`), so that what is
simulated here is what a decode step does.
"""

from hisparse_jax.policies.belady import belady_misses
from hisparse_jax.policies.simulate import replay
from pallas_kernels.resolve.reference import ORDERS, Order, fifo, hit_first_lru, plain_lru

__all__ = ["ORDERS", "Order", "belady_misses", "fifo", "hit_first_lru", "plain_lru", "replay"]
