# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: files as named tensors, and name maps that turn them into a module's parameters."""
