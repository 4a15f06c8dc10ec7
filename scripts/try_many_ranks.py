"""Run many real ranks on one machine: layouts, kills, a slow rank and stopped ones, and what reaches the coordinator.

    python scripts/try_many_ranks.py --json many_ranks.json
    python scripts/try_many_ranks.py --ranks 8 --few 4 --kills 2 --parts layouts kills drawn

Each rank is a process, forked from a server that has loaded torch, and runs the trainer: a Llama of four layers, gloo
over loopback (many_ranks/starts.py). `layouts`: each one trains four steps and saves each; new processes load step 2
and train on, and those of the next layout load it and verify every full tensor. `kills`: at every point of a save and
of a load, with --few ranks; `drawn`: with --ranks, at random. `slow`, `stopped`: one rank. `traffic`: what the
coordinator sends, receives and computes, next to what scripts/simulate_scale.py says.

A state is right if the digest of all local tensors of every rank is that of the layout's straight run, bit for bit; so
are losses and gradient norms. A kill is followed by no signal, as torchrun would send: a rank has to notice by itself,
and is counted as `signalled` if it had not by the deadline. Returns 1 if anything was lost, wrong or left.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import random
import re
import signal
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
os.environ["PYTHONPATH"] = str(ROOT)  # The server of the forks imports tests.loaded.
os.environ |= {"TORCH_CPP_LOG_LEVEL": "FATAL", "TORCHTITAN_LITE_MEMORY": "off", "OMP_NUM_THREADS": "1"}

import torch  # noqa: E402  # after the lines above
from many_ranks.starts import START, STEPS, Ended, Start, carried_out, differing, layouts, linked  # noqa: E402
from scale_simulation.costs import ours  # noqa: E402
from scale_simulation.plans import mesh_of, state_of  # noqa: E402

from torchtitan_lite.config.job_config import Model  # noqa: E402
from torchtitan_lite.data.tokenizer import build_tokenizer  # noqa: E402
from torchtitan_lite.models.llama.args import FLAVORS  # noqa: E402
from torchtitan_lite.store import layout  # noqa: E402

PARTS = ("layouts", "kills", "drawn", "slow", "stopped", "traffic")
ON_COORDINATOR = "recover lease listing load read step save preflight plan open write fsync metadata manifest seal"
ON_COORDINATOR += " commit committed purge exit"
ON_OTHERS = "load read step save plan open write fsync exit"
OF_ASYNC = (("stage", 0), ("stage", 1), ("write", 1), ("fsync", 0), ("commit", 0), ("committed", 0))
"""Points that are tried with `async`, on the coordinator (0) or on another rank."""
IN_ALL_MODES = ("stage", "plan", "open", "write", "fsync", "metadata", "manifest", "seal", "commit", "committed")
LEAVE_SECONDS_PER_RANK = 1.0
"""From a kill until all others have left the job: two cores run them all."""
STOPPED_SECONDS_PER_RANK = 1.0
"""Beyond the bound, after which a rank that is stopped is to be named."""
SLOW_SECONDS = 20.0
TIMEOUT_SECONDS, HANG_SECONDS = 60, 45
"""checkpoint.timeout_seconds and comm.hang_seconds where a rank stops: in a save the first comes before the second."""

Case = tuple[str, str, str, int]
"""A kill: layout, async_mode, point, rank."""


class Trial:
    """What is tried, and what came of it: `counts`, and `records` of all parts."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self._folder = options, folder
        self.counts = Counter(dict.fromkeys(("kills", "found", "lost", "wrong", "left", "signalled", "not_killed"), 0))
        self.records: list[dict[str, Any]] = []
        self._straight: dict[tuple[str, int], Ended] = {}
        self._number = 0

    def layouts(self) -> None:
        """Resume each layout, and load it into the next one."""
        ranks, names = self.options.ranks, [*layouts(self.options.ranks)]
        print(f"layout              resumed {START} to {STEPS}    into layout         verified   load   start, seconds")
        for name, other in zip(names, [*names[1:], names[0]], strict=True):
            straight = self._straight_run(name, ranks)
            resumed = carried_out(linked(straight, self._new(name, ranks)))
            verifies = self._new(other, ranks, only_loads=True, checkpoint={"digest_tensors": ("load",)})
            into = carried_out(linked(straight, verifies))
            found = re.search(r"Verified (\d+) tensors", into.output)
            num_verified = int(found[1]) if found and into.codes == [0] * ranks else 0
            is_complete = sorted(resumed.states()) == [*range(START + 1, STEPS + 1)] and len(resumed.resumed) == ranks
            wrong = [*differing(resumed, straight), *([] if is_complete and num_verified else ["not complete"])]
            self.counts["wrong"] += bool(wrong)
            seconds = [round(each.seconds) for each in (straight, resumed, into)]
            self._note(
                f"{name:18}  {', '.join(wrong) or 'all equal':15}  {other:18}  {num_verified:>8}  {_load():>5}   "
                f"{seconds}",
                {"layout": name, "into": other, "wrong": wrong, "verified": num_verified, "seconds": seconds},
            )

    def kills(self) -> None:
        """Kill one of a few ranks, at every point."""
        name, other = [*layouts(self.options.few)][1], self.options.few // 3
        cases = [(name, "disabled", point, 0) for point in (*ON_COORDINATOR.split(), "quarantine")]
        cases += [(name, "disabled", point, other) for point in ON_OTHERS.split()]
        cases += [(name, "async", point, other * which) for point, which in OF_ASYNC]
        self._kill_each([case for case in cases if case[2] in (self.options.points or case)], self.options.few)

    def drawn(self) -> None:
        """Kill one of many ranks, in a layout, a mode and at a point that are drawn."""
        ranks, drawn = self.options.ranks, random.Random(self.options.seed)
        cases = []
        for _ in range(self.options.kills):
            rank = drawn.choice((0, drawn.randrange(1, ranks)))
            point = drawn.choice((ON_OTHERS if rank else ON_COORDINATOR).split())
            mode = drawn.choice(("disabled", "async")) if point in IN_ALL_MODES else "disabled"
            cases.append((drawn.choice([*layouts(ranks)]), mode, point, rank))
        self._kill_each(cases, ranks, only_loads=True)

    def slow(self) -> None:
        """Let one rank write slowly: its save must succeed."""
        ranks = self.options.ranks
        name, rank = next(iter(layouts(ranks))), ranks // 2 + 1
        straight = self._straight_run(name, ranks)
        fault = f"slow@write:rank={rank},seconds={SLOW_SECONDS:g}"
        ended = carried_out(linked(straight, self._new(name, ranks, steps=START + 1, fault=fault)))
        is_right = ended.codes == [0] * ranks and ended.committed() == START + 1 and not differing(ended, straight)
        self.counts["wrong"] += not is_right
        saved = re.findall(rf"Saved step {START + 1}: .*", ended.output)
        said = Counter(re.findall(r" - (?:WARNING|ERROR) - ((?!Changed|.*FAULT).*)", ended.output))
        self._note(
            f"slow, {name}: rank {rank} writes for {SLOW_SECONDS:g} s more: {saved or 'NOT SAVED'}, "
            f"{'all equal' if is_right else 'WRONG'}; others said: {dict(said) or 'nothing'}",
            {"layout": name, "rank": rank, "right": is_right, "saved": saved, "said": said},
        )

    def stopped(self) -> None:
        """Stop one rank, in a save and between saves: all others must end, and what they say must name it."""
        ranks = self.options.ranks
        name, rank = next(iter(layouts(ranks))), ranks // 2 + 1
        straight = self._straight_run(name, ranks)
        for point, bound, keys in (
            ("write", TIMEOUT_SECONDS + HANG_SECONDS, {"checkpoint": {"timeout_seconds": TIMEOUT_SECONDS}}),
            ("step", HANG_SECONDS, {"checkpoint": {"interval": 2 * STEPS}}),
        ):
            fault = f"stop@{point}:rank={rank},step={STEPS}"
            start = self._new(name, ranks, steps=STEPS + 2, fault=fault, hang_seconds=HANG_SECONDS, **keys)
            ended = carried_out(linked(straight, start), bound + STOPPED_SECONDS_PER_RANK * ranks)
            raised = ended.errors()
            remaining = [each for each, code in enumerate(ended.codes) if code is None and each != rank]
            lines = re.findall(rf"(?:.* - )?(.*\b[Rr]ank {rank}\b.*)", ended.output)
            named = sorted({line.strip()[:150] for line in lines if "fault" not in line})
            self.counts["signalled"] += len(remaining)
            self._note(
                f"stopped, {name}: rank {rank} at {point}, bound {bound} s: {ranks - 1 - len(remaining)} of "
                f"{ranks - 1} others had ended {ended.seconds - ended.down_seconds:.0f} s after it\n"
                f"    named: {named or 'IT WAS NOT'}\n    raised: {raised or 'nothing'}",
                {
                    "rank": rank,
                    "point": point,
                    "bound": bound,
                    "remaining": remaining,
                    "named": named,
                    "raised": raised,
                },
            )

    def traffic(self) -> None:
        """Count what the coordinator sends, receives and computes in a save and in a load, next to the simulation's."""
        few, many = self.options.few, self.options.ranks
        vocabulary = build_tokenizer(Model().tokenizer_path).vocab_size
        FLAVORS["many_ranks"] = dataclasses.replace(FLAVORS["debugmodel"], vocab_size=vocabulary)
        print("ranks  what         messages in/out      bytes in    bytes out   CPU s   others'   load")
        for ranks in sorted({few, min(2 * few, many), many}):
            name, mesh = next(iter(layouts(ranks))), mesh_of("fsdp", ranks)
            saved = carried_out(self._new(name, ranks, steps=START))
            loaded = carried_out(linked(saved, self._new(name, ranks, only_loads=True)))
            simulated = ours(state_of("many_ranks", mesh), mesh)
            for what, of, call, number in (
                ("first save", saved, "save", 0),
                ("next save", saved, "save", 1),
                ("load", loaded, "load", 0),
            ):
                line, *_ = by_rank = [of.said(call, rank)[number] for rank in range(ranks)]
                others = [each["cpu_seconds"] for each in by_rank[1:]]
                self._note(
                    f"{ranks:5}  {what:10} {line['messages_in']:9,}/{line['messages_out']:<6,} {line['bytes_in']:12,} "
                    f"{line['bytes_out']:12,} {line['cpu_seconds']:7.2f} {statistics.median(others):9.2f}  "
                    f"{_load():>5}",
                    {"ranks": ranks, "what": what, **line, "others_cpu_seconds": statistics.median(others)},
                )
            first, results = simulated["first_gathered_bytes"], simulated["results_gathered_bytes"]
            manifest = (saved.start.folder / "checkpoint" / layout.step_dir(START) / layout.MANIFEST).stat().st_size
            self._note(
                f"       simulated: first save {first + results:,.0f} bytes in, "
                f"{simulated['first_scattered_bytes']:,.0f} out, "
                f"{simulated['first_coordinator_seconds']:.3f} s; next save {results:,.0f} in, "
                f"{simulated['cached_coordinator_seconds']:.3f} s; load {simulated['load_planning_seconds']:.3f} s; "
                f"manifest {simulated['manifest_bytes']:,.0f} bytes, really {manifest:,}",
                {"ranks": ranks, "simulated": simulated, "manifest_bytes": manifest},
            )

    def _kill_each(self, cases: Sequence[Case], ranks: int, *, only_loads: bool = False) -> None:
        limit = LEAVE_SECONDS_PER_RANK * ranks
        print(f"{ranks} ranks; left: others that had left the job within {limit:g} s; when the median and the last had")
        print("layout              mode      point       rank   left    median   last   next start")
        for name, mode, point, rank in cases:
            straight = self._straight_run(name, ranks)
            # The last save of a run is not asynchronous. Ranks that train on make a last group after their first save.
            continues = mode == "async" or point == "purge"
            at = ("after=1" if point == "purge" else f"step={STEPS}") if continues else "times=1"
            last = STEPS + 1 if continues else START + 1
            start = self._new(name, ranks, steps=last, fault=f"kill@{point}:rank={rank},{at}")
            start = dataclasses.replace(start, checkpoint={"async_mode": mode, "keep_latest_k": 2})
            linked(straight, start, (START - 1, START))
            if point == "quarantine":
                _damage(start.folder / "checkpoint" / layout.step_dir(START) / layout.MANIFEST)
            killed = carried_out(start, limit)
            acknowledged = killed.committed() or START - (point == "quarantine")
            again = dataclasses.replace(start, fault="", steps=STEPS + continues, only_loads=only_loads or continues)
            following = carried_out(again)
            resumed = following.resumed[0][0] if len(following.resumed) == ranks else 0
            wrong, left = differing(killed, straight) + differing(following, straight), following.left()
            raised = [line["time"] for each in range(ranks) for line in killed.said("raised", each)]
            heard = [max(0.0, at - killed.down_at) for at in raised] or [0.0]
            found = {
                "kills": killed.codes[rank] == -signal.SIGKILL,
                "found": resumed >= acknowledged,
                "lost": resumed < acknowledged or following.codes != [0] * ranks,
                "wrong": bool(wrong),
                "left": bool(left),
                "not_killed": killed.codes[rank] != -signal.SIGKILL,
            }
            num_signalled = killed.codes.count(None)
            self.counts.update({what: int(is_so) for what, is_so in found.items()}, signalled=num_signalled)
            bad = [what for what in ("lost", "wrong", "left", "not_killed") if found[what]]
            self._note(
                f"{name:18}  {mode:8}  {point:10}  {rank:4}  {ranks - 1 - num_signalled:3}/{ranks - 1:<3} "
                f"{statistics.median(heard):6.1f} {max(heard):6.1f}   step {resumed} "
                f"{', '.join(bad) or 'equal, nothing left'}",
                {"layout": name, "mode": mode, "point": point, "rank": rank, "heard": heard, "codes": killed.codes}
                | {"acknowledged": acknowledged, "resumed": resumed, "bad": bad, "left": left, "differing": wrong}
                | {"raised": killed.errors()},
            )
            if self.options.logs and (bad or num_signalled):
                for ended, which in ((killed, "killed"), (following, "next")):
                    log = self.options.logs / f"{ranks}-{point}-{rank}-{mode}.{which}.log"
                    log.write_text(f"{ended.codes}\n{ended.output}")

    def _new(self, name: str, ranks: int, **more: Any) -> Start:
        self._number += 1
        return Start(self._folder / f"job{self._number}", name, ranks, **more)

    def _straight_run(self, name: str, ranks: int) -> Ended:
        """Return the run of a layout that is not stopped."""
        if (name, ranks) not in self._straight:
            ended = carried_out(self._new(name, ranks, checkpoint={"digest_tensors": ("save",)}))
            if ended.codes != [0] * ranks:
                sys.exit(f"{name}: the straight run failed, exit codes {ended.codes}:\n{ended.output[-3000:]}")
            self._straight[name, ranks] = ended
        return self._straight[name, ranks]

    def _note(self, line: str, record: dict[str, Any]) -> None:
        self.records.append(record)
        print(line, flush=True)


