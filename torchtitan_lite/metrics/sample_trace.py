"""Which samples each step trained on, in {dump_folder}/samples/rankR.jsonl.

Each line is a step: {"step", "indices"}, the positions of this rank's samples in the run's order before the shuffle.
The files of all ranks, also of ranks that a smaller job no longer has, are one history. Over all restarts every step is
in it once, so it proves that no sample was repeated or skipped. Each rank writes its own file; only rank 0 drops lines.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torchtitan_lite.json_lines import JsonLines, start_history

SAMPLES_FOLDER = "samples"


class SampleTrace:
    """The trace of one rank. Give `writes` to one rank of each group that takes the same data."""

    def __init__(self, dump_folder: Path, *, rank: int, writes: bool) -> None:
        self._folder = dump_folder / SAMPLES_FOLDER
        self._is_first = rank == 0
        self._lines = JsonLines(self._folder / f"rank{rank}.jsonl") if writes else None

    def start(self, loaded_step: int) -> None:
        """Drop the lines of all ranks after `loaded_step`; at 0, a fresh start, move older files aside.

        Only rank 0 does it: no rank may `log` before `start` returned there.
        """
        if self._is_first:
            for path in sorted(self._folder.glob("rank*.jsonl")):
                start_history(path, loaded_step)

    def log(self, step: int, indices: Iterable[int]) -> None:
        """Write the samples of `step`."""
        if self._lines is not None:
            self._lines.append({"step": step, "indices": list(indices)})

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._lines is not None:
            self._lines.close()
