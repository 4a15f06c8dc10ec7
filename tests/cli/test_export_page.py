"""The commands on the page about export and convert are ones that the tool takes."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from torchtitan_lite.cli.app import parse_verb

PAGE = Path(__file__).parents[2] / "docs" / "export.md"
COMMANDS = [
    line.strip() for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("    torchtitan-lite ")
]


@pytest.mark.parametrize("command", dict.fromkeys(COMMANDS))
def test_it_is_parsed(command: str) -> None:
    _, *arguments = shlex.split(command)
    verb, _ = parse_verb(arguments)
    assert type(verb).__name__.lower() == arguments[0]
