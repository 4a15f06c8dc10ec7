"""The commands on docs/importing.md, run in their order, print what the page says; its Python code runs."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
import torch

from tests.checkpoint.importing.sources import weights, write_folder
from tests.cli.command import command
from tests.forked import run_code

PAGE = (Path(__file__).parents[2] / "docs" / "importing.md").read_text(encoding="utf-8")
SHOWN = re.compile(r"^    \$ torchtitan-lite (.*)\n((?:    .*\n)*)", re.MULTILINE)
BARE = re.compile(r"^    torchtitan-lite (.*)$", re.MULTILINE)
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
NAMES = "def of_my_model(name):\n    return None if name == 'lm_head.weight' else 'inner.' + name\n"

os.environ.setdefault("HF_HUB_OFFLINE", "1")


class Runs:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("true",)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with the sources that the page names."""
    from transformers import GPT2Config, GPT2LMHeadModel

    write_folder(tmp_path / "models" / "tiny-llama", weights())
    sizes = {"vocab_size": 300, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path / "models" / "tiny-gpt2")
    torch.save({"w": Runs()}, tmp_path / "models" / "hostile.pt")
    (tmp_path / "names.py").write_text(NAMES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_commands_print_what_the_page_says_and_its_code_runs(place: Path) -> None:
    commands = SHOWN.findall(PAGE)
    assert len(commands) == 3
    for arguments, shown in commands:
        ended = command(*shlex.split(arguments))
        assert ended.out + ended.err == re.sub(r"^    ", "", shown, flags=re.MULTILINE)
    for arguments in BARE.findall(PAGE):
        ended = command(*shlex.split(arguments))
        assert (ended.code, ended.err) == (0, "")
    [code] = PYTHON.findall(PAGE)
    log = place / "log"
    assert run_code(code, log, {**os.environ}, place).wait(60) == 0, log.read_text()


def test_the_map_on_the_page_is_one(place: Path) -> None:
    [line] = [line for line in PAGE.splitlines() if line.startswith("    {")]
    torch.save({"transformer.wte.weight": torch.ones(2), "lm_head.weight": torch.ones(2)}, "w.pt")
    Path("names.json").write_text(line)
    assert command("import-weights", "w.pt", "mapped", "--name-map", "names.json").code == 0
