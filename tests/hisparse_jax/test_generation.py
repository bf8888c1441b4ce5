# SPDX-License-Identifier: Apache-2.0
"""Text generation: streams of text, stop strings, checkpoints by path, the command."""

from __future__ import annotations

import io
import json
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from hisparse_jax.assembly import make_layout, open_model
from hisparse_jax.config import parse
from hisparse_jax.engine.requests import Request
from hisparse_jax.errors import UserError
from hisparse_jax.generation import TextStream, _display, checkpoint_path, generate
from hisparse_jax.sampling import SamplingParams
from hisparse_jax.tokenizer import from_folder
from tests.gguf_files import write
from tests.hisparse_jax.test_cli import hisparse

PIECES = ["he", "llo", " wor", "ld", "\n", "St", "op", "\ufffd", "S", "t"]


class Pieces:
    """Decodes token i as PIECES[i]; token 7 is the first half of a character that token 8 completes."""

    def decode(self, tokens: list[int]) -> str:
        text = "".join(PIECES[token] for token in tokens)
        return text.replace("\ufffdS", "é")


def fed(tokens: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], bool, str]:
    stream, out = TextStream(Pieces(), stop), []
    for token in tokens:
        text, stops = stream.feed(token)
        out.append(text)
        if stops:
            return out, True, stream.text
    out.append(stream.finish())
    return out, False, stream.text


def test_text_comes_as_it_is_settled() -> None:
    assert fed([0, 1, 2, 3]) == (["he", "llo", " wor", "ld", ""], False, "hello world")


def test_half_a_character_waits_for_the_other_half() -> None:
    assert fed([0, 7, 8, 1]) == (["he", "", "é", "llo", ""], False, "heéllo")


def test_a_stop_string_across_tokens_never_shows() -> None:
    assert fed([0, 1, 5, 6, 2], ("Stop",)) == (["he", "llo", "", ""], True, "hello")
    assert fed([0, 1, 2], ("llo wo",)) == (["he", "", ""], True, "he")
    assert fed([0, 1], ("hello", "lo")) == (["", ""], True, "")


def test_what_only_began_like_a_stop_string_shows_in_the_end() -> None:
    assert fed([0, 5, 1], ("Stop",)) == (["he", "", "Stllo", ""], False, "heStllo")
    assert fed([0, 5], ("Stop",)) == (["he", "", "St"], False, "heSt")


CONFIG = """
name: tiny
model: {{path: {path}}}
selection: {{kind: quest, page_tokens: 8, budget_pages: 5, recent_pages: 2}}
cache: {{hot_slots: 6, ring_slots: 2, page_records: 4, request_slots: 2}}
prompt: {{source: random, tokens: 1}}
decode: {{residencies: [{residency}], steps: 4, prefill_chunk: 32}}
"""


def tiny(path: Path, residency: str) -> tuple:
    config = parse(CONFIG.format(path=path, residency=residency), "test")
    return open_model(config), config


def test_several_prompts_at_once_are_the_same_as_one_by_one_in_every_residency(tmp_path: Path, data: Path) -> None:
    path = write(tmp_path / "model.gguf", data)
    rng = np.random.default_rng(0)
    requests = [
        Request(tuple(rng.integers(0, 180, length).tolist()), 12, SamplingParams(temperature=0.8, seed=length))
        for length in (90, 7, 61)
    ]
    seen: dict[int, str] = {}
    together = {}
    calls: list[int] = []
    for residency in ("full", "hisparse"):
        seen.clear()
        calls.clear()
        opened, config = tiny(path, residency)
        together[residency], engine = generate(
            opened, requests, config,
            on_text=lambda number, text: (calls.append(number), seen.update({number: seen.get(number, "") + text}))[1],
        )  # fmt: skip
        assert min(calls.count(number) for number in range(3)) > 3  # as it comes, not at the end
        assert [seen.get(number, "") for number in range(3)] == [one.text for one in together[residency]]
    assert engine.metrics.misses_by_table().sum() > 0
    assert together["full"] == together["hisparse"]
    for number, request in enumerate(requests):
        [alone], _ = generate(opened, [request], config)
        assert alone == together["full"][number]


def test_stop_strings_end_a_request(tmp_path: Path, data: Path) -> None:
    opened, config = tiny(write(tmp_path / "model.gguf", data), "hisparse")
    request = Request((5, 6, 7), 16)
    [whole], _ = generate(opened, [request], config)
    middle = whole.text[4:6]
    [cut], _ = generate(opened, [request], config, stop=[middle])
    assert cut.text == whole.text[: whole.text.index(middle)]
    assert cut.finish == "stop"
    assert len(cut.tokens) < len(whole.tokens)


