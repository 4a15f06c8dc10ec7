"""The program of docs/several_models.md, killed in every phase, ends as if it had never been killed.

A kill is a fault (docs/proof.md). The program passes the point `step` six times a step: after each of the four pushes
of its rollout, and after the steps of its two optimizers.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.command import command
from tests.e2e.jobs import DEADLINE_SECONDS, free_port
from tests.examples import mostly_exhaustive
from tests.forked import REPO, run_script

SCRIPT = REPO / "docs" / "examples" / "several_models.py"
STEPS = 12
"""The program saves every second one."""
MODES = ("disabled", "async", "async_with_pinned_mem")
PHASES = {
    "half of a rollout": "kill@step:after=1",
    "rollout": "kill@step:after=3",
    "critic": "kill@step:after=4",
    "policy": "kill@step:after=5",
    "write": "kill@write:process=trainer",
    "manifest": "kill@manifest:rank=0",
    "commit": "kill@commit:rank=0",
    "committed": "kill@committed:rank=0",
}
"""What is over at the kill, or in a save, what is about to happen."""
PRODUCT = [
    (phase, mode)
    for phase in PHASES
    for mode in MODES
    if (phase, mode) != ("write", "async_with_pinned_mem")  # The writer process writes, and no trainer.
]
CHAIN = {"half of a rollout": 3, "critic": 5, "policy": 6, "rollout": 7, "commit": 8, "committed": 10}
"""One run: the phase in which each of its starts is killed, and the step."""
UNUSED = re.compile(r"rng\.rank\d\.(python|numpy)")
"""Generators from which the program draws nothing: each run begins with other ones."""


class Start:
    """One start of the program in `folder`: its ranks' exit codes, what it printed, and its log."""

    def __init__(self, folder: Path, mode: str, *, ranks: int = 1, fault: str = "", script: Path = SCRIPT) -> None:
        folder.mkdir(exist_ok=True)
        number = len([*folder.glob("*.0.log")])
        logs = [folder / f"{number}.{rank}.log" for rank in range(ranks)]
        for each in logs:
            each.touch()
        base = {**os.environ, "TORCHTITAN_LITE_FAULT": fault, "WORLD_SIZE": str(ranks)}
        base |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
        processes = [
            run_script(script, [str(STEPS), mode], log, base | {"RANK": str(rank)}, folder)
            for rank, log in enumerate(logs)
        ]
        if fault:
            # Rank 0 passes every point that kills. The other one may wait for it, and is killed as by a power cut.
            processes[0].wait(DEADLINE_SECONDS)
            for each in processes[1:]:
                each.kill()
        self.codes = [each.wait(DEADLINE_SECONDS) for each in processes]
        self.log = "".join(each.read_text() for each in logs)

    @property
    def lines(self) -> dict[int, str]:
        """What it printed of each step."""
        return {int(step): line for step, line in re.findall(r"^step (\d+): (.+)$", self.log, re.MULTILINE)}


def straight(folder: Path, mode: str, ranks: int = 1) -> Start:
    """Return a start that is not killed."""
    start = Start(folder, mode, ranks=ranks)
    assert start.codes == [0] * ranks, start.log
    assert [*start.lines] == [*range(1, STEPS + 1)]
    return start


def killed(folder: Path, mode: str, phase: str, step: int, ranks: int = 1) -> Start:
    """Return a start that is killed in `phase` of `step`."""
    start = Start(folder, mode, ranks=ranks, fault=f"{PHASES[phase]},step={step}")
    assert start.codes[0] == -signal.SIGKILL, f"{phase}, step {step}: {start.codes}\n{start.log}"
    return start


def differing(a: Path, b: Path) -> Iterator[str]:
    """Yield the names of the values that differ between the last checkpoints of two folders."""
    steps = [folder / "outputs_rl" / "checkpoint" / f"step-{STEPS}" for folder in (a, b)]
    found = command("diff", *steps, "--values", "--json").json
    for part in ("only_in_a", "only_in_b", "tensors", "containers", "objects"):
        yield from found[part]
    yield from (name for name in found["values"]["different"] if not UNUSED.fullmatch(name))


def chain(folder: Path, mode: str, ranks: int = 1) -> None:
    """Kill one run in each phase of `CHAIN`, let it end, and compare it with one that is not killed."""
    expected = straight(folder / "straight", mode, ranks)
    starts = [killed(folder / "killed", mode, phase, step, ranks) for phase, step in CHAIN.items()]
    last = Start(folder / "killed", mode, ranks=ranks)
    assert last.codes == [0] * ranks, last.log
    assert [*last.lines] == [*range(max(CHAIN.values()) + 1, STEPS + 1)], "it resumes from what was committed last"
    for start in [*starts, last]:
        assert start.lines.items() <= expected.lines.items()
    assert not [*differing(folder / "straight", folder / "killed")]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES[:2])
def test_a_run_that_is_killed_in_each_phase_ends_as_one_that_is_not(mode: str, tmp_path: Path) -> None:
    chain(tmp_path, mode)


@pytest.mark.slow
@pytest.mark.parametrize("left_out", ["carts", "replay"])
def test_without_one_of_its_states_a_killed_run_ends_as_another_one(left_out: str, tmp_path: Path) -> None:
    script = tmp_path / SCRIPT.name
    state = f', "{left_out}": PerRank({left_out})'
    assert state in SCRIPT.read_text()
    script.write_text(SCRIPT.read_text().replace(state, ""))
    whole = Start(tmp_path / "straight", "disabled", script=script)
    Start(tmp_path / "killed", "disabled", script=script, fault=f"{PHASES['rollout']},step=7")
    last = Start(tmp_path / "killed", "disabled", script=script)
    assert whole.codes == last.codes == [0], whole.log + last.log
    assert last.lines[7] != whole.lines[7]
    assert [*differing(tmp_path / "straight", tmp_path / "killed")]


@pytest.mark.slow  # seven starts of two ranks, twice
@pytest.mark.parametrize("mode", mostly_exhaustive(MODES[:2], kept=MODES[:1]))
def test_two_ranks_with_buffers_of_their_own_end_as_if_they_were_not_killed(mode: str, tmp_path: Path) -> None:
    chain(tmp_path, mode, ranks=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("phase", "mode"), PRODUCT)
def test_a_run_that_is_killed_once_ends_as_one_that_is_not(phase: str, mode: str, ranks: int, tmp_path: Path) -> None:
    expected = straight(tmp_path / "straight", mode, ranks)
    start = killed(tmp_path / "killed", mode, phase, 6, ranks)
    last = Start(tmp_path / "killed", mode, ranks=ranks)
    assert last.codes == [0] * ranks, last.log
    assert start.lines.items() | last.lines.items() == expected.lines.items()
    assert phase != "committed" or min(last.lines) == 7
    assert not [*differing(tmp_path / "straight", tmp_path / "killed")]
