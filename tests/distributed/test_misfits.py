"""What does not fit between hosts is one sentence each, the same on all ranks."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.logged import logged_warnings
from tests.ranks import on_two_ranks
from torchtitan_lite import __version__
from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.config.job_config import Checkpoint, JobConfig, Training
from torchtitan_lite.distributed.host_mismatch import (
    CLOCK_SECONDS,
    WRONG_CLOCK_SECONDS,
    HostView,
    Kind,
    SharedFolder,
    alike,
    clock_around,
    misfits,
    versions_and_config,
)
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import FolderNotShared, HostsDiffer

HOST = platform.node()


def a_view(host: str = "a", config: JobConfig | None = None, **given: object) -> HostView:
    return HostView(**{"facts": versions_and_config(config or JobConfig()), "host": host, **given})  # type: ignore[arg-type]


def found_in(*views: HostView) -> tuple[list[str], list[str]]:
    """Return what is refused and what is suspicious in the views of ranks 0, 1, ..., as text."""
    refused, suspicious = misfits(views[0], [view.where_it_differs(views[0]) for view in views])
    return [*map(str, refused)], suspicious


def with_facts(host: str, facts: Mapping[tuple[Kind, str], str]) -> HostView:
    return a_view(host, facts={**versions_and_config(JobConfig()), **facts})


def test_views_that_fit_have_no_misfits() -> None:
    assert found_in(a_view("a"), a_view("b"), a_view("b")) == ([], [])


def test_a_key_of_the_configuration_is_named_with_both_values_and_the_ranks_that_have_them() -> None:
    views = [a_view("b", JobConfig(training=Training(steps=steps))) for steps in (300, 300, 7)]
    assert found_in(a_view("a"), *views)[0] == [
        "training.steps: expected 10000, as rank 0 on a has it, found 300 on 2 ranks from rank 1 on b, "
        "7 on rank 3 on b. Start all ranks with the same file and the same options."
    ]


def test_of_many_keys_eight_are_named() -> None:
    other = dict.fromkeys(list(versions_and_config(JobConfig()))[2:12], "other")
    refused, _ = found_in(a_view("a"), with_facts("b", other))
    assert len(refused) == 9 and refused[-1] == "2 more values: not listed."


def test_other_versions_are_refused_and_another_build_of_torch_is_only_suspicious() -> None:
    versions = {(Kind.VERSION, "torchtitan_lite"): "9.0", (Kind.VERSION, "torch"): "2.99"}
    build = (Kind.BUILD, "the build of torch")
    assert found_in(with_facts("a", {build: "2.13.0"}), with_facts("b", {**versions, build: "2.13.1"})) == (
        [
            f"torchtitan_lite: expected {__version__}, as rank 0 on a has it, found 9.0 on rank 1 on b. "
            "Install one version on all hosts.",
            f"torch: expected {'.'.join(torch.__version__.split('.')[:2])}, as rank 0 on a has it, found 2.99 on "
            "rank 1 on b. Install one version on all hosts.",
        ],
        [
            "the build of torch: expected 2.13.0, as rank 0 on a has it, found 2.13.1 on rank 1 on b. "
            "Install one build on all hosts, or results may differ in the last bits."
        ],
    )


def test_other_data_are_one_sentence() -> None:
    views = [with_facts(host, {(Kind.DATA, "the data"): data}) for host, data in (("a", "text, 2 files"), ("b", "x"))]
    assert found_in(*views)[0] == [
        "the data: expected text, 2 files, as rank 0 on a has it, found x on rank 1 on b. "
        "Give all hosts the same files."
    ]


def test_each_folder_that_some_do_not_see_is_one_sentence_with_hosts_and_mounts() -> None:
    names = ("/data/checkpoint", "/data/export")
    ours = [SharedFolder(name, "nfs4 server:/x at /data", "token") for name in names]
    theirs = [SharedFolder(name, "ext4 /dev/vda at /", "") for name in names]
    refused, _ = found_in(a_view("a", folders=ours), a_view("b", folders=theirs), a_view("c", folders=ours))
    assert refused == [
        f"the ranks do not share one folder for checkpoints: what rank 0 on a wrote into {name} (nfs4 server:/x at "
        f"/data) is not seen by rank 1 on b ({name}, ext4 /dev/vda at /). Name one that all hosts share: "
        "--job.dump_folder, or folder in a loop of your own."
        for name in names
    ]


def test_a_rank_without_exports_is_another_configuration_and_no_other_folder() -> None:
    exports = JobConfig(checkpoint=Checkpoint(export_folder="export"))
    ours = [SharedFolder(name, "", "token") for name in ("checkpoint", "export")]
    (sentence,), _ = found_in(a_view("a", exports, folders=ours), a_view("b", folders=ours[:1]))
    assert sentence.startswith("checkpoint.export_folder: expected a path, as rank 0 on a has it, found (none) on rank")


def test_tokens_of_a_host_of_its_own_are_only_suspicious() -> None:
    views = [with_facts(host, {(Kind.TOKENS, "the file of tokens"): f"inode of {host}"}) for host in ("a", "b")]
    assert found_in(*views, views[1]) == (
        [],
        [
            "the file of tokens: expected inode of a, as rank 0 on a has it, found inode of b on 2 ranks from rank 1 "
            "on b. To make them once, name a folder that all hosts share in --training.tokens_folder."
        ],
    )


@pytest.mark.parametrize(
    ("clock", "words"),
    [
        ((1100.0, 1101.0), "is ahead of that of rank 0 on a by 98 s"),
        ((900.0, 902.0), "is behind that of rank 0 on a by 98 s"),
        ((1002.0 + CLOCK_SECONDS - 1, 2000.0), ""),
        ((0.0, 1e9), ""),
    ],
)
def test_a_clock_is_named_by_what_it_differs_for_certain(clock: tuple[float, float], words: str) -> None:
    refused, suspicious = found_in(a_view("a", clock=(1000.0, 1002.0)), a_view("b", clock=clock))
    expected = f"The clock of rank 1 on b {words}, expected less than 60 s. Synchronise the clocks of all hosts (NTP)."
    assert (refused, suspicious) == ([], [expected] if words else [])


@pytest.mark.parametrize("needs_clock", [True, False])
def test_a_clock_is_refused_where_promises_need_it_and_only_from_a_quarter_of_an_hour_on(needs_clock: bool) -> None:
    ours = a_view("a", clock=(1e6, 1e6), needs_clock=needs_clock)
    for seconds in (WRONG_CLOCK_SECONDS - 1, WRONG_CLOCK_SECONDS):
        refused, suspicious = found_in(ours, a_view("b", clock=(1e6 + seconds, 1e6 + seconds)))
        is_refused = needs_clock and seconds == WRONG_CLOCK_SECONDS
        assert (len(refused), len(suspicious)) == ((1, 0) if is_refused else (0, 1))


def test_one_number_of_each_kind_says_whether_views_fit() -> None:
    view = a_view("a", clock=(5.0, 6.0))
    assert view.numbers() == dataclasses.replace(view, host="b").numbers()
    assert view.numbers()[1] != a_view("a", JobConfig(training=Training(steps=7))).numbers()[1]
    assert view.numbers()[1] != with_facts("a", {(Kind.TOKENS, "the file of tokens"): "x"}).numbers()[1]
    assert [number < 2**63 for number in map(abs, view.numbers())] == [True] * len(HostView().numbers())


@on_two_ranks
def test_what_differs_is_one_error_on_all_ranks_and_what_is_suspicious_one_line(rank: int) -> None:
    peers = Peers(timedelta(seconds=60))
    facts = {(Kind.CONFIG, "training.steps"): str(rank), (Kind.BUILD, "the build of torch"): f"2.13.{rank}"}
    with logged_warnings() as lines, pytest.raises(HostsDiffer) as refused:
        alike(lambda: facts, HostView, peers)
    assert refused.value.findings == (
        f"training.steps: expected 0, as rank 0 on {HOST} has it, found 1 on rank 1 on {HOST}. "
        "Start all ranks with the same file and the same options.",
    )
    assert refused.value.reported_elsewhere == (rank > 0)
    assert [line.startswith("the build of torch: ") for line in lines] == ([] if rank else [True])
    peers.close()


@on_two_ranks
def test_views_that_fit_take_one_exchange(rank: int) -> None:
    peers = OneExchange(timedelta(seconds=60))
    clock = clock_around(lambda: None, lambda: 1e6)
    folders = [SharedFolder("/data", f"mount {rank}", "token")]
    assert alike(lambda: rank, lambda _: a_view(f"host {rank}", clock=clock, folders=folders), peers) == rank
    assert peers.exchanges == 1
    peers.close()


class OneExchange(Peers):
    """Peers that count what they exchange."""

    exchanges = 0

    def max_over_ranks(self, *mine: int) -> tuple[int, ...]:
        self.exchanges += 1
        return super().max_over_ranks(*mine)


@on_two_ranks
def test_what_one_rank_cannot_see_is_its_error_on_all_ranks(rank: int) -> None:
    peers = Peers(timedelta(seconds=60))

    def refuse() -> int:
        if rank:
            raise FolderNotShared("f", "a", ["rank 1"])
        return rank

    with pytest.raises(FolderNotShared) as refused:
        alike(refuse, lambda _: HostView(), peers)
    assert (refused.value.origin_rank, refused.value.reported_elsewhere) == (1, rank > 0)
    peers.close()


def test_one_rank_looks_at_nothing() -> None:
    def view(made: int) -> HostView:
        raise AssertionError

    assert alike(lambda: 3, view, Peers(timedelta(seconds=1))) == 3


@on_two_ranks
def test_a_moment_of_all_ranks_is_between_the_two_readings_of_each_clock(rank: int) -> None:
    peers = Peers(timedelta(seconds=60))
    spans = peers.gather(clock_around(lambda: peers.gather(None)))
    assert max(before for before, _ in spans) <= min(after for _, after in spans)
    peers.close()


@on_two_ranks
def test_a_loop_whose_ranks_have_other_keys_is_refused_by_each_key(rank: int, tmp_path: Path) -> None:
    given = {"keep_latest_k": 2 + rank, "load_only": bool(rank), "export_folder": str(tmp_path / "e") if rank else ""}
    loop = CheckpointManager.for_loop(
        model=nn.Linear(2, 3), folder=tmp_path / "checkpoint", interval=1, preemption_signals=(), **given
    )
    with loop as manager, pytest.raises(HostsDiffer) as refused:
        manager.load()
    assert [each.partition(",")[0] for each in refused.value.findings] == [
        "checkpoint.export_folder: expected (none)",
        "checkpoint.keep_latest_k: expected 2",
        "checkpoint.load_only: expected False",
    ]
    assert not [*tmp_path.rglob("step-*")]
