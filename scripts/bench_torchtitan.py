"""Measure the managers of torchtitan's trainer: its own, and that of this package in its place.

    ./run_tests.sh --all --collect-only    # installs torchtitan into .venv
    .venv/bin/python scripts/bench_torchtitan.py --rounds 5

Its debug model trains on two ranks with FSDP2, on processors, saves every fifth step, and is resumed. Stall: the
seconds that training waits for one save, in all calls of the manager. Load: the call that resumes, from disk, while the
page cache still has the files. Of the slower rank each time. torchtitan's async_with_pinned_mem needs a GPU, and its
other manager, TorchCheckpointingManager, cannot save in 0.3.0.
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
NUM_SAVES = (STEPS - 1) // INTERVAL


def main() -> int:
    """Run the command; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path())
    args = parser.parse_args()
    stalls: dict[tuple[str, str], list[float]] = {each: [] for each in MANAGERS}
    loads: dict[tuple[str, str], list[float]] = {each: [] for each in MANAGERS}
    with tempfile.TemporaryDirectory(dir=args.folder.absolute()) as folder:
        place = with_data(Path(folder))
        # Ours would otherwise load from memory.
        with served("titan_on_cpu", environment(HF_HOME=place / "cache", TORCHTITAN_LITE_MEMORY="off")) as server:
            for number in range(args.rounds):
                for each in random.Random(number).sample(MANAGERS, len(MANAGERS)):
                    stall, load = _measure(server, place, *each)
                    stalls[each].append(stall)
                    loads[each].append(load)
    print(f"{'':36}{'stall of a save, s':>26}{'load, s':>26}")
    for each in MANAGERS:
        print(f"{' '.join(each):36}{_figure(stalls[each]):>26}{_figure(loads[each]):>26}")
    return 0


def _measure(server: Served, place: Path, manager: str, mode: str) -> tuple[float, float]:
    """Train and resume; return the seconds of a save's stall and of the load."""
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
    # The last save waits for all of it, in each mode.
    waits = [sum(_seconds(outputs[0], rank, "save|maybe_wait_for_staging")[:-1]) for rank in (0, 1)]
    return max(waits) / NUM_SAVES, max(_seconds(outputs[1], rank, "load")[0] for rank in (0, 1))


def _seconds(output: str, rank: int, calls: str) -> list[float]:
    return [float(each) for each in re.findall(rf"^rank {rank} (?:{calls}) (\S+)$", output, re.MULTILINE)]


def _figure(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    sys.exit(main())
