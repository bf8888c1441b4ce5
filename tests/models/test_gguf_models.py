# SPDX-License-Identifier: Apache-2.0
"""GGUF files of every supported architecture, made from the tiny Qwen3 reference checkpoint; and damaged ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from hisparse_jax.checkpoint.gguf import GgufFile
from hisparse_jax.errors import UserError
from hisparse_jax.selection import QuestRule
from models.gguf_models import open_gguf, read_config
from tests.gguf_files import HEAD_DIM, HIDDEN, KV_HEADS, LAYERS, write

RULE = QuestRule("shared", 5, 2, page_tokens=8)


def prefill_logits(path: Path, tokens: np.ndarray, dtype: object = jnp.float32) -> np.ndarray:
    opened = open_gguf(GgufFile(path), RULE, dtype)
    params, count = opened.load(), -(-len(tokens) // 32) * 32
    scratch = jnp.zeros((LAYERS, count, 2, KV_HEADS, HEAD_DIM), dtype)
    padded = jnp.asarray(np.pad(tokens, (0, count - len(tokens))))
    hidden, _ = opened.model.prefill(params, padded, jnp.int32(0), scratch)
    return np.asarray(opened.model.logits(params, hidden))[: len(tokens)]


def test_qwen3_matches_its_reference(tmp_path: Path, data: Path) -> None:
    path = write(tmp_path / "qwen3.gguf", data)
    config = read_config(GgufFile(path))
    assert config.qk_norm and config.tied_head and config.rope_pairing == "halves" and not config.qkv_bias
    case = load_file(data / "qwen3/case_mid.safetensors")
    # Two float32 programs of this size differ by about 2e-5; the limit for all references is 2e-4.
    assert np.abs(prefill_logits(path, case["input_ids"]) - case["prefill_logits"]).max() < 2e-4


def test_rotating_neighbours_of_permuted_rows_is_rotating_halves(tmp_path: Path, data: Path) -> None:
    tokens = load_file(data / "qwen3/case_mid.safetensors")["input_ids"]
    llama = prefill_logits(write(tmp_path / "llama.gguf", data, "llama"), tokens)
    qwen2 = prefill_logits(write(tmp_path / "qwen2.gguf", data, "qwen2"), tokens)
    # The same sums in another order over 16 channels.
    assert np.abs(llama - qwen2).max() < 1e-4
    biased = prefill_logits(write(tmp_path / "biased.gguf", data, "qwen2", bias=0.5), tokens)
    assert np.abs(biased - qwen2).max() > 1e-2


def test_tokenizer_kinds(tmp_path: Path, data: Path) -> None:
    tokenizer = open_gguf(GgufFile(write(tmp_path / "a.gguf", data)), RULE).tokenizer
    assert tokenizer is not None
    assert tokenizer.stop_tokens == (191,)
    assert tokenizer.encode("abatoken191") == [94, ord("a") - 33, 191]
    with pytest.raises(UserError, match="no chat template"):
        tokenizer.chat([{"role": "user", "content": "x"}])
    with pytest.raises(UserError, match="pre-tokenizer 'other' is not supported; supported: gpt-2"):
        open_gguf(GgufFile(write(tmp_path / "b.gguf", data, pre="other")), RULE)


def damaged(change: Callable[[bytes], bytes]) -> Callable[[Path, Path], Path]:
    def make(tmp_path: Path, data: Path) -> Path:
        path = write(tmp_path / "model.gguf", data)
        path.write_bytes(change(path.read_bytes()))
        return path

    return make


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda tmp_path, data: tmp_path / "none.gguf", "can't be read: No such file"),
        (lambda tmp_path, data: tmp_path, "can't be read: Is a directory"),
        (damaged(lambda content: b"ZIP!" + content[4:]), "not a GGUF file"),
        (damaged(lambda content: content[: len(content) // 2]), "truncated or damaged"),
        (damaged(lambda content: content[:100]), "truncated or damaged"),
        (damaged(lambda content: content[:6]), "truncated or damaged"),
        (lambda tmp_path, data: write(tmp_path / "x.gguf", data, "gemma3"), "model type 'gemma3' is not supported"),
        (lambda tmp_path, data: write(tmp_path / "x.gguf", data, scaled=True), "rope scaling is not supported"),
    ],
)
def test_files_that_cannot_be_read(make: Callable[[Path, Path], Path], says: str, tmp_path: Path, data: Path) -> None:
    with pytest.raises(UserError, match=says):
        read_config(GgufFile(make(tmp_path, data)))


def test_tensors_that_do_not_fit_come_in_one_error(tmp_path: Path, data: Path) -> None:
    wrong = {"blk.1.ffn_up.weight": None, "blk.2.attn_q.weight": np.zeros((3, HIDDEN), np.float32)}
    path = write(tmp_path / "model.gguf", data, **wrong)
    with pytest.raises(UserError) as error:
        open_gguf(GgufFile(path), RULE).load()
    message = str(error.value)
    assert "1 missing: blk.1.ffn_up.weight" in message
    assert "1 misshapen: blk.2.attn_q.weight (expected [128, 64], got [3, 64])" in message


def test_tensors_of_wrong_type_are_said_before_anything_is_read(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "model.gguf", data, **{"blk.1.ffn_up.weight": np.zeros((128, HIDDEN), np.int64)})
    monkeypatch.setattr(GgufFile, "read", lambda self, name: pytest.fail("nothing may be read"))
    with pytest.raises(UserError, match=r"1 of wrong type: blk\.1\.ffn_up\.weight \(expected a float .*, got I64\)"):
        open_gguf(GgufFile(path), RULE).load()
