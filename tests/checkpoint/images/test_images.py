"""Images: every copy of the state in memory that is complete, whatever became of its save and of its trainer.

Ranks take the same decisions: an image that one rank cannot make counts on no rank.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.checkpoint.images.image_runs import CopiesOnly, held, held_by_rank, images_of, start, step, tier_on
from tests.checkpoint.sharded_run import same_everywhere
from tests.checkpoint.small_run import SmallRun
from tests.forked import code_is_killed
from tests.keepers import has_ended, keepers_in
from tests.logged import logged_warnings
from tests.ranks import on_two_ranks
from torchtitan_lite import faults
from torchtitan_lite.checkpoint.staging.mark import Mark, read_mark
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.memory.images import run_images
from torchtitan_lite.memory.images.pool import ImageStager
from torchtitan_lite.memory.images.tier import TakenOver
from torchtitan_lite.memory.keeper.client import Keeper
from torchtitan_lite.store.manifest import Manifest
from torchtitan_lite.store.store import CheckpointStore


@pytest.fixture
def digests_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have copies made without digests, as those of an accelerator's memory are."""

    monkeypatch.setattr(run_images, "build_image_stager", lambda let_go: ImageStager(CopiesOnly(), let_go=let_go))


@pytest.fixture(params=["with the copy", "later"])
def digests(request: pytest.FixtureRequest) -> None:
    """Have the digests taken with the copy, or later."""
    if request.param == "later":
        request.getfixturevalue("digests_later")


@pytest.mark.usefixtures("digests")
def test_every_step_leaves_an_image_and_the_last_two_or_three_are_held(tmp_path: Path, memory_tier: Path) -> None:
    run = start(tmp_path, 6)
    assert run.events.steps("image_ready")[-5:] == [2, 3, 4, 5, 6], "in step 1 the memory may still be made"
    cards = held(run.root, memory_tier)
    assert set(cards) == {4, 5, 6}
    card = cards[6]
    assert (card.rank, card.world_size, card.key.start != "", card.commits) == (0, 1, True, ())
    assert card.run.folder_id == CheckpointStore(run.root).folder_id(make=False)
    assert card.tables.tensors is not None and "model.first.weight" in card.tables.tensors
    run.manager.close()
    assert set(held(run.root, memory_tier)) == {4, 5, 6}, "they outlive the manager"


@pytest.mark.usefixtures("digests")
def test_an_image_has_the_bytes_of_the_file_of_a_save(tmp_path: Path, memory_tier: Path) -> None:
    run = start(tmp_path, 4, interval=4)
    run.manager.wait()
    (saved,) = CheckpointStore(run.root).committed()
    card = held(run.root, memory_tier)[4]
    assert card.record == FileRecord.of((saved.path / card.file).read_bytes())
    step(run)
    (known,) = held(run.root, memory_tier)[5].commits
    assert known.step == 4
    assert f'"digest": "{known.digest}"'.encode() in (saved.path / "manifest.json").read_bytes()[-64:]


def test_an_image_knows_its_run_and_the_last_checkpoints_on_disk(tmp_path: Path, memory_tier: Path) -> None:
    run = start(tmp_path, 6, interval=2)
    run.manager.wait()
    step(run)
    cards = held(run.root, memory_tier)
    card, manifest = cards[7], Manifest.of_folder(run.root / "step-6")
    assert manifest is not None
    assert [commit.step for commit in card.commits] == [2, 4, 6]
    assert (card.run.versions, card.run.config) == (manifest.versions, manifest.extra["config"])
    assert card.run.versions and card.run.config
    assert card.key.copy == cards[6].key.copy + 1 > 1, "copies of one step differ by it"


def test_a_run_that_rolled_back_drops_the_images_of_later_steps_and_resumes_from_those_of_its_branch(
    tmp_path: Path, memory_tier: Path
) -> None:
    run = start(tmp_path, 7, interval=4)
    assert run.manager.roll_back(8, "loss is nan") == 4
    assert set(held(run.root, memory_tier)) <= {4}
    for _ in range(2):
        step(run)
    cards = held(run.root, memory_tier)
    assert set(cards) >= {5, 6} and cards[6].run.lineage.ancestors[0][0] == 4
    run.manager.close()
    again = start(tmp_path, 0, interval=4)
    assert (again.train_state.step, again.events.figures("loaded")["origin"]) == (6, "memory")
    for _ in range(2):
        step(again)
    again.manager.close()
    assert again.committed() == [4, 8]
    lineage = json.loads((again.root / "step-8" / "manifest.json").read_text())["lineage"]
    assert lineage["ancestors"][0][0] == 4 and lineage["run_id"] == cards[6].run.lineage.run_id


