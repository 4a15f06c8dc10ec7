"""The outputs of `ls` and `inspect` on docs/cli.md are those of the commands above them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.docs.cli_page import COMMAND, PAGE, comparable, output, prepare, with_outputs


@pytest.mark.slow  # Two jobs and a terminal for each command: about 15 s.
def test_the_page_shows_what_its_commands_print() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert len(COMMAND.findall(page)) >= 4
    # Its path is in the configuration, and one of pytest's would be folded.
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        prepare(Path(made))
        found = with_outputs(page, lambda arguments: output(arguments, Path(made)))
    assert comparable(found) == comparable(page), "run: python -m tests.docs.cli_page"
