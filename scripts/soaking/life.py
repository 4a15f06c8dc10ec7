"""One life of a soak: a run that is started, disturbed and started again until its last step, and watched."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.soaking.drawn import LASTING, STOPS, Happening, Life, Start
from scripts.soaking.expected import Expected, Rules
from scripts.soaking.leaks import Leaks
from scripts.soaking.references import STEPS, References, command, follow
from scripts.soaking.stores import Stores
from tests import keepers
from tests.forked import FORKED_RANKS, Forked, run_module
from tests.processes import children, command_line, own_children, send
from torchtitan_lite.metrics import read_accounts

TOLERANCE = 1e-3
"""Relative, of a loss after a change of ranks or parallelism."""
STUCK_SECONDS = 150.0
"""Without a step, a start or an end, while nothing is stopped."""
ENDS_A_START = ("kill rank", "kill ranks", "kill torchrun", "SIGTERM", "SIGTERM to a rank", "fault")
MAY_END_A_START = (*ENDS_A_START, "stop rank", "stop keeper", "stop helper", "full disk")
STARTS_TO_FINISH = 3
"""Without injections: a fault that is still to come, and damage, may end one."""
HELPERS = ("writer_process", "upload_process", "watch_process", "helper_process")


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

    @property
    def overlapped(self) -> int:
        """How many events came while another was under way."""
        return sum("+" in event for event in self.events)


@dataclass
class Lasting:
    """Something that takes a while, and how it is ended."""

    kind: str
    until: float
    undo: Callable[[], object]


class Lived:
    """The life `life` in `folder`; its run is on `disk`, a small file system, where there is one."""

    def __init__(
        self, life: Life, folder: Path, disk: Path, runtime: Path, references: References, stores: Stores, plant: str
    ) -> None:
        self.life, self.folder, self.disk, self.runtime = life, folder, disk, runtime
        self.references, self.stores, self.plant = references, stores, plant
        self.outcome = Outcome(life.seed)
        self._name = f"run-{life.seed.replace(':', '-')}"
        self._moves = 0
        self._records = folder / "records"
        self._records.mkdir(parents=True)
        self.log = folder / "output.log"
        self.log.touch()
        self.lines: list[dict[str, Any]] = []
        """All that any rank has recorded, each with its rank."""
        self._read: dict[int, int] = {}
        self.losses: dict[int, float] = {}
        self._expected = Expected(self._root)
        self._uploaded: dict[str, set[int]] = {"folder": set(), "bucket": set(), "": set()}
        self._lasting: list[Lasting] = []
        self._trained_at = self._begun_at = 0.0
        self._highest = 0
        self._is_recovering = False
        self._torchrun: Forked | None = None
        self._leaks = Leaks(runtime)
        self._rules = Rules()
        self._uploads = ""
        self._launched: list[tuple[float, float]] = []

    @property
    def dump(self) -> Path:
        """The job's folder, which moves."""
        return self.disk / f"{self._name}-{self._moves}"

    @property
    def _root(self) -> Path:
        return self.dump / "checkpoint"

    def live(self, deadline: float) -> Outcome:
        """Start the run as drawn, with no more injections after `deadline`; look at all it leaves."""
        began = time.monotonic()
        try:
            for number, start in enumerate(self.life.starts, 1):
                if self._has_finished() or time.monotonic() > deadline:
                    break
                self._before(start)
                if self.plant == "loss" and len(intact := self._expected.intact()) > 1:
                    shutil.rmtree(self._root / f"step-{intact[-1]}")  # Of which the model is not told.
                self._run(number, start, start.happenings, start.fault)
            last = self.life.starts[max(0, self.outcome.starts - 1)]
            for _ in range(STARTS_TO_FINISH):
                if not self._has_finished():
                    self._run(self.outcome.starts + 1, last, (), "")
            if self._has_finished():
                self._look_at_the_end()
            else:
                self.outcome.wrong.append(f"the run does not come to its last step: {self.tail()}")
        finally:
            self._end_all()
            self.outcome.seconds = round(time.monotonic() - began, 1)
        return self.outcome

    # What happens.

    def _note(self, kind: str) -> None:
        under_way = sorted({each.kind for each in self._lasting})
        if self._is_recovering and self._torchrun is not None:
            under_way.append("recovery")
        self.outcome.events.append(f"{kind} + {', '.join(under_way)}" if under_way else kind)

    def _before(self, start: Start) -> None:
        for kind, which in start.before:
            if kind in ("change options", "change topology"):
                self._note(kind)
            elif kind == "move folder":
                if self.dump.exists():
                    old = self.dump
                    self._moves += 1
                    old.rename(self.dump)
                    self._expected.root = self._root
                    self._note(kind)
            elif kind == "lose disk":
                self._lose_disk(start.options.uploads)
            else:
                self._do(Happening(kind, 0, 0.0, which))

    def _lose_disk(self, uploads: str) -> None:
        """Remove all checkpoints, if the next start knows of a place of `uploads` that has an acknowledged one."""
        if not self._uploaded[uploads] or not self._root.exists():
            return
        shutil.rmtree(self._root)
        for step in list(self._expected.steps):
            self._expected.took(step)
        self._note("lose disk")

    def _do(self, happening: Happening) -> None:
        """Carry out `happening`, if there is what it needs."""
        kind, which = happening.kind, happening.which
        workers = own_children(self._torchrun.pid) if self._torchrun else []
        ranks = [pid for pid in workers if "multiprocessing.forkserver" in command_line(pid)] or workers
        until = time.monotonic() + happening.seconds
        if kind in ("stop rank", "stop helper", "stop keeper", "kill helper", "kill keeper"):
            group = {"rank": ranks, "helper": self._helpers(ranks), "keeper": keepers.keepers_in(self.runtime)}
            pids = group[kind.split()[1]]
            if not pids:
                return
            pid = pids[int(which * len(pids))]
            self._note(kind)
            if kind.startswith("kill"):
                send(pid, signal.SIGKILL)
            else:
                send(pid, signal.SIGSTOP)
                self._lasting.append(Lasting(kind, until, lambda: send(pid, signal.SIGCONT)))
        elif kind == "full disk":
            if self._fill():
                self._note(kind)
                self._lasting.append(Lasting(kind, until, lambda: (self.disk / "filler").unlink(missing_ok=True)))
        elif kind in LASTING:
            if self._uploads != "bucket":
                return
            self._note(kind)
            undo = self.stores.slow() if kind == "slow store" else self.stores.hang()
            self._lasting.append(Lasting(kind, until, undo))
        elif kind.startswith(("damage", "remove")):
            self._spoil(kind, which)
        elif ranks and self._torchrun is not None:
            self._note(kind)
            self._end_ranks(kind, ranks, which)

    def _end_ranks(self, kind: str, ranks: list[int], which: float) -> None:
        assert self._torchrun is not None
        chosen = ranks[int(which * len(ranks))]
        if kind == "kill rank":
            send(chosen, signal.SIGKILL)
        elif kind == "kill ranks":
            for pid in ranks:
                send(pid, signal.SIGKILL)
        elif kind == "kill torchrun":
            self._torchrun.kill()
            time.sleep(which)  # Until the ranks are ended, too, as a container's end does.
            for pid in ranks:
                send(pid, signal.SIGKILL)
        elif kind == "SIGTERM":
            send(self._torchrun.pid, signal.SIGTERM)
        elif kind == "SIGTERM to a rank":
            send(chosen, signal.SIGTERM)
        self._is_recovering = True

    def _spoil(self, kind: str, which: float) -> None:
        """Damage or remove a checkpoint; one that is not damaged is always left."""
        intact = self._expected.intact()
        if len(intact) < 2:
            return
        step = intact[-1] if "newest" in kind else intact[int(which * len(intact))]
        folder = self._root / f"step-{step}"
        if kind.startswith("remove"):
            self._expected.took(step)
            shutil.rmtree(folder, ignore_errors=True)
        else:
            files = sorted(folder.glob("*.distcp")) if folder.exists() else []
            if not files or step == STEPS:  # A run that has ended loads nothing.
                return
            self._expected.damaged(step)
            path = files[int(which * len(files))]
            content = bytearray(path.read_bytes())
            content[int(which * len(content))] ^= 1 << int(which * 8)
            replacement = self.folder / "damaged"
            replacement.write_bytes(content)
            with path.open("r+b") as file:
                file.write(content)
        self._note(kind)

    def _fill(self) -> bool:
        """Leave no room on the small disk; return whether there is one."""
        if not os.path.ismount(self.disk) or (self.disk / "filler").exists():
            return False
        with (self.disk / "filler").open("wb") as filler:
            for size in (2**20, 2**12):
                with suppress(OSError):
                    while True:
                        os.posix_fallocate(filler.fileno(), os.fstat(filler.fileno()).st_size, size)
        return True

    def _helpers(self, ranks: list[int]) -> list[int]:
        every = [pid for rank in ranks for pid in children(rank)]
        return sorted(pid for pid in every if any(name in command_line(pid) for name in HELPERS))

    # A start.

    def _run(self, number: int, start: Start, happenings: tuple[Happening, ...], fault: str) -> None:
        self.outcome.starts += 1
        options = start.options
        self._rules = Rules(options.latest, options.every, options.best)
        self._uploads = options.uploads
        keys = {**options.keys(), **self.stores.keys(options.uploads, self._name)}
        if self.life.poisoned:
            keys["enable_first_step_checkpoint"] = True
        keys["digest_tensors"] = self.life.digests
        environment = {
            **os.environ,
            **FORKED_RANKS,
            **self.stores.environment,
            "OMP_NUM_THREADS": "1",
            "SOAK_RECORDS": str(self._records),
            "SOAK_START": str(number),
            "SOAK_POISON": ",".join(map(str, self.life.poisoned)),
            "SOAK_PLANT": self.plant if number > 1 or self.plant == "leak" else "",
            "TORCHTITAN_LITE_FAULT": fault,
        }
        arguments = command(start.topology, self.dump, keys, self.folder, hang_seconds=self.life.hang_seconds)
        if fault:
            self._note(f"fault {fault.partition(':')[0]}" if ";" not in fault else "fault x 2")
        happened = {"fault"} if fault else set()
        least = self._expected.least
        in_uploads = max(self._uploaded[options.uploads], default=0)
        began = time.time()
        restarts = [f"--max-restarts={start.restarts}", "--monitor-interval=0.1"]
        self._torchrun = run_module("torch.distributed.run", [*restarts, *arguments], self.log, environment)
        self._begun_at = self._trained_at = time.monotonic()
        waiting = list(happenings)
        next_steps = waiting[0].steps if waiting else 0
        due: float | None = None
        counted = 0
        while self._torchrun.poll() is None:
            fresh = self._read_records()
            counted += sum(line["event"] == "trained" and line["rank"] == 0 for line in fresh)
            self._follow(fresh, max(least, in_uploads))
            if fresh:
                self._trained_at = time.monotonic()
            least_changed = any(line["event"] == "committed" for line in fresh)
            if least_changed:
                least = self._expected.least
            self._undo(time.monotonic())
            if waiting and due is None and counted >= next_steps:
                due = time.monotonic() + waiting[0].delay
            if due is not None and time.monotonic() >= due:
                happening = waiting.pop(0)
                happened.add(happening.kind)
                self._do(happening)
                least, due = self._expected.least, None
                next_steps = counted + waiting[0].steps if waiting else 0
            is_stopped = any(each.kind in STOPS for each in self._lasting)
            if not is_stopped and time.monotonic() - self._trained_at > STUCK_SECONDS:
                self.outcome.wrong.append(f"start {number} did nothing for {STUCK_SECONDS:.0f} s: {self.tail()}")
                self._end_all()
            time.sleep(0.01)
        code = self._torchrun.wait()
        self._wait_for_ranks()
        self._torchrun = None
        self._undo(float("inf"))
        self._follow(self._read_records(), max(least, in_uploads))
        self._launched.append((began, time.time()))
        self.outcome.wrong += [f"after start {number}: {wrong}" for wrong in self._expected.look()]
        if code and not happened & {*MAY_END_A_START}:
            self.outcome.wrong.append(f"start {number} ended with {code}, and nothing was done to it: {self.tail()}")
        self.outcome.leaked += [f"after start {number}: {leak}" for leak in self._leaks.after_start(self.lines)]
        self._is_recovering = bool(code)

    def _wait_for_ranks(self) -> None:
        """Wait until no process of the start is left but the keeper; kill what stays."""
        deadline = time.monotonic() + 40
        while left := self._leaks.processes():
            self._undo(time.monotonic())
            if time.monotonic() > deadline:
                self.outcome.leaked.append(
                    f"{len(left)} processes after a start: {[command_line(p)[:80] for p in left]}"
                )
                for pid in left:
                    send(pid, signal.SIGKILL)
                return
            time.sleep(0.02)

    def _undo(self, now: float) -> None:
        for each in [each for each in self._lasting if each.until <= now]:
            each.undo()
            self._lasting.remove(each)

    def _end_all(self) -> None:
        self._undo(float("inf"))
        if self._torchrun is not None:
            for pid in [*children(self._torchrun.pid), self._torchrun.pid]:
                send(pid, signal.SIGKILL)
        while left := self._leaks.processes():
            for pid in left:
                send(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _read_records(self) -> list[dict[str, Any]]:
        fresh: list[dict[str, Any]] = []
        for path in sorted(self._records.glob("rank*.jsonl")):
            rank = int(path.stem.removeprefix("rank"))
            with path.open("rb") as file:
                file.seek(self._read.get(rank, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read[rank] = self._read.get(rank, 0) + len(whole)
            fresh += [{**json.loads(line), "rank": rank} for line in whole.splitlines()]
        self.lines += fresh
        return fresh

    def _follow(self, fresh: list[dict[str, Any]], least: int) -> None:
        """Take note of what ranks have recorded; find a start that resumed too early."""
        for line in fresh:
            event, step = line["event"], line["step"]
            if line["rank"] and event != "trained":
                continue
            if event == "trained" and not line["rank"]:
                self.losses[step] = float.fromhex(line["loss"])
                self._highest = max(self._highest, step)
                self._is_recovering = False
            elif event == "begun":
                if line["start"].endswith(".0") and step < least:
                    self.outcome.lost.append(f"start {line['start']} resumed step {step}, {least} was acknowledged")
                self.outcome.wrong += [f"at start {line['start']}: {wrong}" for wrong in self._expected.look()]
            elif event == "committed":
                self.outcome.saves += 1
                self._expected.acknowledged(step, self._rules, self.losses)
            elif event == "uploaded":
                self._uploaded[self._uploads].add(step)

    # The end.

    def _has_finished(self) -> bool:
        return any(line["event"] == "finished" for line in self.lines)

    def _look_at_the_end(self) -> None:
        outcome = self.outcome
        compared = follow(self.lines, self.life, self.references)
        outcome.wrong += compared.wrong
        outcome.wrong += self._look_at_contents()
        outcome.leaked += self._leaks.at_the_end(
            self._root, self.dump, was_killed=any("kill" in e for e in outcome.events)
        )
        outcome.wrong += self._look_at_uploads()
        outcome.wrong += self._look_at_ledger(compared.redone)
        outcome.figures |= {"steps": float(compared.trained), "redone": float(compared.redone)}

    def _look_at_contents(self) -> list[str]:
        """Compare each remaining checkpoint, read by stock DCP, with that of the run that nothing befell."""
        if len(self.life.topologies) > 1:
            return []
        wanted, wrong = self.references.of(self.life.topologies[0], self.life.poisoned).contents, []
        for step in self._expected.intact():
            if (text := wanted.get(str(step))) and (
                found := self.references.content(self._root / f"step-{step}")
            ) != text:
                wrong.append(f"step {step} holds other tensors than the uninterrupted run: {found} for {text}")
        return wrong

    def _look_at_uploads(self) -> list[str]:
        """Compare the uploaded steps with those on the disk."""
        return self.stores.differences(self._name, self._root, set(self._expected.intact()))

    def _look_at_ledger(self, redone: int) -> list[str]:
        accounts, wrong = read_accounts(self.dump), []
        wall = self._launched[-1][1] - self._launched[0][0]
        self.outcome.figures |= {"goodput": round(accounts.goodput, 3), "ledger": round(accounts.wall_seconds, 1)}
        self.outcome.figures["wall"] = round(wall, 1)
        # A kill between a step and its record leaves one that only the ledger has.
        if abs(accounts.redone_steps - redone) > len({line["start"] for line in self.lines}):
            wrong.append(f"the ledger has {accounts.redone_steps} steps trained again, {redone} were")
        if not wall - 8 <= accounts.wall_seconds <= wall + 1:
            wrong.append(f"the ledger has {accounts.wall_seconds:.1f} s, the run took {wall:.1f} s")
        return wrong

    def tail(self) -> str:
        """Return the end of the output."""
        return self.log.read_text(errors="replace")[-3000:]