@pytest.mark.usefixtures("digests")
def test_without_an_interval_the_copy_of_a_save_is_the_image_until_the_next_copy(
    tmp_path: Path, memory_tier: Path
) -> None:
    run = start(tmp_path, 2, memory_interval=0, interval=2)
    assert run.manager.wait() > 0 and images_of(run).marker.wait(60)
    assert set(held(run.root, memory_tier)) == {2}
    step(run)
    assert set(held(run.root, memory_tier)) == {2}
    step(run)
    assert run.manager.wait() > 0 and images_of(run).marker.wait(60)
    assert set(held(run.root, memory_tier)) == {4}
    assert run.events.steps("image_ready") == [2, 4]


@pytest.mark.usefixtures("digests")
@pytest.mark.parametrize("interval", [0, 1])
def test_the_copy_of_a_failed_save_is_an_image(tmp_path: Path, memory_tier: Path, interval: int) -> None:
    run = start(tmp_path, 1, memory_interval=interval, interval=2)
    faults.install("EIO@fsync:times=always", rank=0)
    step(run)
    assert run.manager.wait() == -1
    assert images_of(run).marker.wait(60)
    assert run.events.steps("save_failed") == [2]
    assert max(held(run.root, memory_tier)) == 2


@pytest.mark.usefixtures("digests_later")
def test_a_digest_that_fails_is_a_warning_and_three_in_a_row_end_the_images(
    tmp_path: Path, memory_tier: Path, caplog: pytest.LogCaptureFixture
) -> None:
    faults.install("EIO@digest:times=always", rank=0)
    run = start(tmp_path, 8, interval=3)
    assert run.manager.wait() == 6, "saves continue"
    assert "image_ready" not in {event for event, _, _ in run.events.recorded}
    assert caplog.text.count("has no in-memory snapshot of rank 0") == 3
    assert caplog.text.count("No more in-memory snapshots in this start") == 1


@pytest.mark.usefixtures("digests_later")
def test_images_continue_after_the_writer_process_was_killed(tmp_path: Path, memory_tier: Path) -> None:
    run = start(tmp_path, 3)
    process = images_of(run).process
    assert process is not None and process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    for _ in range(3):
        step(run)
    assert run.events.steps("image_ready")[-2:] == [5, 6]
    assert set(held(run.root, memory_tier)) >= {3, 5, 6} or set(held(run.root, memory_tier)) == {4, 5, 6}


def test_a_killed_keeper_ends_no_run_and_fails_no_save(tmp_path: Path, memory_tier: Path) -> None:
    run = start(tmp_path, 2)
    (pid,) = keepers_in(memory_tier)
    os.kill(pid, signal.SIGKILL)
    assert has_ended(pid)
    for _ in range(4):
        step(run)
    step(run, last=True)
    assert run.committed() == [7]


def test_a_finished_run_leaves_no_keeper_and_no_image(tmp_path: Path, memory_tier: Path) -> None:
    run = start(tmp_path, 3)
    (pid,) = keepers_in(memory_tier)
    step(run, last=True)
    assert has_ended(pid)
    arenas = [os.dup(slot.arena.fd) for slot in images_of(run).stager.pool.slots if slot.arena is not None]
    run.manager.close()
    assert [os.fstat(fd).st_blocks for fd in arenas] == [0] * len(arenas)
    for fd in arenas:
        os.close(fd)


@pytest.mark.parametrize(
    "options",
    [{"async_mode": "disabled", "memory_interval": 0}, {"memory_interval": 0, "memory_ttl_seconds": 0.0}],
    ids=["disabled", "no time to live"],
)
def test_a_run_without_copies_or_time_to_live_has_no_keeper(
    tmp_path: Path, memory_tier: Path, options: dict[str, Any]
) -> None:
    with SmallRun(tmp_path, **{"async_mode": "async", "interval": 1} | options).loaded() as run:
        run.step()
        run.manager.wait()
        assert keepers_in(memory_tier) == []


