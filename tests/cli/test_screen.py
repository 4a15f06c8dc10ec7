"""The two streams of a verb: results, notes, progress, bars."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cli.command import on_a_terminal, plain
from tests.cli.folders import add_step
from torchtitan_lite.cli import screen as module
from torchtitan_lite.cli.inspect_step import bar, folded
from torchtitan_lite.cli.screen import Screen, age
from torchtitan_lite.log import counted, readable_bytes

Capture = pytest.CaptureFixture[str]


def test_a_result_is_text_or_json(capsys: Capture) -> None:
    Screen().show({"a": 1}, lambda: "a is 1")
    assert capsys.readouterr() == ("a is 1\n", "")
    Screen(as_json=True).show({"a": 1}, lambda: "a is 1")
    assert json.loads(capsys.readouterr().out) == {"a": 1}


def test_in_a_pipe_no_line_is_folded_and_none_ends_with_spaces(capsys: Capture) -> None:
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_row("x" * 500 + " " + "y" * 500)
    table.add_row("short")
    Screen().show(None, lambda: table)
    assert capsys.readouterr().out.splitlines() == ["x" * 500 + " " + "y" * 500, "short"]


def test_brackets_in_a_text_are_not_markup(capsys: Capture) -> None:
    from rich.text import Text

    Screen().show(None, lambda: Text("[bold]a[/bold] [1, 2]"))
    assert capsys.readouterr().out == "[bold]a[/bold] [1, 2]\n"


def test_notes_go_to_stderr_and_are_silent_with_json(capsys: Capture) -> None:
    Screen().note("two files are new")
    Screen(as_json=True).note("two files are new")
    assert capsys.readouterr() == ("", "two files are new\n")


def test_progress_in_a_pipe_is_a_line_now_and_then(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 0.5, 2.0, 3.0, 13.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(seconds))
    with Screen().progress("Verifying", 100 << 20) as advance:
        for _ in range(4):
            advance(25 << 20)
    assert capsys.readouterr() == (
        "",
        "Verifying: 50.0 MiB of 100.0 MiB, 2 s left\nVerifying: 100.0 MiB of 100.0 MiB, 0 s left\n",
    )


def test_quick_work_and_json_show_no_progress(capsys: Capture) -> None:
    for screen in (Screen(), Screen(as_json=True)):
        with screen.progress("Verifying", 100) as advance:
            advance(100)
    assert capsys.readouterr() == ("", "")


def test_bars_compare_lengths_and_show_what_is_small() -> None:
    assert len(bar([50], 100, 20)) == 10 and len(bar([100], 100, 20)) == 20
    assert bar([0], 100, 20) == bar([0, 0], 0, 20) == ""
    assert len(bar([1], 10**9, 20)) == 1
    three = bar([60, 30, 10], 100, 20)
    assert [three.count(mark) for mark in dict.fromkeys(three)] == [12, 6, 2]
    assert [bar([10**9, 0, 1], 10**9, 20).count(mark) for mark in dict.fromkeys(bar([1, 0, 1], 2, 2))] == [19, 1]


def test_bars_are_ascii_where_the_output_has_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ascii:
        encoding = "ascii"

    monkeypatch.setattr(sys, "stdout", Ascii())
    text = bar([60, 30, 10, 10, 10], 120, 12)
    monkeypatch.undo()
    assert text.isascii() and len(set(text)) == 4


def test_a_long_key_is_folded_after_dots() -> None:
    assert folded("model.layers.wq", 80) == ["model.layers.wq"]
    assert folded("optimizer.state.layers.0.wq.weight", 20) == ["optimizer.state.", "  layers.0.wq.weight"]
    assert folded("a" * 30 + ".b", 10) == ["a" * 30 + ".", "  b"]


def test_words() -> None:
    assert [age(seconds) for seconds in (-5, 0, 119, 120, 7199, 7200, 172_800)] == [
        *("0 s", "0 s", "119 s", "2 min", "120 min", "2 h", "2 d"),
    ]
    assert [counted(1, "rank"), counted(20_000, "tensor")] == ["1 rank", "20,000 tensors"]
    assert readable_bytes(1 << 30) == "1.0 GiB"


def test_progress_counts_the_bytes_of_all_threads(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_SECONDS", -1.0)
    monkeypatch.setattr(module, "LINE_SECONDS", -1.0)
    with Screen().progress("Verifying", 8000) as advance, ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(lambda: [advance(1) for _ in range(2000)])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 8000 and lines[-1].startswith("Verifying: 7.8 KiB of 7.8 KiB, ")


@pytest.mark.slow
def test_a_narrow_terminal_gets_complete_lines_and_folds_them_itself(tmp_path: Path) -> None:
    add_step(tmp_path, 30)
    for verb, row in (("ls", "  30  full  "), ("inspect", "model      "), ("verify", "  step-30   intact   ")):
        code, screen = on_a_terminal(verb, tmp_path, columns=40)
        lines = plain(screen).splitlines()
        assert code == 0
        assert any(line.startswith(row) for line in lines)
        assert "…" not in screen and not any(line.endswith(" ") for line in lines)
