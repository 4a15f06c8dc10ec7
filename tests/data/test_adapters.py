"""Loaders of other libraries in a checkpoint: what resumes exactly, and what is refused."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.checkpoint.only_once import load_and_close
from tests.checkpoint.sharded_run import sharded_run
from tests.checkpoint.small_run import same
from tests.data.numbered import loader as own_loader
from tests.data.resumed_loaders import OF_TORCHDATA
from tests.ranks import Ranks, on_two_ranks
from torchtitan_lite.data.adapters import HuggingFaceStreamAdapter, StatefulDataLoaderAdapter
from torchtitan_lite.data.rank_state import pack, unpack
from torchtitan_lite.errors import ConfigError, ExtraMissing

PAGE = Path(__file__).parents[2] / "docs" / "samples.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
NUMBERS = list(range(24))

pytestmark = OF_TORCHDATA

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=10,
)


def torchdata_loader(
    rank: int = 0, num_ranks: int = 1, *, dataset: Any = NUMBERS, **options: Any
) -> StatefulDataLoaderAdapter:
    """Return `rank`'s share of `dataset` in batches of two, shuffled unless the dataset has its own order."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    if isinstance(dataset, list):
        dataset = dataset[rank::num_ranks]
        options["shuffle"] = True
    with warnings.catch_warnings():  # pytest's filters do not reach the processes of the two ranks
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        loader = StatefulDataLoader(dataset, batch_size=2, **options)
    return StatefulDataLoaderAdapter(loader, rank=rank, num_ranks=num_ranks)


def hugging_face_stream(rank: int = 0, num_ranks: int = 1, **shuffle: int) -> HuggingFaceStreamAdapter:
    """Return `rank`'s share of 24 numbers in four shards."""
    datasets = pytest.importorskip("datasets")
    distributed = pytest.importorskip("datasets.distributed")
    dataset = datasets.IterableDataset.from_generator(numbers, gen_kwargs={"shards": [0, 1, 2, 3]})
    if shuffle:
        dataset = dataset.shuffle(**shuffle)
    if num_ranks > 1:
        dataset = distributed.split_dataset_by_node(dataset, rank=rank, world_size=num_ranks)
    return HuggingFaceStreamAdapter(dataset, rank=rank, num_ranks=num_ranks)