def test_a_run_with_the_tier_switched_off_leaves_nothing_of_it(tmp_path: Path) -> None:
    with SmallRun(tmp_path, async_mode="async", interval=1, memory_interval=1).loaded() as run:
        run.train(3, last=False)
        run.manager.wait()
        assert not [name for name in run.names() if not name.startswith("step-")]
        assert run.events.steps("image_ready") == []


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"async_mode": "disabled", "memory_interval": 5}, "checkpoint.async_mode = 'disabled'"),
        ({"async_mode": "async", "memory_interval": 5, "memory_ttl_seconds": 0.0}, "checkpoint.memory_ttl_seconds = 0"),
    ],
)
def test_an_interval_that_cannot_be_kept_is_refused_by_both_keys(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.memory_interval = 5") as refusal:
        Checkpoint(enable_checkpoint=True, **options)
    assert named in str(refusal.value)


KILLED = """
import os, signal
from pathlib import Path
from tests.checkpoint.images.image_runs import start, step
from torchtitan_lite import faults

run = start(Path("run"), 4)
faults.install("FAULT", rank=0)
for _ in range(3):
    step(run)
raise SystemExit("no fault happened")
"""


@pytest.mark.parametrize("fault", ["kill@image:step=6", "kill@mark:step=6", "kill@step:step=6"])
def test_after_a_kill_the_keeper_has_the_images_that_were_ready(tmp_path: Path, memory_tier: Path, fault: str) -> None:
    script = KILLED.replace("FAULT", fault)
    if "@step" in fault:
        script = script.replace(
            "    step(run)\n", "    faults.point('step', step=run.train_state.step)\n    step(run)\n"
        )
    code_is_killed(script, tmp_path)
    ready = 6 if "@step" in fault else 5
    found = held(tmp_path / "run" / "checkpoint", memory_tier)
    assert max(found) == ready
    assert len(found) >= 2, "while one is made, another stays"


def test_adopted_images_stay_until_a_newer_one_is_complete(tmp_path: Path, memory_tier: Path) -> None:
    first = start(tmp_path, 5)
    first.manager.close()
    keeper = Keeper(first.root, 600.0, runtime=memory_tier)
    found = sorted(keeper.held(), key=lambda each: -_step(each.mark_fd))
    second = SmallRun(tmp_path, async_mode="async", interval=100, memory_interval=1).loaded()
    images_of(second).use(TakenOver([(each.arena_fd, each.mark_fd) for each in found], (), 1))
    keeper.drop([each.name for each in found])
    assert set(held(first.root, memory_tier)) == {3, 4, 5}
    second.train_state.step = 5
    step(second)
    assert set(held(first.root, memory_tier)) == {4, 5, 6}
    step(second)
    assert set(held(first.root, memory_tier)) == {5, 6, 7}
    assert len(images_of(second).stager.pool.slots) == 3, "no second set of arenas"
    second.manager.close()


def _step(mark_fd: int) -> int:
    marked = read_mark(mark_fd)
    return -1 if marked is None else marked.step


def test_a_mark_that_was_never_set_is_no_image() -> None:
    mark = Mark()
    assert read_mark(mark.fd) is None
    mark.close()


def test_a_save_whose_copy_failed_does_not_free_an_arena_that_is_being_digested(
    tmp_path: Path, memory_tier: Path
) -> None:
    run = start(tmp_path, 3, interval=2)
    run.manager.wait()
    faults.install("EIO@stage:times=always", rank=0)
    step(run)
    assert run.manager.wait() == 2
    pool = images_of(run).stager.pool
    assert [slot.num_readers for slot in pool.slots] == [0, 0, 0]
    held_slot = pool.take(99)
    step(run)
    assert held_slot.num_readers == 1
    pool.release(held_slot)


def test_a_copy_that_comes_with_digests_needs_no_other_process(tmp_path: Path, memory_tier: Path) -> None:
    run = start(tmp_path, 2)
    assert images_of(run).process is None
    assert max(held(run.root, memory_tier)) == 2


def test_the_copy_of_a_save_is_an_image_while_its_file_is_still_written(tmp_path: Path, memory_tier: Path) -> None:
    run = start(tmp_path, 1, interval=2)
    faults.install("slow@fsync:seconds=2", rank=0)
    step(run)
    run.manager.maybe_wait_for_staging()
    assert images_of(run).marker.wait(60)
    assert max(held(run.root, memory_tier)) == 2
    assert run.committed() == []
    assert run.manager.wait() == 2


def kill_keeper(runtime: Path) -> int:
    """Kill the keeper; return its pid."""
    (pid,) = keepers_in(runtime)
    os.kill(pid, signal.SIGKILL)
    assert has_ended(pid)
    return pid


def test_another_keeper_takes_the_place_of_a_killed_one_with_all_images(
    tmp_path: Path, memory_tier: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = start(tmp_path, 4)
    before = kill_keeper(memory_tier)
    step(run)
    assert keepers_in(memory_tier) != [before]
    assert set(held(run.root, memory_tier)) == {3, 4, 5}
    assert "A restart loads from disk" not in caplog.text
    run.manager.close()
    assert set(held(run.root, memory_tier)) == {3, 4, 5}


def test_a_keeper_that_is_killed_again_and_again_is_given_up_with_one_warning(
    tmp_path: Path, memory_tier: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = start(tmp_path, 3)
    killed = 0
    while keepers_in(memory_tier):
        kill_keeper(memory_tier)
        killed += 1
        step(run)
    assert killed == 4
    step(run)
    step(run, last=True)
    assert run.committed() == [9]
    assert caplog.text.count("A restart loads from disk") == 1
    assert caplog.text.count("WARNING") == 2, "the other one is that no more images are made"


def test_a_state_that_cannot_be_saved_is_not_called_too_large(
    tmp_path: Path, memory_tier: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = start(tmp_path, 1)
    images_of(run).sized(-1)
    assert "No in-memory snapshots every 1 step: the state cannot be saved. The first save says why" in caplog.text
    assert "do not fit" not in caplog.text


@on_two_ranks
def test_both_ranks_have_the_images_of_the_same_steps_of_one_run(rank: int, tmp_path: Path) -> None:
    with tier_on(tmp_path) as runtime:
        run = start(tmp_path, 5, interval=4)
        run.manager.wait()
        assert images_of(run).marker.wait(60)
        assert same_everywhere(run.events.steps("image_ready"))
        assert same_everywhere(sorted(held_by_rank(run.root, runtime)))
        cards = held_by_rank(run.root, runtime)
        assert {(card_rank, at) for card_rank, at in cards} == {(r, at) for r in (0, 1) for at in (3, 4, 5)}
        assert len({(card.run.lineage.run_id, card.key.start, card.run.folder_id) for card in cards.values()}) == 1
        assert cards[0, 5].tables.tensors is not None and cards[1, 5].tables.tensors is None
        step(run, last=True)


@on_two_ranks
def test_an_image_that_one_rank_cannot_make_leaves_the_one_before_to_both(rank: int, tmp_path: Path) -> None:
    with tier_on(tmp_path) as runtime:
        run = start(tmp_path, 3)
        faults.install("EIO@mark:rank=1,times=2", rank=rank)
        for _ in range(3):
            step(run)
            assert same_everywhere(0)
            steps = [{at for of, at in held_by_rank(run.root, runtime) if of == each} for each in (0, 1)]
            assert max(steps[0] & steps[1]) == (3 if run.train_state.step < 6 else 6)
            assert same_everywhere(0)
        faults.install("", rank=rank)
        step(run, last=True)


class Own:
    """A plain state that differs between ranks."""

    def __init__(self, rank: int) -> None:
        self.values: dict[str, Any] = {"count": 100 + rank, "same": 7}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = dict(state_dict)


@on_two_ranks
def test_values_that_differ_are_named_at_the_first_image_of_a_start_and_only_there(rank: int, tmp_path: Path) -> None:
    with tier_on(tmp_path), logged_warnings() as warned:
        run = start(tmp_path, 3, interval=4, states={"counts": Own(rank)})
        assert run.events.steps("image_ready")[-1] == 3
        named = [message for message in warned if "Ranks hold different values" in message]
        assert len(named) == (rank == 0)
        assert rank or "counts.count (rank 0's is saved)" in named[0]
        step(run)
        run.manager.wait()
        assert same_everywhere(run.committed())
        assert run.committed() == [4]
        assert [message for message in warned if "Ranks hold different values" in message] == named
        step(run, last=True)


@on_two_ranks
def test_memory_that_one_rank_cannot_take_over_is_an_error_of_all(rank: int, tmp_path: Path) -> None:
    def refuse(descriptors: object) -> NoReturn:
        raise OSError("Cannot allocate memory")

    with tier_on(tmp_path):
        run = start(tmp_path, 5, interval=4)
        run.manager.wait()
        stager: Any = images_of(run).stager
        adopt = stager.adopt
        if rank:
            stager.adopt = refuse
        with pytest.raises(OSError, match="Cannot allocate memory"):
            run.manager.load()
        stager.adopt = adopt
        run.manager.load()
        assert run.train_state.step == 5
