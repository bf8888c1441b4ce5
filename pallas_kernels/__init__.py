# SPDX-License-Identifier: Apache-2.0
"""Array-level operations of hierarchical sparse-attention decoding.

One folder per operation. Each holds the definition in `jax.numpy` (`reference.py`, which is also the portable
implementation for any backend) and an `__init__.py` with the array API that checks its arguments and dispatches.
This package depends on JAX alone and knows nothing of models, requests or configs.
"""