def numbers(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        yield from ({"number": 6 * shard + i} for i in range(6))


@pytest.fixture
def some_datasets() -> None:
    """Skip if the extra `datasets` is not installed."""
    pytest.importorskip("datasets")


def flat(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch.tolist()]


class Counting(torch.utils.data.IterableDataset[int]):
    """An iterable dataset that knows its position; `odd` goes into its state."""

    def __init__(self, odd: object = None) -> None:
        self.next, self.odd = 0, odd

    def __iter__(self) -> Iterator[int]:
        while self.next < 24:
            self.next += 1
            yield self.next - 1
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "odd": self.odd}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next, self.odd = state["next"], state["odd"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchdata_continues_with_the_next_batch_and_then_with_the_next_epoch(num_workers: int) -> None:
    first, second = torchdata_loader(num_workers=num_workers), torchdata_loader(num_workers=num_workers)
    batches = iter(first)
    taken = flat(next(batches) for _ in range(5))
    second.load_state_dict(first.state_dict())
    rest = flat(batches)
    assert sorted(taken + rest) == NUMBERS
    assert flat(second) == rest
    assert flat(second) == flat(first)


def test_torchdata_continues_at_the_position_of_an_iterable_dataset() -> None:
    first, second = torchdata_loader(dataset=Counting()), torchdata_loader(dataset=Counting())
    batches = iter(first)
    next(batches)
    second.load_state_dict(first.state_dict())
    assert flat(second) == flat(batches) == NUMBERS[2:]


class Standing(Counting):
    """Its state stays what was loaded."""

    loaded = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.loaded or self.next, "odd": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.loaded = self.next


@pytest.mark.parametrize("kind", [Standing, Counting])
@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_one_warning_names_a_dataset_whose_state_does_not_advance_after_a_load(
    kind: type[Counting], num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (torchdata_loader(dataset=kind(), num_workers=num_workers) for _ in range(2))
    next(iter(first))
    second.load_state_dict(first.state_dict())
    batches = iter(second)
    second.state_dict()
    assert not caplog.records
    for _ in range(2):
        next(batches)
        second.state_dict()
    found = [record.getMessage() for record in caplog.records]
    assert [text.startswith("dataloader: the state of this Standing is what was loaded") for text in found] == [
        True
    ] * (kind is Standing)


def test_the_state_of_torchdata_is_a_copy_in_plain_tensors() -> None:
    one = torchdata_loader()
    batches = iter(one)
    next(batches)
    state = one.state_dict()
    assert set(state) == {"num_ranks", "rank0"}
    before = {key: value.clone() for key, value in state.items()}
    list(batches)
    assert same(state, before)
    assert not same(one.state_dict(), before)


def test_another_number_of_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"2 workers a rank, this loader has 0\. Set num_workers=2, or start"):
        torchdata_loader().load_state_dict(torchdata_loader(num_workers=2).state_dict())


def test_a_state_that_would_need_pickle_is_refused_with_its_path() -> None:
    one = torchdata_loader(dataset=Counting(odd=[{"deep": {1, 2}}]))
    next(iter(one))
    with pytest.raises(ConfigError, match=r"dataset_state\.odd\[0\]\.deep is a set, which a checkpoint cannot"):
        one.state_dict()


@pytest.mark.slow
@on_two_ranks
def test_each_of_two_ranks_continues_with_its_own_samples_from_a_real_checkpoint(rank: int, tmp_path: Path) -> None:
    first = torchdata_loader(rank, 2)
    batches = iter(first)
    taken = flat(next(batches) for _ in range(rank + 1))
    with (run := sharded_run(tmp_path, interval=1, loader=first)).manager:
        run.train(1, last=False)
    second = torchdata_loader(rank, 2)
    load_and_close(sharded_run(tmp_path, loader=second).manager)
    rest = flat(second)
    assert rest == flat(batches)
    assert sorted(taken + rest) == NUMBERS[rank::2]


def save_on_two(rank: int, folder: Path) -> None:
    with (run := sharded_run(folder, interval=1, loader=torchdata_loader(rank, 2))).manager:
        run.train(1, last=False)


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_is_refused_by_one(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(save_on_two, folder=tmp_path)
    with (
        sharded_run(tmp_path, loader=torchdata_loader()).manager as manager,
        pytest.raises(ConfigError, match=r"each of 2 data-parallel ranks and does not fit 1\. Resume"),
    ):
        manager.load()


@pytest.mark.usefixtures("some_datasets")
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("taken", [0, 1, 7])
def test_a_stream_continues_with_the_next_example_and_then_with_the_next_epoch(num_ranks: int, taken: int) -> None:
    first, second = hugging_face_stream(0, num_ranks), hugging_face_stream(0, num_ranks)
    examples = iter(first)
    for _ in range(taken):
        next(examples)
    second.load_state_dict(first.state_dict())
    assert same(second.state_dict(), first.state_dict())
    assert list(second) == list(examples)
    assert len(list(second)) == 24 // num_ranks


@pytest.mark.usefixtures("some_datasets")
def test_a_stream_that_was_saved_after_an_epoch_continues_with_the_order_of_the_next() -> None:
    first, second = (hugging_face_stream(seed=1, buffer_size=4) for _ in range(2))
    epoch = list(first)
    second.load_state_dict(first.state_dict())
    following = list(first)
    assert list(second) == following != epoch
    assert sorted(example["number"] for example in following) == NUMBERS


@pytest.mark.usefixtures("some_datasets")
def test_iterating_a_stream_again_in_an_epoch_gives_its_rest() -> None:
    one = hugging_face_stream()
    next(iter(one))
    assert [example["number"] for example in one] == NUMBERS[1:]


@pytest.mark.usefixtures("some_datasets")
def test_a_stream_continues_from_a_real_checkpoint(tmp_path: Path) -> None:
    examples = iter(first := hugging_face_stream())
    next(examples)
    with (run := sharded_run(tmp_path, interval=1, loader=first)).manager:
        run.train(1, last=False)
    second = hugging_face_stream()
    load_and_close(sharded_run(tmp_path, loader=second).manager)
    assert list(second) == list(examples)


@pytest.mark.usefixtures("some_datasets")
def test_a_dataset_that_is_not_a_stream_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected a datasets\.IterableDataset, found a list, which has no state"):
        HuggingFaceStreamAdapter(NUMBERS, rank=0, num_ranks=1)


def test_a_loader_without_a_state_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected a torchdata\.stateful_dataloader\.StatefulDataLoader, found a Da"):
        StatefulDataLoaderAdapter(torch.utils.data.DataLoader(NUMBERS), rank=0, num_ranks=1)


@pytest.mark.parametrize(
    ("adapter", "module", "extra"),
    [
        (StatefulDataLoaderAdapter, "torchdata.stateful_dataloader", "torchdata"),
        (HuggingFaceStreamAdapter, "datasets", "datasets"),
    ],
)
def test_an_adapter_without_its_package_is_an_error_that_says_how_to_install_it(
    adapter: Any, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ExtraMissing) as missing:
        adapter(object(), rank=0, num_ranks=1)
    assert isinstance(missing.value, ImportError)
    assert str(missing.value) == f"{extra} is not installed. Install it with: pip install 'torchtitan-lite[{extra}]'"


@given(JSON)
@example({"__tuple__": None})
@example({"a": [{"__pairs__": [], "__tensor__": 1}]})
def test_unpacking_a_packed_state_gives_it_unchanged(state: object) -> None:
    assert same(unpack(pack(state, rank=1, num_ranks=2), rank=1, num_ranks=2), state)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.bfloat16, torch.bool])
