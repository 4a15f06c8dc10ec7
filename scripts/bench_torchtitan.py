"""Measure the managers of torchtitan's trainer: its own, and that of this package in its place.

    ./run_tests.sh --all --collect-only    # installs torchtitan into .venv
    .venv/bin/python scripts/bench_torchtitan.py --rounds 5

Its debug model trains on two ranks with FSDP2, on processors, saves every fifth step, and is resumed. Save: the
seconds that training waits in the calls of the manager; the first one with all calls before it, in which buffers are
made. Load: the call that resumes, from disk, while the page cache still has the files. Of the slower rank each time.
torchtitan's async_with_pinned_mem needs a GPU, and its other manager, TorchCheckpointingManager, cannot save in 0.3.0.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.integrations.served import Served, served  # noqa: E402  # after the line above
from tests.integrations.titan_place import SMALL, with_data  # noqa: E402
from tests.titan_packages import environment  # noqa: E402

MODES = ("disabled", "async", "async_with_pinned_mem")
MANAGERS = [("torchtitan", mode) for mode in MODES[:2]] + [("ours", mode) for mode in MODES]
STEPS, INTERVAL = 21, 5
CALLS = ("save", "maybe_wait_for_staging")


def main() -> int:
    """Run the command; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path())
    args = parser.parse_args()
    found: dict[tuple[str, str], list[tuple[float, ...]]] = {each: [] for each in MANAGERS}
    with tempfile.TemporaryDirectory(dir=args.folder.absolute()) as folder:
        place = with_data(Path(folder))
        # Ours would otherwise load from memory.
        with served("titan_on_cpu", environment(HF_HOME=place / "cache", TORCHTITAN_LITE_MEMORY="off")) as server:
            for number in range(args.rounds):
                for each in random.Random(number).sample(MANAGERS, len(MANAGERS)):
                    found[each].append(_measure(server, place, *each))
    print(f"{'seconds':30}" + "".join(f"{name:>26}" for name in ("first save", "later save", "load")))
    for each in MANAGERS:
        figures = zip(*found[each], strict=True)
        print(f"{' '.join(each):30}" + "".join(f"{_figure(values):>26}" for values in figures))
    return 0


def _measure(server: Served, place: Path, manager: str, mode: str) -> tuple[float, ...]:
    """Train and resume; return the seconds of the first save, of the median later one, and of the load."""
    arguments = [*SMALL, f"--checkpoint.interval={INTERVAL}", f"--checkpoint.async_mode={mode}", "--dump_folder=run"]
    outputs = []
    for steps in (STEPS, STEPS + 1):
        ended = server.call(
            *("timed", place / "log", 2),
            **{"place": place, "own": manager == "torchtitan", "arguments": [*arguments, f"--training.steps={steps}"]},
        )
        outputs.append(ended.output)
        if any(ended.codes):
            sys.exit(ended.output)
        (place / "log").unlink()
    shutil.rmtree(place / "run")
    first, later, load = [], [], []
    for rank in (0, 1):
        steps = [sum(pair) for pair in zip(*(_seconds(outputs[0], rank, call) for call in CALLS), strict=True)]
        # Up to the next save; the last one, which waits for all of it in each mode, is left out.
        saves = [sum(steps[at : at + INTERVAL]) for at in range(INTERVAL - 1, STEPS - 2, INTERVAL)]
        first.append(sum(steps[: INTERVAL - 1]) + saves[0])
        later.append(statistics.median(saves[1:]))
        load.append(_seconds(outputs[1], rank, "load")[0])
    return max(first), max(later), max(load)


def _seconds(output: str, rank: int, call: str) -> list[float]:
    return [float(each) for each in re.findall(rf"^rank {rank} {call} (\S+)$", output, re.MULTILINE)]


def _figure(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    sys.exit(main())
