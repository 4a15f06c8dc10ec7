"""Which samples a run takes while it is saved, resumed, resized and rolled back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import islice
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from tests.data.numbered import Numbered, ids, loader
from tests.examples import examples
from torchtitan_lite.data.loader import TokenLoader

WINDOWS, BATCH = 24, 12
CORPUS = Numbered(WINDOWS)
ORDER = ids(next(loader(documents=CORPUS, batch=20 * WINDOWS, seed=5)))
"""The windows at the positions of twenty epochs, as one rank that takes them all in one step sees them."""

DEGREES = st.sampled_from([1, 2, 3, 4])


def ranks(num_ranks: int, *, batch: int = BATCH, local: int = 1, seed: int = 5) -> list[TokenLoader]:
    """The loaders of all ranks. After a resume the seed is the checkpoint's, so another one must not matter."""
    return [
        loader(documents=CORPUS, rank=rank, num_ranks=num_ranks, batch=batch, local=local, seed=seed)
        for rank in range(num_ranks)
    ]


def resumed(state: dict[str, Any], num_ranks: int, **options: int) -> list[TokenLoader]:
    loaders = ranks(num_ranks, seed=99, **options)
    for one in loaders:
        one.load_state_dict(state)
    return loaders


def take_step(loaders: list[TokenLoader]) -> tuple[list[int], list[int]]:
    """Take the next step on all ranks. Return its positions and windows."""
    windows = [window for one in loaders for window in ids(next(one))]
    return [position for one in loaders for position in one.last_positions], windows


def consumed_over(degrees: list[int], steps: list[int]) -> tuple[list[int], list[int]]:
    """Return positions and windows of a run that restarts on each of `degrees` ranks and takes `steps` there."""
    positions: list[int] = []
    windows: list[int] = []
    loaders = ranks(degrees[0])
    for degree, count in zip(degrees, steps, strict=True):
        loaders = resumed(loaders[-1].state_dict(), degree)
        for _ in range(count):
            taken = take_step(loaders)
            positions += taken[0]
            windows += taken[1]
    return positions, windows


