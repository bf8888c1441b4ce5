# SPDX-License-Identifier: Apache-2.0
"""Hierarchical sparse-attention decoding for JAX.

The complete history lies in pinned host memory, a small fixed set of hot records of each request on the device, and
misses come in inside the jitted step::

    config -> experiment -> engine (admit, prefill, decode chunks) -> decode loop (jit)
      per step, per layer:  project -> append -> index scores -> selection -> resolve (fetch) -> attention over slots
      end of step:          backup of the new rows to the host pool; counters
"""

from hisparse_jax.cache.admission import admit, release
from hisparse_jax.cache.append import append
from hisparse_jax.cache.backup import end_step
from hisparse_jax.cache.layout import Address, Layout
from hisparse_jax.cache.state import Cache, begin_step, create, entering
from hisparse_jax.decode import DecodeState, Model, compile_decode, decode_step
from hisparse_jax.engine.engine import Engine
from hisparse_jax.engine.requests import Completion, Request
from hisparse_jax.resolve import Resolution, fetch, resolve

__all__ = [
    "Address", "Cache", "Completion", "DecodeState", "Engine", "Layout", "Model", "Request", "Resolution",
    "admit", "append", "begin_step", "compile_decode", "create", "decode_step", "end_step", "entering", "fetch",
    "release", "resolve",
]  # fmt: skip
