# SPDX-License-Identifier: Apache-2.0
"""The cache of records: layout, state, memory kinds, host pages, append, admission and backup."""