def folder(tmp_path: Path, data: Path) -> Path:
    """The tiny Qwen3 checkpoint with a tokenizer of single letters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    made = tmp_path / "checkpoint"
    made.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(data / "qwen3" / name, made)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:190]
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    backend.save(str(made / "tokenizer.json"))
    (made / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<end>"}, "chat_template": "[{{ messages[0]['content'] }}]"})
    )
    return made


def test_a_hugging_face_folder_with_its_tokenizer(tmp_path: Path, data: Path) -> None:
    made = folder(tmp_path, data)
    tokenizer = from_folder(made)
    assert tokenizer.stop_tokens == (1, 190)  # eos_token_id of config.json, and the tokenizer's own
    assert tokenizer.chat([{"role": "user", "content": "hi"}]) == "[hi]"
    done = hisparse(
        "generate", "--model", str(made), "--prompt", "abc", "--prompt", "thequickbrownfoxjum", "-n", "5", "--json",
        "-s", "cache.hot_slots=6", "-s", "selection={kind: quest, page_tokens: 8, budget_pages: 5, recent_pages: 2}",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(line["valid_output"] for line in lines)
    assert [line["prompt"] for line in lines] == [0, 1]
    assert [line["prompt_tokens"] for line in lines] == [5, 21]
    assert all(1 <= len(line["tokens"]) <= 5 for line in lines)


def test_streaming_to_the_terminal(tmp_path: Path, data: Path) -> None:
    write(tmp_path / "model.gguf", data)
    (tmp_path / "prompt.txt").write_text("hello")
    done = hisparse(
        "generate", "-m", "model.gguf", "--prompt-file", "prompt.txt", "--no-chat", "-n", "6", "--ban", "3",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "6 tokens" in done.stderr and "tokens/s" in done.stderr


@pytest.mark.parametrize("terminal", [True, False])
def test_several_texts_are_shown_as_they_come(terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, color_system=None, width=40)
    with _display(console, 2) as show:
        for number, text in ((0, "one "), (1, "two "), (0, "three")):
            show(number, text)
            if terminal:
                time.sleep(0.3)  # a refresh of the screen
        shown = console.file.getvalue()
    assert ("two" in shown) == terminal
    text = console.file.getvalue()
    assert all(part in text for part in ("prompt 1", "one three", "prompt 2", "two"))


def test_one_text_is_shown_as_it_comes() -> None:
    console = Console(file=io.StringIO())
    with _display(console, 1) as show:
        show(0, "one ")
        assert console.file.getvalue() == "one "
        show(0, "two")
    assert console.file.getvalue() == "one two\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-p", "x", "-m", "none.gguf"], "none.gguf does not exist"),
        (["-m", "model.gguf"], "no prompt: give --prompt or --prompt-file"),
        (["-m", "model.gguf", "-p", " "], "a prompt is empty"),
        (["-m", "model.gguf", "-p", "x", "--stop", ""], "--stop is empty"),
        (["-m", "model.gguf", "-f", "none.txt"], "none.txt: the prompt can't be read"),
        (["-m", "model.gguf", "-p", "x", "--temperature", "-1"], "temperature must be 0 or more"),
        (["-m", "model.gguf", "-p", "x", "--ban", "500"], "banned has token ids out of range 0..191"),
        (["-m", "model.gguf", "-p", "x", "--residency", "half"], "decode.residencies.0: input should be"),
        (["-m", "model.gguf", "-p", "x", "-n", "5000"], "the context holds 4096"),
        (["-m", "checkpoint", "-p", "x"], "has no tokenizer, so it can't read text"),
    ],
)
def test_mistakes(tmp_path: Path, data: Path, arguments: list[str], says: str) -> None:
    write(tmp_path / "model.gguf", data)
    (folder(tmp_path, data) / "tokenizer.json").unlink()
    done = hisparse("generate", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1 and says in done.stderr


def test_hub_ids(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    asked = []

    def download(model: str, allow_patterns: list[str]) -> str:
        asked.append((model, allow_patterns))
        if model == "owner/gone":
            raise OSError("no\nroute")
        return "/somewhere"

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=download, __spec__=object()))
    assert checkpoint_path("owner/name") == Path("/somewhere")
    assert asked[0][1] == ["*.json", "*.safetensors", "*.jinja"]
    with pytest.raises(UserError, match="owner/gone is no local path, and the hub gave nothing: no route"):
        checkpoint_path("owner/gone")
    for local in ("./owner/name", "owner/model.gguf", "model"):
        assert checkpoint_path(local) == Path(local)
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(__spec__=None))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="install huggingface-hub"):
        checkpoint_path("owner/name")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% break %}{% endif %}{% endfor %}", "é<"),
        ("{{ messages[0] | tojson(ensure_ascii=False) }}", '{"role": "user", "content": "é<"}'),
        ("{{ strftime_now('%Y') | length }}{{ eos_token }}", "4<end>"),
    ],
)
def test_what_published_chat_templates_use(tmp_path: Path, data: Path, template: str, text: str) -> None:
    made = folder(tmp_path, data)
    settings = json.loads((made / "tokenizer_config.json").read_text())
    settings["chat_template"] = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": template}]
    (made / "tokenizer_config.json").write_text(json.dumps(settings))
    assert from_folder(made).chat([{"role": "user", "content": "é<"}]) == text


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('no system') }}", "refuses the messages: no system"),
        ("{% if %}", "can't be applied"),
        ("{{ missing.name }}", "can't be applied"),
    ],
)
def test_chat_templates_that_fail(tmp_path: Path, data: Path, template: str, says: str) -> None:
    made = folder(tmp_path, data)
    (made / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError, match=says):
        from_folder(made).chat([{"role": "user", "content": "x"}])


def test_a_default_cache_is_no_larger_than_the_longest_history(tmp_path: Path, data: Path) -> None:
    config = parse(
        CONFIG.format(path=write(tmp_path / "model.gguf", data), residency="hisparse"), "test", ["cache.hot_slots=4096"]
    )
    layout = make_layout(config.cache, open_model(config).model.records(100), "hisparse", 100)
    assert layout.hot_slots == 13  # pages of 8 tokens


def test_folders_without_a_readable_tokenizer(tmp_path: Path, data: Path) -> None:
    made = folder(tmp_path, data)
    (made / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="the tokenizer can't be read"):
        from_folder(made)
    (made / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json is missing"):
        from_folder(made)
