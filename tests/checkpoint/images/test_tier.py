"""What a rank holds of the memory tier: arenas at its keeper, under names of its start, and an end with one warning."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.keepers import has_ended, keepers_in, names_at
from tests.no_threads import no_threads
from tests.store.filled import commit
from torchtitan_lite.checkpoint.staging.arena import StagingArena
from torchtitan_lite.checkpoint.staging.mark import Mark, read_mark
from torchtitan_lite.memory.images.card import MOST_COMMITS, Commit, commit_of, commits_in, rests_in
from torchtitan_lite.memory.images.tier import MOST_KEEPERS, Tier
from torchtitan_lite.memory.keeper.client import Keeper
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import CheckpointInfo
from torchtitan_lite.store.store import CheckpointStore


@pytest.fixture
def tier(tmp_path: Path, memory_tier: Path) -> Iterator[Tier]:
    """The tier of rank 3 of the start "s1"."""
    tier = Tier(Keeper(tmp_path / "checkpoint", 600.0, runtime=memory_tier), 3)
    tier.start, tier.folder_id = "s1", "f1"
    yield tier
    tier.finish()


def arena_of(*, marked: bool = True) -> StagingArena:
    return StagingArena(4096, mark=Mark() if marked else None)


def test_an_arena_is_held_once_under_a_name_of_start_and_rank(tier: Tier) -> None:
    tier.begin_keeping(list)
    arenas = [arena_of(), arena_of()]
    assert [tier.keep(arena) for arena in arenas] == [True, True]
    assert tier.keep(arenas[0]) and arenas[0].is_kept
    assert names_at(tier.keeper) == ["s1.3.0", "s1.3.1"]


def test_nothing_is_kept_before_it_begins_nor_without_a_mark_nor_after_it_has_left(
    tier: Tier, memory_tier: Path
) -> None:
    arena = arena_of()
    assert not tier.keep(arena)
    assert keepers_in(memory_tier) == []
    tier.begin_keeping(list)
    assert not tier.keep(arena_of(marked=False))
    assert tier.keep(arena)
    for _ in range(2):
        tier.leave()
    assert not tier.keep(arena_of())
    assert names_at(tier.keeper) == ["s1.3.0"], "what was kept outlives the process"
    tier.keeper.end()


def test_helpers_live_for_the_keeper_too_from_the_start_and_later(tier: Tier) -> None:
    children = []
    for _ in range(2):
        children.append(os.fork())
        if children[-1] == 0:
            signal.pause()
            os._exit(0)
    tier.begin_keeping(lambda: children[:1])
    tier.begin_keeping(lambda: children)  # It has begun.
    assert tier.keep(arena_of())
    described = tier.keeper.describe()
    assert described is not None and set(described.living) == {os.getpid(), children[0]}
    tier.join_again(children)
    described = tier.keeper.describe()
    assert described is not None and set(described.living) == {os.getpid(), *children}
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_what_is_given_up_is_no_image_and_held_no_more(tier: Tier) -> None:
    tier.begin_keeping(list)
    kept, other, unmarked = arena_of(), arena_of(), arena_of(marked=False)
    for arena in (kept, other):
        assert arena.mark is not None
        arena.mark.set(1, 3, b"card")
    assert tier.keep(kept)
    for arena in (kept, other, unmarked, kept):
        tier.give_up(arena)
        assert not arena.is_kept
        assert arena.mark is None or read_mark(arena.mark.fd) is None
    assert names_at(tier.keeper) == []
    assert tier.keep(kept)
    assert names_at(tier.keeper) == ["s1.3.1"]


def test_names_of_the_start_before_are_dropped_and_no_names_need_no_keeper(tier: Tier, memory_tier: Path) -> None:
    tier.drop_names([])
    assert not tier.is_off and keepers_in(memory_tier) == []
    tier.begin_keeping(list)
    assert tier.keep(arena_of())
    tier.drop_names(["s1.3.0", "unknown"])
    assert names_at(tier.keeper) == []


def kill(runtime: Path) -> None:
    (pid,) = keepers_in(runtime)
    os.kill(pid, signal.SIGKILL)
    assert has_ended(pid)


def test_another_keeper_holds_all_arenas_again_and_the_last_one_ends_the_tier(
    tier: Tier, memory_tier: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier.begin_keeping(list)
    first, second = arena_of(), arena_of()
    assert tier.keep(first)
    for _ in range(MOST_KEEPERS - 1):
        kill(memory_tier)
        assert tier.keep(second) and first.is_kept
        assert names_at(tier.keeper) == ["s1.3.0", "s1.3.1"]
    kill(memory_tier)
    assert not tier.keep(second) and not first.is_kept
    assert tier.is_off and keepers_in(memory_tier) == []
    assert "Rank 3: the process that holds in-memory snapshots was killed 4 times" in caplog.text
    assert caplog.text.count("A restart loads from disk") == 1


def test_a_closed_arena_is_not_held(tier: Tier) -> None:
    tier.begin_keeping(list)
    arena = arena_of()
    arena.close()
    assert not tier.keep(arena) and not tier.is_off


def test_trouble_with_the_keeper_is_one_warning_and_the_end(
    tier: Tier, memory_tier: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (memory_tier / "torchtitan_lite").mkdir(mode=0o777)
    (memory_tier / "torchtitan_lite").chmod(0o777)
    tier.begin_keeping(list)
    for _ in range(3):
        assert not tier.keep(arena_of())
    tier.drop_names(["a"])
    assert tier.is_off
    assert caplog.text.count("A restart loads from disk") == 1
    assert re.search("Rank 3: there are no in-memory snapshots: .*: expected a drwx------ of user", caplog.text)


def test_where_the_system_has_no_more_threads_nothing_is_kept_and_the_run_continues(
    tier: Tier, caplog: pytest.LogCaptureFixture
) -> None:
    with no_threads():
        tier.begin_keeping(list)
    assert tier.is_off and not tier.keep(arena_of())
    tier.leave()
    tier.finish()
    assert caplog.messages == [
        "Rank 3: there are no in-memory snapshots: [Errno 11] can't start new thread. A restart loads from disk"
    ]


def test_a_finished_run_frees_all_and_keeps_nothing_more(tier: Tier, memory_tier: Path) -> None:
    tier.begin_keeping(list)
    assert tier.keep(arena_of())
    for _ in range(2):
        tier.finish()
        assert keepers_in(memory_tier) == []
    assert tier.is_off and not tier.keep(arena_of())
    tier.begin_keeping(list)
    assert keepers_in(memory_tier) == []


def committed(folder: Path) -> CheckpointInfo:
    return commit(CheckpointStore(folder), 7, lineage=Lineage("r"))


def test_the_latest_commit_is_that_of_the_load_then_that_of_the_run(tier: Tier, tmp_path: Path) -> None:
    tier.commits = (Commit(5, "d"),)
    info = committed(tmp_path / "checkpoint")
    manifest = info.path / "manifest.json"
    hidden = manifest.rename(info.path / "hidden")
    tier.note_committed(info)
    assert tier.commits == (Commit(5, "d"),), "one whose manifest cannot be read"
    hidden.rename(manifest)
    tier.note_committed(info)
    latest = tier.commits[-1]
    assert latest == commit_of(info) and latest.step == 7
    assert f'"digest": "{latest.digest}"'.encode() in manifest.read_bytes()[-64:]


def test_of_the_commits_of_a_folder_the_last_few_are_known_and_none_that_a_rollback_abandons(tier: Tier) -> None:
    several = [Commit(step, "d") for step in (2, 4, 6, 7, 8)]
    tier.commits = tuple(several)
    assert tier.commits[-1] == several[-1]
    info = committed(tier.keeper.folder)
    tier.note_committed(info)
    assert tier.commits == (*several[:3], commit_of(info))
    tier.commits = ()
    assert tier.commits == ()
    tier.commits = tuple(several[:MOST_COMMITS])
    tier.note_committed(dataclasses.replace(info, step=9))
    assert [commit.step for commit in tier.commits] == [4, 6, 7, 9]


def test_a_damaged_checkpoint_is_known_by_what_is_left_of_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoint")
    info = committed(store.root)
    (commit,) = commits_in(store)
    assert commit == commit_of(info) and commit.written_ns > 0
    assert rests_in(store) == frozenset()
    manifest = info.path / "manifest.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(b"")
    (rest,) = rests_in(store)
    assert rest.digest == "" and rest.is_rest_of(commit)
    assert commits_in(store) == ()
    manifest.unlink()
    os.mkfifo(manifest)
    (rest,) = rests_in(store)
    assert rest.is_rest_of(commit), "a pipe in its place is not waited for"
    manifest.unlink()
    manifest.write_bytes(whole.replace(b"full", b"null"))
    (info.path / "__0_0.distcp").unlink()
    (rest,) = rests_in(store)
    assert rest.written_ns == 0 and rest.is_rest_of(commit)
    store.quarantine(7, ["a test"])
    assert rests_in(store) == {rest}