def _damage(manifest: Path) -> None:
    data = manifest.read_bytes()
    manifest.unlink()  # Another run has it, too.
    manifest.write_bytes(data.replace(b'"step"', b'"stop"', 1))


def _load() -> str:
    return f"{os.getloadavg()[0]:.0f}"


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64, help="a power of two, from 4 (64)")
    parser.add_argument("--few", type=int, default=16, help="ranks of the kills at every point (16)")
    parser.add_argument("--kills", type=int, default=20, help="that are drawn (20)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (0)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--points", nargs="+", help="of the part kills; default: all")
    parser.add_argument("--folder", type=Path, help="for everything that the runs write; default: a temporary one")
    parser.add_argument("--logs", type=Path, help="folder for the output of ranks where something was wrong")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
    if options.folder is not None:
        Path(options.folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        trial = Trial(options, Path(folder))
        for part in options.parts:
            getattr(trial, part)()
    summary = {"seed": options.seed, **machine, **trial.counts}
    print(json.dumps(summary))
    if options.json:
        options.json.write_text(json.dumps({**summary, "records": trial.records}, indent=1) + "\n", encoding="utf-8")
    return int(any(trial.counts[name] for name in ("lost", "wrong", "left", "not_killed")))


if __name__ == "__main__":
    sys.exit(main())
