"""The help of the verbs and of train.py: folded to the terminal, and no word in it that says nothing."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.screens import terminal
from torchtitan_lite.cli.app import VERBS, main
from torchtitan_lite.config.manager import parse_config_or_exit

Help = Callable[[str, int], str]


class _Utf8(io.StringIO):
    encoding = "utf-8"  # type: ignore[assignment]  # of a text without one


@pytest.fixture
def help_of(monkeypatch: pytest.MonkeyPatch) -> Help:
    """Return a function that prints the help of a verb, or of train.py, in that many columns."""

    def printed(verb: str, columns: int) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        with contextlib.redirect_stdout(_Utf8()) as out, pytest.raises(SystemExit) as ending:
            if verb == "train.py":
                parse_config_or_exit(["--help"])
            main([verb, "--help"])
        assert not ending.value.code
        return out.getvalue()

    return printed


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_names_only_defaults_that_say_something(verb: str, help_of: Help) -> None:
    text = " ".join(help_of(verb, 80).split())
    assert re.findall(r"\(default: (?:False|None|''|0|0\.0)\)", text) == []
    assert re.findall(r"(?<=-)[\w-]+ (?:STR|FLOAT)\b", text) == []


@pytest.mark.parametrize(("verb", "columns"), [("export", 60), ("export", 80), ("train.py", 60), ("train.py", 80)])
def test_no_line_of_a_help_ends_before_the_next_word_would_not_fit(verb: str, columns: int, help_of: Help) -> None:
    lines = help_of(verb, columns).splitlines()
    assert all(len(line) <= columns or "{" in line for line in lines)  # A list of choices is never folded.
    indents = [len(line) - len(line.lstrip()) for line in lines]
    early = [
        line
        for line, following, indent, next_indent in zip(lines, lines[1:], indents, indents[1:], strict=False)
        if indent == next_indent == (6 if verb == "train.py" else 24)
        and len(line.rstrip()) + 1 + len(following.split()[0]) <= columns
    ]
    assert early == []


def test_the_help_of_train_says_what_is_off_unset_and_empty_in_words(help_of: Help) -> None:
    text = " ".join(help_of("train.py", 80).split())
    assert "Log the resolved configuration at start. (off by default)" in text
    assert "a pipe or a file there is none. (on by default)" in text
    assert "--training.seed INT|None" in text and "(unset by default)" in text
    assert "(empty by default)" in text and "(default: SIGTERM,SIGUSR1,SIGINT)" in text
    assert re.findall(r"\(default: (?:True|False|None|'')\)", text) == []


def test_the_help_of_convert_lists_its_layouts(help_of: Help) -> None:
    assert "--layout {dcp,torchtitan,ours}" in " ".join(help_of("convert", 80).split())


def _on_a_terminal(module: str, *arguments: str, **variables: str) -> tuple[int, str]:
    """Return the exit code of a new process, and what it wrote to its terminal."""
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    with terminal(80) as screen:
        command = [sys.executable, "-m", module, *arguments]
        environment |= {"TERM": "xterm-256color", **variables}
        process = subprocess.Popen(command, env=environment, stdout=screen.stream, stderr=screen.stream)
        screen.shown_at_end()
        return process.wait(60), screen.received


def test_a_wrong_option_is_one_sentence_on_a_terminal_too() -> None:
    code, written = _on_a_terminal("torchtitan_lite.cli", "ls", "outputs", "--overwrite")
    sentence = "error: unrecognized options: --overwrite; see torchtitan-lite ls --help"
    assert (code, written.splitlines()) == (2, [sentence])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "arguments"),
    [("torchtitan_lite.cli", ["--help"]), ("torchtitan_lite.cli", ["ls", "--help"]), ("torchtitan_lite.train", ["-h"])],
    ids=["all verbs", "ls", "train.py"],
)
def test_a_help_has_colours_unless_no_color_is_set(module: str, arguments: list[str]) -> None:
    code, coloured = _on_a_terminal(module, *arguments)
    assert code == 0 and "\x1b[" in coloured
    code, plain = _on_a_terminal(module, *arguments, NO_COLOR="1")
    assert code == 0 and "\x1b[" not in plain
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain
