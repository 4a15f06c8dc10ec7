"""Train a small Llama again and again while nearly everything that can go wrong does, and look for what is lost.

    python scripts/soak.py --seconds 540 --seed 1 --folder /var/tmp/soak
    python scripts/soak.py --sum docs/measured/soak.jsonl

A seed draws lives (soaking/drawn.py): runs of whole jobs under torchrun, with kills, stops, signals, a full disk,
damaged and removed checkpoints, slow and hanging stores, lost disks, poisoned batches, other options, other ranks. A
life is compared with a run of the same samples that nothing befell: losses, states and checkpoints bit for bit, with a
tolerance after a change of ranks or parallelism. soaking/expected.py says which checkpoints must be there. Each life
adds a line to FOLDER/record.jsonl; the same command again continues with the next life. As root, the run is on a small
file system of its own, which fills up, and has a /dev/shm of its own. `--plant` adds a defect, which has to be found:
exit code 1. Without the right to mount no disk fills up.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # tests/ is not installed with the package.

DISK_BYTES = 192 * 2**20
SHARED_BYTES = 2**30
ENTERED = "SOAK_ENTERED"
"""A variable: this process has file systems of its own."""
LAST_LIFE_SECONDS = 45.0
"""No life begins with less time left."""


def main() -> int:
    """Run the command; return 1 if anything was lost, wrong or leaked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--lives", type=int, default=10**6, help="at most")
    parser.add_argument("--life", type=int, help="only this one, again")
    parser.add_argument("--references", type=Path, help="folder of the uninterrupted runs, to share it")
    parser.add_argument("--plant", choices=("loss", "bit", "leak"), default="", help="a defect that has to be found")
    parser.add_argument("--sum", type=Path, help="only add up the records in this file")
    args = parser.parse_args()
    if args.sum:
        print(summed(map(json.loads, args.sum.read_text().splitlines())))
        return 0
    if ENTERED not in os.environ and _may_mount():
        # Its mounts end with it, however it ends.
        os.environ[ENTERED] = "1"
        os.execvp("unshare", ["unshare", "--mount", sys.executable, *sys.argv])
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="soak-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return soak(args, folder)


def soak(args: argparse.Namespace, folder: Path) -> int:
    """Live until the time is over; return the exit code."""
    disk = folder / "disk"
    disk.mkdir(exist_ok=True)
    if ENTERED in os.environ:
        _mount(disk, DISK_BYTES)
        _mount(Path("/dev/shm"), SHARED_BYTES)
    from scripts.soaking.drawn import draw
    from scripts.soaking.leaks import adopt_orphans
    from scripts.soaking.life import Lived
    from scripts.soaking.references import References
    from scripts.soaking.stores import running_stores
    from tests import keepers
    from tests.forked import Forked

    deadline, portion = time.monotonic() + args.seconds, time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    commit = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # What gloo says of ranks that are killed.
    adopt_orphans()
    Forked(time.sleep, 0).wait(120)
    record, failed = folder / "record.jsonl", False
    number = len(record.read_text().splitlines()) if record.exists() else 0
    references = References(args.references or folder / "references")
    with running_stores(folder / "uploads") as stores:
        for lived_before in range(args.lives):
            if lived_before and time.monotonic() > deadline - LAST_LIFE_SECONDS:
                break
            life = draw(f"{args.seed}:{number if args.life is None else args.life}")
            references.of(life.topologies[0], life.poisoned)
            here = folder / f"life-{number}"
            shutil.rmtree(here, ignore_errors=True)
            with keepers.tier() as runtime:
                lived = Lived(life, here, disk, runtime, references, stores, args.plant)
                outcome = lived.live(deadline)
            with record.open("a") as file:
                file.write(json.dumps({**asdict(outcome), "commit": commit.stdout.strip(), "portion": portion}) + "\n")
            bad = [*outcome.lost, *outcome.wrong, *outcome.leaked]
            failed |= bool(bad)
            print(_line(outcome), flush=True)
            for what in bad:
                print(f"    {what}", flush=True)
            if not bad:
                shutil.rmtree(here, ignore_errors=True)
            _empty(disk)
            _empty(folder / "uploads")
            number += 1
    print(summed(map(json.loads, record.read_text().splitlines())))
    return int(failed)


def summed(records: Iterable[dict[str, Any]]) -> str:
    """Return what the lives of `records` add up to, in words and a table."""
    events, during, total = Counter[str](), Counter[str](), Counter[str]()
    for record in records:
        total["lives"] += 1
        for what in ("starts", "saves", "seconds"):
            total[what] += record[what]
        for what in ("lost", "wrong", "leaked"):
            total[what] += len(record[what])
        total["steps"] += int(record["figures"].get("steps", 0))
        for event in record["events"]:
            kind, _, under_way = event.partition(" + ")
            events[kind] += 1
            during[kind] += bool(under_way)
    lines = [
        f"{total['lives']} lives, {total['starts']} starts, {total['steps']} steps, {total['saves']} saves, "
        f"{total['seconds'] / 60:.0f} minutes",
        f"{sum(events.values())} injected events, {sum(during.values())} while another was under way: "
        f"{total['lost']} lost, {total['wrong']} wrong, {total['leaked']} leaked",
        "",
        f"{'event':32} {'times':>5} {'meanwhile':>9}",
        *(f"{kind:32} {count:5} {during[kind]:9}" for kind, count in events.most_common()),
    ]
    return "\n".join(lines)


def _line(outcome: Any) -> str:
    what = [f"{outcome.starts} starts", f"{len(outcome.events)} events", f"{outcome.saves} saves"]
    return f"life {outcome.seed}: {', '.join(what)}, {outcome.seconds:.0f} s; " + (
        "as promised" if not (outcome.lost or outcome.wrong or outcome.leaked) else "FAILED"
    )


def _may_mount() -> bool:
    is_there = os.geteuid() == 0 and shutil.which("unshare") is not None
    return is_there and not subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode


def _mount(place: Path, num_bytes: int) -> None:
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(place)]
    subprocess.run(command, check=True)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


if __name__ == "__main__":
    sys.exit(main())
