# SPDX-License-Identifier: Apache-2.0
"""Record formats against the published byte layouts."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from hisparse_jax.records import quantise_keys, read_rows, scale_exponent, write_rows
from pallas_kernels.row_format import RowFormat, index_key_bytes

PUBLISHED = RowFormat(512, 64, "fp8")
DATA = Path(__file__).parents[1] / "data" / "fp8_records" / "records.safetensors"


@pytest.fixture(scope="module")
def reference() -> dict[str, np.ndarray]:
    with safe_open(DATA, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys() if not name.startswith("v4")}  # noqa: SIM118


def test_published_sizes():
    assert PUBLISHED.row_bytes == 656
    assert RowFormat(512, 64, "bfloat16").row_bytes == 1152
    assert RowFormat(512, 64, "float32").row_bytes == 2304
    assert [index_key_bytes(128, kind) for kind in ("fp8", "bfloat16", "float32")] == [132, 256, 512]


def test_fp8_rows_are_byte_equal(reference):
    row = jnp.asarray(reference["dsa_input"])
    words = jax.jit(write_rows, static_argnums=2)(row[:, :512], row[:, 512:], PUBLISHED)
    assert np.array_equal(np.asarray(words).view(np.uint8), reference["dsa_bytes"])
    scales = np.asarray(words)[:, 128:132].view(np.float32)
    assert np.array_equal(scales, reference["dsa_scales"])


def test_fp8_rows_read_back_bitwise(reference):
    words = jnp.asarray(np.ascontiguousarray(reference["dsa_bytes"]).view(np.uint32))
    values = np.asarray(jax.jit(read_rows, static_argnums=1)(words, PUBLISHED))
    assert values.dtype == ml_dtypes.bfloat16
    assert np.array_equal(values.view(np.uint16), reference["dsa_output"].view(np.uint16))


def test_fp8_index_keys_are_byte_equal(reference):
    values, scales = jax.jit(quantise_keys)(jnp.asarray(reference["index_rotated"]))
    assert np.array_equal(np.asarray(values).view(np.uint8), reference["index_values"])
    assert np.array_equal(np.asarray(scales), reference["index_scales"])


def test_zero_keys_and_rows_stay_zero():
    values, scale = quantise_keys(jnp.zeros((2, 16)))
    assert not np.asarray(values).view(np.uint8).any()
    assert np.array_equal(np.asarray(scale), np.full(2, 2.0**-22, np.float32))
    words = write_rows(jnp.zeros((1, 512)), jnp.zeros((1, 64)), PUBLISHED)
    assert np.asarray(words).view(np.float32)[0, 128] == 2.0**-13
    assert not np.asarray(read_rows(words, PUBLISHED)).astype(np.float32).any()


@pytest.mark.parametrize("power", [-20, -1, 0, 3, 30])
def test_scale_at_and_beside_powers_of_two(power):
    border = np.float32(448 * 2.0**power)
    values = np.array([border, np.nextafter(border, np.float32(0)), np.nextafter(border, np.float32(np.inf))])
    got = jax.jit(scale_exponent)(jnp.asarray(values, jnp.float32))
    assert np.asarray(got).tolist() == [power, power, power + 1]


@pytest.mark.parametrize("latent,rope", [(32, 8), (512, 64), (256, 2)])
@pytest.mark.parametrize("record", ["float32", "bfloat16", "fp8"])
def test_round_trip(latent, rope, record):
    row, rng = RowFormat(latent, rope, record), np.random.default_rng(0)
    c, kr = rng.normal(size=(5, latent)).astype(np.float32), rng.normal(size=(5, rope)).astype(np.float32)
    words = write_rows(jnp.asarray(c), jnp.asarray(kr), row)
    assert words.shape == (5, row.row_bytes // 4)
    got = np.asarray(read_rows(words, row)).astype(np.float32)
    if record == "float32":
        assert np.array_equal(got, np.concatenate([c, kr], 1))
        return
    stored = np.concatenate([c, kr], 1).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert np.array_equal(got[:, latent:], stored[:, latent:])
    if record == "bfloat16":
        assert np.array_equal(got, stored)
    else:  # 3 bits of mantissa, half a step; the smallest step is 2^-9 of the scale, which is at most 2 max / 448
        bound = np.maximum(np.abs(c) * 2**-4, np.abs(c).max() * 2 / 448 * 2**-10) * (1 + 2**-7)
        assert (np.abs(got[:, :latent] - c) <= bound).all()


def test_row_format_refuses_what_it_cannot_store():
    with pytest.raises(ValueError, match="record must be one of float32, bfloat16, fp8, got 'int4'"):
        RowFormat(512, 64, "int4")
    with pytest.raises(ValueError, match="multiple of 4"):
        RowFormat(30, 8, "fp8")
