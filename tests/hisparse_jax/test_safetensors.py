# SPDX-License-Identifier: Apache-2.0
"""Safetensors checkpoints: types, shards, FP8 tiles, and what is wrong with them said in one line."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hisparse_jax.checkpoint.load import Entry, load_parameters
from hisparse_jax.checkpoint.safetensors import SafetensorsFolder, read_file, read_json
from hisparse_jax.errors import UserError
from hisparse_jax.selection import QuestRule
from models.registry import open_folder

FP8 = ml_dtypes.float8_e4m3fn
GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"


def write(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file with any type, FP8 included, which the library's NumPy front end refuses."""
    names = {np.dtype(FP8): "F8_E4M3", np.dtype(ml_dtypes.bfloat16): "BF16", np.dtype(np.float32): "F32",
             np.dtype(np.float16): "F16", np.dtype(np.float64): "F64", np.dtype(np.int64): "I64"}  # fmt: skip
    header, start = {}, 0
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    body = b"".join(np.ascontiguousarray(tensor).tobytes() for tensor in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


@pytest.fixture
def checkpoint(data, tmp_path) -> Path:
    """A copy of a small GLM-5 checkpoint, to be spoilt."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(data / "glm5" / name, tmp_path / name)
    return tmp_path


def change(folder: Path, **changes) -> None:
    """Rewrites the checkpoint with some tensors changed, or removed where the change is None."""
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    write(folder / "model.safetensors", {name: tensor for name, tensor in tensors.items() if tensor is not None})


def test_types_are_read_as_they_are(tmp_path):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(3, 4)).astype(np.float32)
    tensors = {kind: values.astype(kind) for kind in ("float32", "float16", "float64")}
    tensors["bfloat16"] = values.astype(ml_dtypes.bfloat16)
    write(tmp_path / "model.safetensors", tensors)
    source = SafetensorsFolder(tmp_path)
    assert source.shapes() == dict.fromkeys(tensors, (3, 4))
    for name, tensor in tensors.items():
        got = source.read(name)
        assert got.dtype == tensor.dtype and got.tobytes() == tensor.tobytes()
        assert isinstance(got.base, np.memmap) or isinstance(got, np.memmap)


@pytest.mark.parametrize("shape", [(300, 200), (128, 128), (1, 257)])
def test_fp8_tiles(tmp_path, shape):
    rng = np.random.default_rng(1)
    weight = rng.normal(size=shape).astype(FP8)
    scale = rng.uniform(0.01, 2, size=[-(-n // 128) for n in shape]).astype(np.float32)
    write(tmp_path / "model.safetensors", {"w.weight": weight, "w.weight_scale_inv": scale})
    source = SafetensorsFolder(tmp_path)
    assert dict(source.shapes()) == {"w.weight": shape}
    want = np.empty(shape, np.float32)
    for row in range(shape[0]):
        for column in range(shape[1]):
            want[row, column] = np.float32(weight[row, column]) * scale[row // 128, column // 128]
    assert np.array_equal(source.read("w.weight"), want)


def test_shards_and_one_file_give_the_same_parameters(data, tmp_path):
    tensors = load_file(data / "qwen3" / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, some in parts.items():
        save_file({name: tensors[name] for name in some}, tmp_path / file)
    weight_map = {name: file for file, some in parts.items() for name in some}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    shutil.copy(data / "qwen3" / "config.json", tmp_path)
    rule = QuestRule("shared", 5, 2, 8)
    one, two = (open_folder(folder, rule=rule).load() for folder in (data / "qwen3", tmp_path))
    assert len(one) == len(two) > 5
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


def test_an_fp8_checkpoint_loads_as_what_it_stands_for(checkpoint):
    tensors = load_file(checkpoint / "model.safetensors")
    quantised, plain = {}, {}
    for name, tensor in tensors.items():
        if "experts" in name or "q_b_proj" in name:
            scale = np.full([-(-n // 128) for n in tensor.shape], 0.25, np.float32)
            quantised |= {name: (tensor * 4).astype(FP8), name + "_scale_inv": scale}
            plain[name] = quantised[name].astype(np.float32) * 0.25
        else:
            quantised[name] = plain[name] = tensor
    write(checkpoint / "model.safetensors", plain)
    want = open_folder(checkpoint).load()
    write(checkpoint / "model.safetensors", quantised)
    seen = []
    got = open_folder(checkpoint).load(lambda done, total: seen.append((done, total)))
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
    assert seen == [(number + 1, len(seen)) for number in range(len(seen))]


def test_parameters_are_streamed():
    """A load takes the parameters (on the CPU they stay where they were read) and little more: 1 MiB each of 24."""
    layers, experts, shape = 24, 2, (256, 512)

    class Big:
        name = "big"

        def shapes(self) -> dict[str, tuple[int, ...]]:
            return {f"{layer}.{expert}": shape for layer in range(layers) for expert in range(experts)}

        def unreadable(self) -> dict[str, str]:
            return {}

        def read(self, name: str) -> np.ndarray:
            layer, expert = name.split(".")
            return np.full(shape, 10 * int(layer) + int(expert), np.float32)

    entries = [Entry(f"w{n:02}", f"{n}.{{expert}}", transpose=True, experts=experts) for n in range(layers)]
    state = {entry.path: jax.ShapeDtypeStruct((experts, 512, 256), np.float32) for entry in entries}
    load_parameters(Big(), entries, state)  # imports
    tracemalloc.start()
    got = load_parameters(Big(), entries, state)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < sum(leaf.nbytes for leaf in got) + 3 * 2**20
    for layer, leaf in enumerate(got):
        want = 10 * layer + np.arange(experts)
        assert np.array_equal(np.asarray(leaf).min((1, 2)), want) and np.array_equal(np.asarray(leaf).max((1, 2)), want)


def test_layers_of_multi_token_prediction_are_skipped(checkpoint):
    extra = {"model.layers.4.eh_proj.weight": np.zeros((2, 2), np.float32)}
    change(checkpoint, **extra)
    opened = open_folder(checkpoint)
    assert len(opened.load()) > 10
    assert opened.note == "1 tensors of multi-token prediction (layer 4 and above) are skipped"
    change(checkpoint, **{"model.layers.44.x": np.zeros(2, np.float32), "model.layers.3.x": np.zeros(2, np.float32)})
    with pytest.raises(UserError, match=r"1 unexpected: model\.layers\.3\.x$"):
        open_folder(checkpoint).load()


def test_everything_wrong_with_tensors_is_one_error(checkpoint):
    change(checkpoint, **{GATE: None, "lm_head.weight": None, "model.norm.weight": np.zeros(3, np.float32),
                          "model.extra": np.zeros(1, np.float32)})  # fmt: skip
    with pytest.raises(UserError) as error:
        open_folder(checkpoint).load()
    message = str(error.value)
    assert "2 missing: " in message and GATE in message and "lm_head.weight" in message
    assert "1 unexpected: model.extra" in message
    assert "1 misshapen: model.norm.weight (expected [64], got [3])" in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.kv_b_proj.weight", GATE])
def test_a_misshapen_weight(checkpoint, name):
    change(checkpoint, **{name: np.zeros((5, 7), np.float32)})
    with pytest.raises(UserError, match=rf"{name} \(expected \[\d+, \d+\], got \[5, 7\]\)"):
        open_folder(checkpoint).load()


def test_weights_of_wrong_type_are_said_before_anything_is_read(checkpoint, monkeypatch):
    tensors = load_file(checkpoint / "model.safetensors")
    wrong = [GATE, "model.norm.weight"]
    change(checkpoint, **{name: np.zeros(tensors[name].shape, np.int64) for name in wrong},
           **{"lm_head.weight": None, "model.layers.44.x": np.zeros(2, np.int64)})  # fmt: skip
    monkeypatch.setattr(SafetensorsFolder, "read", lambda self, name: pytest.fail("nothing may be read"))
    with pytest.raises(UserError) as error:
        open_folder(checkpoint).load()
    message = str(error.value)
    assert "1 missing: lm_head.weight" in message and "2 of wrong type: " in message
    for name in wrong:
        assert f"{name} (expected F64, F32, F16, BF16, F8_E4M3, got I64)" in message


def test_scales_of_wrong_type(checkpoint):
    gate = load_file(checkpoint / "model.safetensors")[GATE]
    change(checkpoint, **{GATE: gate.astype(FP8), GATE + "_scale_inv": np.ones((1, 1), np.int64)})
    with pytest.raises(UserError, match=rf"1 of wrong type: {GATE} \(expected .*, got I64 scales\)"):
        open_folder(checkpoint).load()


@pytest.mark.parametrize("extra", [6, 50, 61])
def test_many_wrong_tensors_are_listed(checkpoint, extra):
    change(checkpoint, **{f"extra.{number}": np.zeros(1, np.float32) for number in range(extra)})
    with pytest.raises(UserError) as error:
        open_folder(checkpoint).load()
    message = str(error.value)
    assert f"{extra} unexpected: extra.0" in message and message.count("extra.") == min(extra, 50)
    assert message.endswith(" and 11 more" if extra == 61 else f"extra.{extra - 1}")


def test_fp8_without_scales_and_with_wrong_ones(tmp_path):
    weight = np.zeros((130, 4), FP8)
    write(tmp_path / "model.safetensors", {"w": weight})
    with pytest.raises(UserError, match="FP8 tensor w has no w_scale_inv"):
        SafetensorsFolder(tmp_path)
    write(tmp_path / "model.safetensors", {"w": weight, "w_scale_inv": np.zeros((1, 1), np.float32)})
    with pytest.raises(UserError, match=r"w_scale_inv must have shape \[2, 1\].*got \[1, 1\]"):
        SafetensorsFolder(tmp_path)


def test_truncated_files(checkpoint):
    file = checkpoint / "model.safetensors"
    whole = file.read_bytes()
    for size, message in ((len(whole) - 1, "truncated: the header describes"), (100, "truncated, or not a"),
                          (3, "truncated, or not a"), (0, "truncated, or not a")):  # fmt: skip
        file.write_bytes(whole[:size])
        with pytest.raises(UserError, match=message):
            open_folder(checkpoint)
    file.write_bytes(whole + b"x")
    with pytest.raises(UserError, match="longer than its header says"):
        open_folder(checkpoint)


@pytest.mark.parametrize(
    "header,message",
    [
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "has 8 bytes, its data_offsets span 4"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "w does not start where the one before it"),
        ({"w": {"dtype": "F32", "shape": [1]}}, "w must have dtype, shape and data_offsets"),
        ({"w": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}, "header is inconsistent"),
        ([1], "not a mapping of tensors"),
    ],
)
def test_headers_that_contradict_themselves(tmp_path, header, message):
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(UserError, match=message):
        SafetensorsFolder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"{x}}")
    with pytest.raises(UserError, match="the header is not JSON"):
        SafetensorsFolder(tmp_path)


def test_folders_that_are_no_checkpoints(data, tmp_path):
    with pytest.raises(UserError, match=r"config\.json: no such file"):
        open_folder(tmp_path)
    shutil.copy(data / "glm5" / "config.json", tmp_path)
    with pytest.raises(UserError, match=r"no checkpoint: expected model\.safetensors or"):
        open_folder(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    write(tmp_path / "one.safetensors", {"a": np.zeros(1, np.float32)})
    with pytest.raises(UserError, match=r"names files that are not there: two\.safetensors"):
        open_folder(tmp_path)
    write(tmp_path / "two.safetensors", {"c": np.zeros(1, np.float32)})
    with pytest.raises(UserError, match=r"it says that b is in two\.safetensors, which is not so"):
        open_folder(tmp_path)
    index.write_text("{")
    with pytest.raises(UserError, match="not readable as JSON"):
        open_folder(tmp_path)


def test_unsupported_models_are_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v4"}))
    with pytest.raises(
        UserError, match=r"model type 'deepseek_v4' is not supported yet; supported: deepseek_v32, glm_"
    ):
        open_folder(tmp_path)


def test_files_of_any_type(data):
    case = read_file(data / "glm5" / "case_short.safetensors")
    want = load_file(data / "glm5" / "case_short.safetensors")
    assert case.keys() == want.keys()
    assert all(np.array_equal(case[name], want[name]) and case[name].dtype == want[name].dtype for name in want)
    with pytest.raises(UserError, match="can't be read"):
        read_file(data / "glm5" / "nothing.safetensors")
    assert read_json(data / "glm5" / "info.json")["family"] == "glm5"
