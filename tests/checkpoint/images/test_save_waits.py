"""A save that finds all arenas in use: it waits for one, and takes none whose image may be the only complete one."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint.images.spoiled import steps_in
from tests.forked import code_is_killed

SAVED = """
from pathlib import Path
from tests.checkpoint.images.image_runs import images_of, start
from torchtitan_lite import faults

run = start(Path("run"), 0, interval=5)
faults.install("slow@mark:seconds=1,times=2;kill@mark:after=1", rank=0)
for _ in range(5):  # Three are copied before the first one is complete; the save of 5 waits.
    run.step()
    images_of(run).stager.finish_preparation()
run.manager.wait()
images_of(run).marker.wait(60)
raise SystemExit("no fault happened")
"""


def test_a_save_that_waits_for_an_arena_leaves_the_only_complete_image(tmp_path: Path, memory_tier: Path) -> None:
    code_is_killed(SAVED, tmp_path)
    assert steps_in(tmp_path / "run" / "checkpoint") in ([1], [2]), "the first one that was copied"
