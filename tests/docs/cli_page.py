"""The outputs of `ls` and `inspect` on docs/cli.md: a real run, the commands on a terminal of 80 columns.

python -m tests.docs.cli_page    writes them into the page
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.cli.command import on_a_terminal, plain
from tests.e2e.jobs import start
from torchtitan_lite.examining.verified import Verified, content_identity, record
from torchtitan_lite.store.pins import Pins

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
COMMAND = re.compile(r"^    \$ torchtitan-lite ((?:ls|inspect) .*)\n((?:    .*\n|\n(?=    [^$]))*)", re.MULTILINE)
_CHANGING = (
    (re.compile(r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"), "DATE"),
    (re.compile(r"\b\d+ (s|min|h|d)\b"), "AGE"),
    (re.compile(r"\b(?=\d*[a-f])[0-9a-f]{8}\b|\b\d{8}\b"), "RUN"),
    (re.compile(r"\b(torch|python|torchtitan_lite) \S+"), r"\1 VERSION"),
    (re.compile(r"\b(loss|grad_norm) [\d.]+"), r"\1 VALUE"),
)


def prepare(folder: Path) -> None:
    """Make `outputs` in `folder`: a run of two ranks, a branch of it on one, and what accidents leave behind."""
    dump, often = folder / "outputs", "--checkpoint.interval=10"
    with start(dump, often, "--training.steps=50", ranks=2) as job:
        assert job.wait() == [0, 0], job.log
    with start(dump, often, "--training.steps=60", "--checkpoint.load_step=30") as job:
        assert job.wait() == [0], job.log
    root = dump / "checkpoint"
    os.truncate(root / "step-20" / "__0_0.distcp", 4_000_000)
    (root / "step-70.staging-5d1f90ab").mkdir()
    shutil.copy(root / "step-60" / "__0_0.distcp", root / "step-70.staging-5d1f90ab")
    with Pins(root).changing() as pinned:
        pinned.add(10)
    step = root / "step-60"
    identity = content_identity(step)
    assert identity is not None
    record(step, Verified(identity, (step / "manifest.json").stat().st_mtime, "full", 0))


def output(arguments: str, folder: Path) -> str:
    """Return the screen of the command with `arguments` in `folder`."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        _, screen = on_a_terminal(*shlex.split(arguments))
    finally:
        os.chdir(before)
    lines = plain(screen).replace(f"{folder}/", "").splitlines()
    return "".join(f"    {line}".rstrip() + "\n" for line in lines)


def with_outputs(page: str, run: Callable[[str], str]) -> str:
    """Return `page` with what `run` returns for the arguments of each command below that command."""
    return COMMAND.sub(lambda match: f"    $ torchtitan-lite {match[1]}\n{run(match[1])}", page)


def comparable(text: str) -> list[str]:
    """Return the words of `text`, without what differs from run to run; a longer age folds lines elsewhere."""
    for pattern, word in _CHANGING:
        text = pattern.sub(word, text)
    return text.split()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        prepare(Path(made))
        written = with_outputs(PAGE.read_text(encoding="utf-8"), lambda arguments: output(arguments, Path(made)))
        PAGE.write_text(written, encoding="utf-8")
