# SPDX-License-Identifier: Apache-2.0
"""The strict reader of configs: everything wrong is named by its dotted path."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from hisparse_jax import config as configs
from hisparse_jax.errors import UserError

MINIMAL = """
name: small
model: {path: model.gguf}
prompt: {text: hello}
"""


def test_defaults_and_types() -> None:
    config = configs.parse(MINIMAL, "test")
    assert config.decode.residencies == ("full", "hisparse")
    assert isinstance(config.selection, configs.QuestSelection)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.name = "other"


def test_yaml_1_2_words_and_numbers() -> None:
    assert configs.parse(MINIMAL + "decode: {prefetch: off}", "test").decode.prefetch == "off"


def test_overrides() -> None:
    config = configs.parse(
        MINIMAL, "test", ["cache.hot_slots=196", "decode.residencies=[no_io]", "model.dtype=bfloat16"]
    )
    assert (config.cache.hot_slots, config.decode.residencies, config.model.dtype) == (196, ("no_io",), "bfloat16")
    assert configs.parse(MINIMAL, "test", ["selection={kind: dsa}"]).selection == configs.DsaSelection()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("cache.hot_slot=3", "cache.hot_slot: unknown key, did you mean 'hot_slots'?"),
        ("selection.budget=3", "selection.kind: expected quest or dsa, got None"),
        ("selection={kind: quest, budgetpages: 3}", "selection.budgetpages: unknown key, did you mean 'budget_pages'?"),
        ("selection={kind: dsa, budget_pages: 3}", "selection.budget_pages: unknown key; known: kind"),
        ("nam=x", "nam: unknown key, did you mean 'name'?"),
        ("cache.hot_slots=many", "cache.hot_slots: input should be a valid integer, got 'many'"),
        ("cache.hot_slots=4.5", "cache.hot_slots: "),
        ("decode.stop=1", "decode.stop: input should be a valid boolean, got 1"),
        ("decode.steps=0", "decode.steps: input should be greater than or equal to 1, got 0"),
        ("model.dtype=int8", "model.dtype: input should be 'float32' or 'bfloat16', got 'int8'"),
        ("decode.residencies=[full, fast]", "decode.residencies.1: input should be 'full', 'hisparse' or 'no_io'"),
        ("decode.residencies=[]", "decode.residencies: name at least one"),
        ("cache=3", "cache: "),
        ("name=a/b", "name: "),
        ("cache.hot_slots=40000", "cache.hot_slots: must be at most 32767"),
        ("cache.hot_slots=127", "cache.hot_slots: must be at least selection.budget_pages (128), got 127"),
        ("cache.ring_slots=1", "cache.ring_slots: must be at least selection.recent_pages (2), got 1"),
        ("selection={kind: quest, budget_pages: 2}", "must be more than selection.recent_pages (2), got 2"),
        ("model.package=x", "model: give either path or package"),
        ("prompt.text=' '", "prompt.text: empty"),
        ("prompt.source=file", "prompt.file: missing"),
        ("hot_slots", "--set takes dotted.key=value, got 'hot_slots'"),
        ("name.x=1", "--set name.x: name is not a section"),
    ],
)
def test_what_is_wrong_is_named(override: str, says: str) -> None:
    with pytest.raises(UserError) as error:
        configs.parse(MINIMAL, "test", [override])
    assert says in str(error.value)


SYNTHETIC = """
name: timed
model: {published: GLM-5.2, dtype: bfloat16, records: plain, index_keys: fp8}
selection: {kind: dsa}
cache: {hot_slots: 4096, ring_slots: 64, page_records: 64}
decode: {steps: 8, prefill_chunk: 512, implementation: auto, fetch_programs: 2}
expect: {bitwise: true}
runs: here
synthetic: {contexts: [32768]}
"""


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("cache.request_slots=1", "got 1; give synthetic.concurrency"),  # the default, but given
        ("cache.context_tokens=4096", "got 4096; give synthetic.contexts, or --context-tokens to plan"),
        ("cache.host_pages=7", "got 7; take it out, the host pool holds the largest synthetic.concurrency"),
        ("prompt.source=random", "got 'random'; take it out, nothing is asked"),
        ("prompt.text=''", "got ''; take it out"),
        ("prompt.file=a.txt", "got 'a.txt'; take it out"),
        ("prompt.tokens=9", "got 9; take it out"),
        ("prompt.seed=0", "got 0; take it out"),
        ("prompt.question=why", "got 'why'; take it out"),
        ("prompt.chat=false", "got False; take it out"),
        ("decode.residencies=[full]", "got ['full']; give synthetic.modes"),
        ("decode.max_new_tokens=64", "got 64; give synthetic.steps"),
        ("decode.stop=false", "got False; take it out, no request stops"),
        ("decode.prefetch=off", "got 'off'; give synthetic.modes"),
        ("expect.misses=false", "got False; take it out, misses are recorded"),
        ("model.file=a.gguf", "got 'a.gguf'; take it out"),
        ("model.sha256=abc", "got 'abc'; take it out"),
    ],
)
def test_what_a_synthetic_section_leaves_idle_is_refused(override: str, says: str) -> None:
    with pytest.raises(UserError) as error:
        configs.parse(SYNTHETIC, "test", [override])
    path = override.partition("=")[0]
    assert f"{path}: expected none beside a synthetic section, {says}" in str(error.value)
    overrides = ["synthetic=null", "prompt.text=x", "prompt.file=x", "prompt.tokens=9", override]
    if path != "prompt.text":  # an empty one is refused anyway
        assert configs.parse(SYNTHETIC, "test", overrides).synthetic is None


def test_what_a_synthetic_section_leaves_idle_may_be_null() -> None:
    overrides = ["prompt=null", "cache.context_tokens=null", "cache.host_pages=null", "model.file=null"]
    assert configs.parse(SYNTHETIC, "test", overrides) == configs.parse(SYNTHETIC, "test")


def test_all_idle_settings_are_named_at_once() -> None:
    with pytest.raises(UserError) as error:
        configs.parse(
            SYNTHETIC, "test", ["cache.request_slots=2", "decode.stop=true", "synthetic.cold_concurrency=[7]"]
        )
    for path in ("cache.request_slots: ", "decode.stop: ", "synthetic.cold_concurrency: "):
        assert path in str(error.value)


def test_a_section_left_empty_has_its_defaults() -> None:
    assert configs.parse(MINIMAL + "cache:\n", "test", ["cache.ring_slots=9"]).cache.ring_slots == 9
    assert configs.parse(MINIMAL + "cache:\n", "test").cache == configs.CacheConfig()


def test_all_problems_come_at_once() -> None:
    with pytest.raises(UserError) as error:
        configs.parse("nam: x\ncache: {hot_slots: x}", "here.yaml")
    message = str(error.value)
    assert message.startswith("here.yaml: ")
    for part in ("name: missing", "model: missing", "nam: unknown key", "cache.hot_slots: "):
        assert part in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: a\nname: b\n", 'here, line 2: not valid YAML: found duplicate key "name"'),
        ("name: [\n", "not valid YAML"),
        ("- 1\n", "expected a mapping of sections, got list"),
        ("", "expected a mapping of sections, got NoneType"),
    ],
)
def test_what_is_no_config(text: str, says: str) -> None:
    with pytest.raises(UserError) as error:
        configs.parse(text, "here")
    assert says in str(error.value)


def test_presets_are_found_by_name_and_read(tmp_path: Path) -> None:
    assert "quickstart" in configs.preset_names()
    for name in configs.preset_names():
        assert configs.load(name).name
    with pytest.raises(UserError, match="did you mean 'quickstart'"):
        configs.load("quikstart")
    with pytest.raises(UserError, match=r"missing.yaml: the config can't be read"):
        configs.load(str(tmp_path / "missing.yaml"))
    (tmp_path / "own.yaml").write_text(MINIMAL)
    assert configs.load(str(tmp_path / "own.yaml")).name == "small"


def test_reading_a_config_does_not_import_jax() -> None:
    # The package's own __init__ gives out the public names, which need JAX; the module itself must not.
    code = (
        "import sys, types; package = types.ModuleType('hisparse_jax'); package.__path__ = ['hisparse_jax']; "
        "sys.modules['hisparse_jax'] = package; import hisparse_jax.config as c; c.load('quickstart'); "
        "sys.exit('jax' in sys.modules)"
    )
    root = Path(configs.__file__).parent.parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
