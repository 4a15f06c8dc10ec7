"""Each command of the trainer, and each of torchtitan-lite, that a page shows is one that would run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchtitan_lite.cli.app import VERBS, parse_verb
from torchtitan_lite.config.manager import parse_config

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHOWN = re.compile(
    r"^(?:    )?((?:[A-Z_]+=\S+ )*(?:\./run_train\.sh|python train\.py|torchrun|sbatch|torchtitan-lite) .*)"
)
TRAINER = re.compile(r"run_train\.sh|train\.py|slurm_train\.sh")


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the page and the words of each command, with the lines that continue it."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in text.splitlines():
            if (found := SHOWN.match(line)) and "..." not in line:
                yield page.name, shlex.split(re.split(r" +[|&]", found[1])[0], comments=True)


def shown(value: str | list[str]) -> str:
    return value if isinstance(value, str) else " ".join(value)[:60]


def of_the_trainer() -> list[tuple[str, list[str]]]:
    return [(page, words) for page, words in commands() if any(map(TRAINER.search, words))]


def of_the_tool() -> list[tuple[str, list[str]]]:
    return [(page, words) for page, words in commands() if words[0] == "torchtitan-lite" and words[1] in VERBS]


@pytest.mark.parametrize(("page", "words"), of_the_trainer(), ids=shown)
def test_the_options_of_each_command_of_the_trainer_are_a_configuration(page: str, words: list[str]) -> None:
    at = next(number for number, word in enumerate(words) if TRAINER.search(word))
    options = words[at + 1 :]
    file = next((word.partition("=")[2] for word in words[:at] if word.startswith("CONFIG_FILE=")), "llama_debug.toml")
    if "--job.config_file" not in options and words[at] != "train.py":
        options = [f"--job.config_file={file}", *options]
    if "titan.toml" in options:
        pytest.skip("the TOML file of the reader's other trainer")
    assert parse_config(options).job.dump_folder


@pytest.mark.parametrize(("page", "words"), of_the_tool(), ids=shown)
def test_each_command_of_torchtitan_lite_is_understood(page: str, words: list[str]) -> None:
    verb, _ = parse_verb(words[1:])
    assert callable(verb.run)


def test_there_are_commands_to_try() -> None:
    assert len(of_the_trainer()) >= 40 and len(of_the_tool()) >= 25