def test_unpacked_tensors_are_equal_bit_for_bit(dtype: torch.dtype) -> None:
    state = {"some": (torch.randn(3, 2).to(dtype), [torch.tensor(1).to(dtype), torch.empty(0, dtype=dtype)])}
    assert same(unpack(pack(state, rank=0, num_ranks=1), rank=0, num_ranks=1), state)


@pytest.mark.parametrize("saved", [1, 4])
def test_a_state_of_another_number_of_ranks_is_refused(saved: int) -> None:
    with pytest.raises(ConfigError, match=rf"each of {saved} data-parallel .* fit 2. Resume on {saved} .* or start"):
        unpack(pack({}, rank=0, num_ranks=saved), rank=0, num_ranks=2)


def test_a_state_of_our_own_loader_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"another kind of loader.*--checkpoint\.exclude_from_loading=dataloader"):
        unpack(own_loader().state_dict(), rank=0, num_ranks=1)


@pytest.mark.parametrize("odd", [{1: 2}, {1, 2}, b"bytes", object()])
def test_what_json_cannot_hold_is_refused(odd: object) -> None:
    with pytest.raises(ConfigError, match=rf"state\.here is a {type(odd).__name__}, which a checkpoint cannot hold"):
        pack({"here": odd}, rank=0, num_ranks=1)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.split("import", 1)[1].split()[0])
def test_the_examples_of_the_page_run(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "datasets" in example:
        pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    exec(compile(example, PAGE.name, "exec"), {"__name__": "page"})


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])  # Each start takes a while.
@pytest.mark.parametrize("taken", [1, 12, 13, 15])  # After 13 the end of the first epoch was seen.
def test_a_torchdata_loader_with_a_generator_of_its_own_has_the_order_of_all_later_epochs(
    taken: int, num_workers: int
) -> None:
    first, second = (
        torchdata_loader(num_workers=num_workers, generator=torch.Generator().manual_seed(5)) for _ in range(2)
    )
    batches = iter(first)
    for _ in range(min(taken, 13)):
        next(batches, None)
    if taken > 13:
        batches = iter(first)
        for _ in range(13, taken):
            next(batches)
    second.load_state_dict(first.state_dict())
    epochs = (first,) * 3 if taken == 13 else (batches, first, first)
    assert [flat(epoch) for epoch in [second] * 3] == [flat(epoch) for epoch in epochs]


# After 13 the end of the epoch was seen.
@pytest.mark.parametrize(("taken", "num_workers"), [(5, 0), (12, 0), (13, 0), (5, 1)])
def test_a_resumed_torchdata_loader_draws_no_random_numbers_that_an_uninterrupted_one_does_not(
    taken: int, num_workers: int
) -> None:
    first, second = torchdata_loader(num_workers=num_workers), torchdata_loader(num_workers=num_workers)
    batches = iter(first)
    for _ in range(taken):
        next(batches, None)
    state, generator = first.state_dict(), torch.get_rng_state()
    expected = [(batch.tolist(), torch.rand(1)) for loader in (batches, first) for batch in loader]
    second.load_state_dict(state)
    torch.set_rng_state(generator)  # A load restores the generators after the states.
    found = [(batch.tolist(), torch.rand(1)) for loader in ((second, second)[: 1 + (taken < 13)]) for batch in loader]
    assert found == expected
