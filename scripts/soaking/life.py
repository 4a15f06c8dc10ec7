"""One life of a soak: a run that is started, disturbed and started again until its last step, and watched."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.soaking.drawn import ENDS, Happening, Life, Start
from scripts.soaking.expected import Expected, Rules
from scripts.soaking.injections import Injections
from scripts.soaking.leaks import Leaks
from scripts.soaking.references import References, command, follow
from scripts.soaking.stores import Stores
from tests.forked import FORKED_RANKS, run_module
from tests.processes import command_line
from torchtitan_lite.metrics import read_accounts

STUCK_SECONDS = 150.0
"""The longest time without a record of any rank, while nothing is stopped."""
LEAVING_SECONDS = 40.0
"""How long after torchrun its processes may take to end; it gives its ranks 30 s itself."""
MAY_END_A_START = {*ENDS, "stop rank", "stop keeper", "stop helper", "full disk"}
STARTS_TO_FINISH = 3
"""Without injections: damage that is found may end one."""
LEDGER_SECONDS = 5.0
"""That the ledger may have less than the records: it beats every four seconds."""


@dataclass
class Outcome:
    """What became of a life."""

    seed: str
    events: list[str] = field(default_factory=list)
    """KIND, and after a `+` what was under way."""
    starts: int = 0
    saves: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    seconds: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)


class Records:
    """What the ranks of all starts have recorded in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self.lines: list[dict[str, Any]] = []
        """In the order of reading, each with its `rank`."""
        self._read: dict[int, int] = {}

    def fresh(self) -> list[dict[str, Any]]:
        """Return the lines since the last call."""
        fresh: list[dict[str, Any]] = []
        for path in sorted(self.folder.glob("rank*.jsonl")):
            rank = int(path.stem.removeprefix("rank"))
            with path.open("rb") as file:
                file.seek(self._read.get(rank, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read[rank] = self._read.get(rank, 0) + len(whole)
            fresh += [{**json.loads(line), "rank": rank} for line in whole.splitlines()]
        self.lines += fresh
        return fresh

    def has(self, event: str) -> bool:
        """Return whether a rank has recorded `event`."""
        return any(line["event"] == event for line in self.lines)


class Lived:
    """The life `life` in `folder`; its run is on `disk`, a small file system, where there is one."""

    def __init__(
        self, life: Life, folder: Path, disk: Path, runtime: Path, references: References, stores: Stores, plant: str
    ) -> None:
        self.life, self._folder, self._disk = life, folder, disk
        self._references, self._stores, self._plant = references, stores, plant
        self._name, self._moves = f"run-{life.seed.replace(':', '-')}", 0
        self._records = Records(folder / "records")
        self._log = folder / "output.log"
        self._log.touch()
        self._losses: dict[int, float] = {}
        self._expected = Expected(self._root)
        self._uploaded: dict[str, set[int]] = {"folder": set(), "bucket": set(), "": set()}
        self._injections = Injections(disk, runtime, stores, self._expected)
        self._leaks = Leaks(runtime)
        self._rules = Rules()
        self.outcome = Outcome(life.seed, self._injections.events)

    @property
    def _dump(self) -> Path:
        """The job's folder, which moves."""
        return self._disk / f"{self._name}-{self._moves}"

    @property
    def _root(self) -> Path:
        return self._dump / "checkpoint"

    def live(self, deadline: float) -> Outcome:
        """Start the run as drawn, with no more injections after `deadline`; look at all it leaves."""
        began = time.monotonic()
        try:
            for start in self.life.starts:
                self._before(start)
                self._carry_out(start, start.happenings, start.fault)
                if self._records.has("finished") or time.monotonic() > deadline:
                    break
            for _ in range(STARTS_TO_FINISH):
                if not self._records.has("finished"):
                    self._carry_out(start, (), "")
            if self._records.has("finished"):
                self._look_at_the_end()
            else:
                self.outcome.wrong.append(f"the run does not come to its last step: {self._tail()}")
        finally:
            self._injections.kill_all(self._leaks.processes)
            self.outcome.seconds = round(time.monotonic() - began, 1)
        return self.outcome

    def _before(self, start: Start) -> None:
        """Do what happens to the folder and the memory before `start`."""
        for kind, which in start.before:
            if kind in ("change options", "change topology"):
                self._injections.note(kind)
            elif kind == "move folder" and self._dump.exists():
                old = self._dump
                self._moves += 1
                old.rename(self._dump)
                self._expected.root = self._root
                self._injections.note(kind)
            elif kind == "lose disk":
                # Only where the start knows of a place that has an acknowledged step.
                if self._uploaded[start.options.uploads] and self._root.exists():
                    shutil.rmtree(self._root)
                    self._expected.steps.clear()
                    self._injections.note(kind)
            else:
                self._injections.do(Happening(kind, 0, 0.0, which))
        if self._plant == "loss" and len(intact := self._expected.intact()) > 1:
            shutil.rmtree(self._root / f"step-{intact[-1]}")  # Of which the model hears nothing.

    # A start.

    def _carry_out(self, start: Start, happenings: Sequence[Happening], fault: str) -> None:
        """Run one start, disturb it, and look at what it leaves."""
        outcome, injections = self.outcome, self._injections
        outcome.starts += 1
        happened = {happening.kind for happening in happenings} | ({"fault"} if fault else set())
        if fault:
            injections.note("fault x 2" if ";" in fault else f"fault {fault.partition(':')[0]}")
        self._rules = Rules(start.options.latest, start.options.every, start.options.best)
        injections.uploads = start.options.uploads
        code = self._run(start, happenings, fault)
        where = f"after start {outcome.starts}"
        outcome.wrong += [f"{where}: {wrong}" for wrong in self._expected.look()]
        outcome.leaked += [f"{where}: {leak}" for leak in self._leaks.after_start(self._records.lines)]
        if code and not happened & MAY_END_A_START:
            outcome.wrong.append(f"{where}: it ended with {code}, and nothing was done to it: {self._tail()}")
        injections.is_recovering = bool(code)

    def _run(self, start: Start, happenings: Sequence[Happening], fault: str) -> int:
        """Run torchrun to its end, with `happenings`; return its exit code."""
        injections, waiting = self._injections, list(happenings)
        injections.torchrun = torchrun = run_module(
            "torch.distributed.run", self._arguments(start), self._log, self._environment(fault)
        )
        heard, trained, due_at, due = time.monotonic(), 0, waiting[0].steps if waiting else 0, float("inf")
        while torchrun.poll() is None:
            now = time.monotonic()
            if fresh := self._records.fresh():
                heard = now
                trained += sum(line["event"] == "trained" and not line["rank"] for line in fresh)
                self._follow(fresh)
            injections.undo(now)
            if waiting and trained >= due_at:
                due = min(due, now + waiting[0].delay)
            if now >= due:
                injections.do(waiting.pop(0))
                due_at, due = trained + waiting[0].steps if waiting else 0, float("inf")
            if now - heard > STUCK_SECONDS and not injections.stops_something:
                self.outcome.wrong.append(f"start {self.outcome.starts} does nothing: {self._tail()}")
                injections.kill_all(self._leaks.processes)
            time.sleep(0.01)
        self._wait_for_ranks()
        injections.torchrun = None
        injections.undo()
        self._follow(self._records.fresh())
        return torchrun.wait()

    def _arguments(self, start: Start) -> list[str]:
        options = start.options
        keys = options.keys() | self._stores.keys(options.uploads, self._name) | {"digest_tensors": self.life.digests}
        if self.life.poisoned:
            keys["enable_first_step_checkpoint"] = True  # To roll back to.
        job = command(start.topology, self._dump, keys, self._folder, hang_seconds=self.life.hang_seconds)
        return [f"--max-restarts={start.restarts}", "--monitor-interval=0.1", *job]

    def _environment(self, fault: str) -> dict[str, str]:
        is_planted = self._plant == "leak" or (self._plant == "bit" and self.outcome.starts > 1)
        return {
            **os.environ,
            **FORKED_RANKS,
            **self._stores.environment,
            "OMP_NUM_THREADS": "1",
            "SOAK_RECORDS": str(self._records.folder),
            "SOAK_START": str(self.outcome.starts),
            "SOAK_POISON": ",".join(map(str, self.life.poisoned)),
            "SOAK_PLANT": self._plant if is_planted else "",
            "TORCHTITAN_LITE_FAULT": fault,
        }

    def _wait_for_ranks(self) -> None:
        """Wait until no process of the start is left but the keeper; kill what stays."""
        deadline = time.monotonic() + LEAVING_SECONDS
        while (left := self._leaks.processes()) and time.monotonic() < deadline:
            self._injections.undo(time.monotonic())
            time.sleep(0.02)
        if left:
            commands = [command_line(pid)[:80] for pid in left]
            self.outcome.leaked.append(f"{len(left)} processes after a start: {commands}")
            self._injections.kill_all(self._leaks.processes)

    def _follow(self, fresh: list[dict[str, Any]]) -> None:
        """Take note of what rank 0 has recorded; find a start that resumed too early."""
        for line in fresh:
            event, step = line["event"], line["step"]
            if line["rank"]:
                continue
            if event == "trained":
                self._losses[step] = float.fromhex(line["loss"])
                self._injections.is_recovering = False
            elif event == "begun":
                self._look_at_begin(line["start"], step)
            elif event == "rolled_back":
                self._injections.note("poisoned batch")
            elif event == "committed":
                self.outcome.saves += 1
                self._expected.acknowledged(step, self._rules, self._losses)
            elif event == "uploaded":
                self._uploaded[self._injections.uploads].add(step)

    def _look_at_begin(self, start: str, step: int) -> None:
        """Look at the folder, and at the step from which a start continues."""
        least = max(self._expected.least, max(self._uploaded[self._injections.uploads], default=0))
        if step < least:
            self.outcome.lost.append(f"start {start} resumed step {step}, {least} was acknowledged")
        self.outcome.wrong += [f"at start {start}: {wrong}" for wrong in self._expected.look()]

    # The end.

    def _look_at_the_end(self) -> None:
        outcome = self.outcome
        compared = follow(self._records.lines, self.life, self._references)
        outcome.wrong += compared.wrong
        outcome.wrong += self._look_at_contents()
        outcome.wrong += self._stores.differences(self._name, self._root, {*self._expected.intact()})
        outcome.wrong += self._look_at_ledger(compared.redone)
        was_killed = any("kill" in event for event in outcome.events)
        outcome.leaked += self._leaks.at_the_end(self._root, self._dump, was_killed=was_killed)
        outcome.figures |= {"steps": compared.trained, "redone": compared.redone}

    def _look_at_contents(self) -> list[str]:
        """Compare each remaining checkpoint, read by stock DCP, with that of the run that nothing befell."""
        wrong = []
        if len(self.life.topologies) == 1:
            wanted = self._references.of(self.life.topologies[0], self.life.poisoned).contents
            for step in self._expected.intact():
                found = self._references.content(self._root / f"step-{step}")
                if wanted.get(str(step), found) != found:
                    wrong.append(f"step {step} holds other tensors than that of the uninterrupted run")
        return wrong

    def _look_at_ledger(self, redone: int) -> list[str]:
        accounts, wrong = read_accounts(self._dump), []
        of_first = [line for line in self._records.lines if not line["rank"]]
        # A start that did not come to its load is not in the ledger.
        wall = of_first[-1]["time"] - next(line["time"] for line in of_first if line["event"] == "begun")
        self.outcome.figures |= {"goodput": round(accounts.goodput, 3), "wall": round(wall, 1)}
        # A kill between a step and its record leaves one that only the ledger has.
        if abs(accounts.redone_steps - redone) > len({line["start"] for line in self._records.lines}):
            wrong.append(f"the ledger has {accounts.redone_steps} steps trained again, {redone} were")
        if not wall - LEDGER_SECONDS <= accounts.wall_seconds <= wall + LEAVING_SECONDS:
            wrong.append(f"the ledger has {accounts.wall_seconds:.1f} s, the run took {wall:.1f} s")
        return wrong

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]
