# SPDX-License-Identifier: Apache-2.0
"""Flax NNX models whose decode attention reads a HiSparse cache."""
