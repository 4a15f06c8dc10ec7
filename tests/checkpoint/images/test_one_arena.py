"""Images where each host has room for one copy of the state only: a save waits until the copy before it is an image."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint.images.spoiled import steps_in
from tests.forked import code_is_killed

SAVED = """
from pathlib import Path
from tests.checkpoint.images.image_runs import CopiesOnly, images_of, start
from torchtitan_lite import faults
from torchtitan_lite.memory.images import run_images
from torchtitan_lite.memory.images.pool import ImageStager

run_images.num_arenas = lambda found: 1
run_images.build_image_stager = lambda let_go: ImageStager(CopiesOnly(), let_go=let_go)
run = start(Path("run"), 0, interval=1)
faults.install("slow@digest:seconds=1,times=1;kill@mark:step=2", rank=0)
for _ in range(2):
    run.step()
run.manager.wait()
images_of(run).marker.wait(60)
raise SystemExit("no fault happened")
"""


def test_a_copy_is_not_overwritten_while_it_is_digested(tmp_path: Path, memory_tier: Path) -> None:
    code_is_killed(SAVED, tmp_path)
    assert steps_in(tmp_path / "run" / "checkpoint") == [], "else the bytes of step 2 are an image of step 1"