@settings(max_examples=50)
@given(st.lists(st.integers(0, 3), min_size=5, max_size=5))
def test_every_sample_is_taken_once_an_epoch_over_4_2_1_2_4_ranks(steps: list[int]) -> None:
    rest = -sum(steps) % (WINDOWS // BATCH)
    positions, windows = consumed_over([4, 2, 1, 2, 4], [*steps[:4], steps[4] + rest])
    assert positions == list(range(len(positions)))
    epochs = [windows[start : start + WINDOWS] for start in range(0, len(windows), WINDOWS)]
    assert all(Counter(epoch) == Counter(range(WINDOWS)) for epoch in epochs)


@settings(max_examples=50)
@given(st.integers(0, 4))
def test_every_sample_is_taken_once_an_epoch_over_2_3_ranks(steps: int) -> None:
    positions, windows = consumed_over([2, 3], [steps, 4 - steps])
    assert positions == list(range(2 * WINDOWS))
    assert Counter(windows[:WINDOWS]) == Counter(windows[WINDOWS:]) == Counter(range(WINDOWS))


@settings(max_examples=50)
@given(st.lists(st.tuples(DEGREES, st.integers(0, 2)), min_size=1, max_size=6))
def test_the_order_is_that_of_one_rank_whatever_the_changes(changes: list[tuple[int, int]]) -> None:
    positions, windows = consumed_over([degree for degree, _ in changes], [count for _, count in changes])
    assert positions == list(range(len(positions)))
    assert windows == ORDER[: len(windows)]


@given(st.integers(1, 5))
def test_a_resume_with_another_global_batch_continues_at_the_next_position(steps: int) -> None:
    first = ranks(4)
    for _ in range(steps):
        take_step(first)
    second = resumed(first[0].state_dict(), 2, batch=10, local=5)
    positions = [position for _ in range(3) for position in take_step(second)[0]]
    assert positions == list(range(steps * BATCH, steps * BATCH + 30))


def test_one_epoch_is_complete_over_changes_of_ranks_and_ends_there() -> None:
    windows: list[int] = []
    state: dict[str, Any] | None = None
    for degree, count in ((2, 1), (4, 1), (1, 99)):
        loaders = [
            loader(documents=CORPUS, rank=rank, num_ranks=degree, batch=BATCH, max_epochs=1) for rank in range(degree)
        ]
        for one in loaders:
            one.load_state_dict(state or one.state_dict())
        windows += [window for one in loaders for batch in islice(one, count) for window in ids(batch)]
        state = loaders[0].state_dict()
    assert sorted(windows) == list(range(WINDOWS))


@dataclass(frozen=True)
class Saved:
    """A checkpoint: the loader's state, and how many samples its branch had taken."""

    state: dict[str, Any]
    taken: int


class Run(RuleBasedStateMachine):
    """One run. The model is the list of samples that its current branch has taken, oldest first.

    After a roll back the samples of the abandoned branch are kept: the branch that replaces it must take the same
    samples again, in the same order, as far as both branches reach.
    """

    checkpoints = Bundle("checkpoints")

    def __init__(self) -> None:
        super().__init__()
        self.loaders = ranks(1)
        self.positions: list[int] = []
        self.windows: list[int] = []
        self.left_windows: list[int] = []
        self.latest = Saved(self.loaders[0].state_dict(), 0)

    @rule(count=st.integers(1, 2))
    def train(self, count: int) -> None:
        for _ in range(count):
            positions, windows = take_step(self.loaders)
            self.positions += positions
            self.windows += windows

    @rule(target=checkpoints)
    def save(self) -> Saved:
        states = [one.state_dict() for one in self.loaders]
        assert all(state == states[0] for state in states)
        self.latest = Saved(states[0], len(self.windows))
        return self.latest

    @rule(num_ranks=DEGREES)
    def killed_and_resumed(self, num_ranks: int) -> None:
        self.continue_from(self.latest, num_ranks)

    @rule(num_ranks=DEGREES)
    def preempted_and_resized(self, num_ranks: int) -> None:
        self.latest = Saved(self.loaders[-1].state_dict(), len(self.windows))
        self.continue_from(self.latest, num_ranks)

    @rule(num_ranks=st.sampled_from([1, 2, 3]), batch=st.sampled_from([6, 18]))
    def resumed_with_another_global_batch(self, num_ranks: int, batch: int) -> None:
        self.continue_from(self.latest, num_ranks, batch=batch)

    @rule(checkpoint=checkpoints, num_ranks=DEGREES)
    def rolled_back(self, checkpoint: Saved, num_ranks: int) -> None:
        self.latest = checkpoint
        self.continue_from(checkpoint, num_ranks)

    def continue_from(self, checkpoint: Saved, num_ranks: int, **options: int) -> None:
        self.left_windows = max(self.left_windows, self.windows, key=len)
        # A checkpoint of a branch that was left can hold more than the present branch: its samples are the same.
        self.positions = list(range(checkpoint.taken))
        self.windows = self.left_windows[: checkpoint.taken]
        self.loaders = resumed(checkpoint.state, num_ranks, **options)

    @invariant()
    def the_branch_took_every_position_once_in_order(self) -> None:
        assert self.positions == list(range(len(self.positions)))

    @invariant()
    def a_new_branch_takes_again_what_was_after_its_beginning(self) -> None:
        both = min(len(self.windows), len(self.left_windows))
        assert self.windows[:both] == self.left_windows[:both]

    @invariant()
    def every_epoch_holds_every_sample_once(self) -> None:
        whole = len(self.windows) // WINDOWS * WINDOWS
        assert Counter(self.windows[:whole]) == Counter(dict.fromkeys(range(WINDOWS), whole // WINDOWS))
        assert max(Counter(self.windows[whole:]).values(), default=1) == 1


TestNoBranchRepeatsOrSkipsASample = Run.TestCase
TestNoBranchRepeatsOrSkipsASample.settings = settings(max_examples=examples(500), stateful_step_count=15)
