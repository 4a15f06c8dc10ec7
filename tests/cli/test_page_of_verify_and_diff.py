"""docs/cli.md shows what `verify` and `diff` print."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.checkpoint.reading.foreign_folders import save_plain
from tests.cli.command import command
from tests.cli.folders import add_step
from tests.store.filled import flip
from torchtitan_lite.cli.exit_codes import ExitCode

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "cli.md"
GOLDEN = ROOT / "tests" / "golden"
CODES = {
    "verify outputs": ExitCode.DAMAGE,
    "diff base tuned --values": ExitCode.DIFFERENT,
}
NOT_ON_THE_PAGE = {
    "verify outputs --sizes": """\
  step-10   intact   3 files   34 tensors   126.6 KiB
  step-20   intact   3 files   34 tensors   126.6 KiB
  step-30   intact   3 files   34 tensors   126.6 KiB

3 checkpoints, sizes only: nothing is missing or truncated. No byte was read.
""",
    "verify pretrained": """\
  pretrained   intact   3 files   34 tensors   126.6 KiB

1 checkpoint, every byte: nothing is damaged.
pretrained has no digests: compared with the checksums that torch.save wrote.
pretrained: 35 of 93 items without a checksum, so not compared by value.
""",
    "diff one-process two-ranks --values": """\
A  one-process
B  two-ranks

Where they come from, which does not count (A, B): 2
  ranks      1        2
  topology   1 rank   2 ranks

Values of 7 tensors not read: equal by digest.
The states are equal.
""",
}


def make_folders(base: Path) -> None:
    """Make the folders that the page is about."""
    outputs = base / "outputs" / "checkpoint"
    outputs.mkdir(parents=True)
    for step in (10, 20, 30):
        add_step(outputs, step)
    flip(outputs / "step-20" / "__1_0.distcp", 390)
    for ranks in ("one-process", "two-ranks"):
        shutil.copytree(GOLDEN / "format-7" / ranks / "export" / "step-7", base / ranks)
    shutil.copytree(GOLDEN / "format-7" / "two-ranks" / "checkpoint" / "step-7", base / "pretrained")
    (base / "pretrained" / "manifest.json").unlink()
    torch.manual_seed(0)
    state = {
        "tok_embeddings.weight": torch.zeros(16, 4),
        "layers.0.attention.wq.weight": torch.zeros(4, 4),
        "layers.0.attention.wk.weight": torch.zeros(4, 4),
        "output.weight": torch.zeros(16, 4),
        "norm.weight": torch.ones(4),
        "schedule": ("cosine", 1000),
    }
    save_plain(state, base / "base")
    state["layers.0.attention.wq.weight"][1, 2] = 0.125
    state["layers.0.attention.wk.weight"] += 0.00390625
    state["output.weight"] = torch.zeros(18, 4)
    state["norm.weight"] = torch.ones(4).bfloat16()
    state["schedule"] = ("linear", 1000)
    save_plain(state | {"lora.weight": torch.zeros(4, 2)}, base / "tuned")


def printed(line: str) -> tuple[int, str]:
    """Return the exit code of the command `line`, and what it prints, without the time that it took."""
    ended = command(*line.split())
    assert not ended.err
    return ended.code, re.sub(r" \(\d+\.\d s, [^)]*/s\)", "", ended.out)


def shown() -> dict[str, str]:
    """Return the output of each command on the page."""
    found: dict[str, str] = {}
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    for block in blocks:
        text = re.sub(r"^    ", "", block.strip("\n") + "\n", flags=re.MULTILINE)
        first, _, output = text.partition("\n")
        if first.startswith(("$ torchtitan-lite verify ", "$ torchtitan-lite diff ")):
            found[first.removeprefix("$ torchtitan-lite ")] = output
    return found


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folders(tmp_path)
    monkeypatch.chdir(tmp_path)


def test_the_page_shows_what_the_command_prints() -> None:
    assert shown().keys() == CODES.keys()
    for line, output in shown().items():
        assert printed(line) == (CODES[line], output), line
    assert max(len(line) for output in shown().values() for line in output.splitlines()) <= 80


@pytest.mark.parametrize("line", NOT_ON_THE_PAGE)
def test_where_nothing_is_damaged_or_differs_the_command_says_what_it_compared(line: str) -> None:
    assert printed(line) == (ExitCode.FINE, NOT_ON_THE_PAGE[line])
