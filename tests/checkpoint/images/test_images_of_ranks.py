"""Images of two ranks: both take the same decisions, and one that fails on one rank counts on neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.checkpoint.images.image_runs import held_by_rank, images_of, start, step, tier_on
from tests.checkpoint.tiny_run import same_everywhere
from tests.logged import logged_warnings
from tests.ranks import on_two_ranks
from torchtitan_lite import faults


@on_two_ranks
def test_both_ranks_have_the_images_of_the_same_steps_of_one_run(rank: int, tmp_path: Path) -> None:
    with tier_on(tmp_path) as runtime:
        run = start(tmp_path, 5, interval=4)
        run.manager.wait()
        assert images_of(run).wait(60)
        assert same_everywhere(run.events.steps("image_ready"))
        assert same_everywhere(sorted(held_by_rank(run.root, runtime)))
        cards = held_by_rank(run.root, runtime)
        assert {(card_rank, at) for card_rank, at in cards} == {(r, at) for r in (0, 1) for at in (3, 4, 5)}
        assert len({(card.lineage.run_id, card.start, card.folder_id) for card in cards.values()}) == 1
        assert cards[0, 5].tensors is not None and cards[1, 5].tensors is None
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
