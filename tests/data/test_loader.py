"""Which windows each rank trains on, before and after a resume."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.bpe import TEXTS, write_tokenizer
from tests.data.numbered import Numbered, ids, loader
from torchtitan_lite.config.job_config import Checkpoint, JobConfig, Training
from torchtitan_lite.data.batch_size import global_batch_size
from torchtitan_lite.data.loader import TokenLoader, build_dataloader
from torchtitan_lite.data.tokenizer import ByteTokenizer, FileTokenizer
from torchtitan_lite.distributed.host_mismatch import HostView, Kind
from torchtitan_lite.errors import ConfigError, CorpusChanged


def steps_of_all_ranks(loaders: list[TokenLoader], count: int) -> list[int]:
    return [i for _ in range(count) for one in loaders for i in ids(next(one))]


def test_a_step_is_int64_micro_batches_of_sequences() -> None:
    batch = next(loader(num_ranks=2, batch=16, local=4))
    assert batch.shape == (2, 4, 4)
    assert batch.dtype == torch.int64
    assert batch.device.type == "cpu"


@settings(deadline=None, max_examples=30)
@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2]), st.integers(0, 100))
def test_an_epoch_holds_every_window_once_whatever_the_ranks(num_ranks: int, local: int, seed: int) -> None:
    batch = num_ranks * local
    loaders = [loader(48, rank=r, num_ranks=num_ranks, batch=batch, local=local, seed=seed) for r in range(num_ranks)]
    first = steps_of_all_ranks(loaders, 48 // batch)
    second = steps_of_all_ranks(loaders, 48 // batch)
    assert sorted(first) == sorted(second) == list(range(48))
    assert first != second


def test_the_global_order_does_not_depend_on_ranks_or_micro_batches() -> None:
    one_rank = steps_of_all_ranks([loader(batch=8)], 7)
    assert one_rank == steps_of_all_ranks([loader(rank=r, num_ranks=4, batch=8, local=2) for r in range(4)], 7)
    assert one_rank == steps_of_all_ranks([loader(batch=8, local=8)], 7)


def test_a_step_may_cross_from_one_epoch_into_the_next() -> None:
    taken = steps_of_all_ranks([loader(10, batch=8)], 5)
    assert [sorted(taken[start : start + 10]) for start in range(0, 40, 10)] == [list(range(10))] * 4


@settings(deadline=None, max_examples=30)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.integers(0, 12))
def test_a_resume_on_another_number_of_ranks_continues_exactly(before: int, after: int, steps: int) -> None:
    straight = steps_of_all_ranks([loader()], steps + 4)
    first = [loader(rank=r, num_ranks=before) for r in range(before)]
    taken = steps_of_all_ranks(first, steps)
    states = [one.state_dict() for one in first]
    assert all(state == states[0] for state in states)
    second = [loader(rank=r, num_ranks=after, seed=99) for r in range(after)]
    for one in second:
        one.load_state_dict(states[0])
    assert taken + steps_of_all_ranks(second, 4) == straight


def test_its_view_names_the_data_the_tokenizer_and_the_file_of_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(TEXTS))
    training = Training(dataset="text", dataset_path=f"{tmp_path}/*.txt", seq_len=31, tokens_folder=str(tmp_path / "t"))
    tokenizer, views = FileTokenizer(write_tokenizer(tmp_path / "tokenizer")), list[HostView]()
    for load_only in (False, False, True):
        checkpoint = Checkpoint(enable_checkpoint=True, load_only=load_only)
        config = JobConfig(training=training, checkpoint=checkpoint)
        views.append(build_dataloader(config, tokenizer, seed=0, rank=0, num_ranks=1).view())
    first, second, only_loads = views
    assert first == second
    (tokens,) = (fact for fact in first.facts if fact[0] is Kind.TOKENS)
    assert tokens[1].startswith(f"the file of tokens {tmp_path / 't'}/")
    assert first.facts == {**only_loads.facts, tokens: first.facts[tokens]} and tokens not in only_loads.facts
    assert int(first.facts[tokens].split()[1]) in {path.stat().st_ino for path in (tmp_path / "t").rglob("*")}
    in_bytes = build_dataloader(JobConfig(training=training), ByteTokenizer(), seed=0, rank=0, num_ranks=1).view()
    assert tokens not in in_bytes.facts
    assert [*in_bytes.facts.values()][1] == "bytes"


def test_a_resume_with_another_batch_size_continues_at_the_next_position() -> None:
    straight = ids(torch.cat(list(islice(loader(batch=8), 3))))
    first, second = loader(batch=8), loader(batch=4)
    next(first)
    second.load_state_dict(first.state_dict())
    assert ids(torch.cat(list(islice(second, 4)))) == straight[8:]


def test_the_state_is_a_copy_of_plain_values() -> None:
    one = loader()
    state = one.state_dict()
    assert all(type(value) in (int, str) for value in state.values())
    next(one)
    assert state["next_position"] == 0
    assert one.state_dict()["next_position"] == 8


def test_the_state_has_the_epoch_of_the_next_position() -> None:
    one = loader(10, batch=8)
    list(islice(one, 3))
    assert one.state_dict()["epoch"] == 2


def test_data_ends_when_a_complete_step_no_longer_fits() -> None:
    assert len(list(loader(20, batch=8, max_epochs=2))) == 5
    assert len(list(loader(20, batch=6, max_epochs=1))) == 3


def test_an_end_reached_before_a_resume_is_the_end_after_it() -> None:
    one, two = loader(20, max_epochs=1), loader(20, max_epochs=1)
    list(one)
    two.load_state_dict(one.state_dict())
    assert list(two) == []


def test_fewer_sequences_than_one_step_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"training\.max_epochs: 1 x 5 sequences, less than one step of 8"):
        loader(5, max_epochs=1)


@pytest.mark.parametrize(
    ("documents", "change"),
    [(Numbered(41), "files: 40 -> 41; bytes: 80 -> 82"), (Numbered(40, "other"), "digest: same -> other")],
)
def test_a_changed_corpus_is_refused_with_what_changed(documents: Numbered, change: str) -> None:
    state, other = loader(40).state_dict(), loader(documents=documents)
    with pytest.raises(CorpusChanged, match=change):
        other.check_state(state)
    with pytest.raises(CorpusChanged, match=change):
        other.load_state_dict(state)
    assert other.state_dict()["next_position"] == 0


def test_another_sequence_length_is_refused() -> None:
    state = loader().state_dict() | {"seq_len": 7}
    with pytest.raises(CorpusChanged, match="seq_len: 7 -> 3"):
        loader().check_state(state)


def test_checking_a_state_changes_nothing() -> None:
    one, two = loader(seed=1), loader(seed=2)
    next(one)
    before = two.state_dict()
    two.check_state(one.state_dict())
    assert two.state_dict() == before


@pytest.mark.parametrize(("asked", "found"), [(-1, 16), (16, 16), (48, 48)])
def test_the_global_batch_is_a_multiple_of_batch_size_times_ranks(asked: int, found: int) -> None:
    assert global_batch_size(Training(batch_size=8, global_batch_size=asked), num_ranks=2) == found


@pytest.mark.parametrize(
    ("asked", "batch_size", "num_ranks", "would_do"),
    [
        (20, 8, 2, "16 and 32 would do, as would batch_size 5 or 10"),
        (3, 8, 2, "16 would do"),
        (32, 8, 3, "24 and 48 would do, as would 2 or 4 ranks"),
        (48, 8, 4, "32 and 64 would do, as would batch_size 6 or 12, or 3 or 6 ranks"),
    ],
)
def test_a_global_batch_that_does_not_divide_is_an_error_that_names_what_does(
    asked: int, batch_size: int, num_ranks: int, would_do: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        global_batch_size(Training(batch_size=batch_size, global_batch_size=asked), num_ranks)
    assert str(refused.value) == (
        f"training.global_batch_size: {asked} is not a multiple of batch_size x ranks = {batch_size} x {num_ranks} = "
        f"{batch_size * num_ranks}; {would_do}."
    )


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 12))
def test_every_value_that_the_error_names_is_accepted(total: int, batch_size: int, num_ranks: int) -> None:
    try:
        global_batch_size(Training(batch_size=batch_size, global_batch_size=total), num_ranks)
    except ConfigError as refused:
        said = str(refused)
    else:
        return
    for good in numbers(r"; ([\d and]+) would do", said):
        assert global_batch_size(Training(batch_size=batch_size, global_batch_size=good), num_ranks) == good
    for good in numbers(r"batch_size ([\d or]*\d)(?:\.|,)", said):
        assert global_batch_size(Training(batch_size=good, global_batch_size=total), num_ranks) == total
    for good in numbers(r"([\d or]*\d) ranks\.$", said):
        assert global_batch_size(Training(batch_size=batch_size, global_batch_size=total), good) == total


def numbers(pattern: str, text: str) -> list[int]:
    found = re.search(pattern, text)
    return [int(number) for number in re.findall(r"\d+", found[1])] if found else []


def test_a_loader_is_built_from_the_config(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abcdefgh" * 64)
    training = Training(dataset="text", dataset_path=f"{tmp_path}/*.txt", seq_len=15, batch_size=2, global_batch_size=8)
    batch = next(build_dataloader(JobConfig(training=training), ByteTokenizer(), seed=1, rank=1, num_ranks=2))
    assert batch.shape == (2, 2, 16)
    assert set(batch.unique().tolist()) <= {*b"abcdefgh", 256, 257}


def test_a_loader_has_the_positions_of_its_last_step() -> None:
    one = loader(rank=1, num_ranks=2, batch=8)
    assert list(one.last_positions) == []
    list(islice(one, 2))
    assert list(one.last_positions) == [12, 13, 14, 15]
    one.load_state_dict(one.state_dict())
    assert list(one.last_positions) == []


def test_at_its_end_a_loader_still_has_the_positions_of_its_last_step() -> None:
    one = loader(20, batch=8, max_epochs=1)
    list(one)
    assert list(one.last_positions) == list(range(8, 16))


def test_a_state_from_before_there_were_tokenizers_is_one_of_bytes() -> None:
    one, two = loader(), loader()
    next(one)
    state = {name: value for name, value in one.state_dict().items() if name != "tokenizer"}
    two.load_state_dict(state)
    assert ids(next(two)) == ids(next(one))


def test_another_tokenizer_is_refused_by_name() -> None:
    state = loader().state_dict() | {"tokenizer": "0123abcd"}
    with pytest.raises(CorpusChanged, match=r"on: tokenizer: 0123abcd -> bytes\. Put the old tokenizer back"):
        loader().check_state(state)


def test_the_progress_is_the_part_of_the_epoch_that_was_taken() -> None:
    one = loader(20, batch=8)
    assert one.progress == (0, 0.0)
    found = [one.progress for _ in islice(one, 5)]
    assert found == [(0, 0.4), (0, 0.8), (1, 0.2), (1, 0.6), (1, 1.0)]
    two = loader(20, batch=4, rank=1, num_ranks=2)
    two.load_state_dict(one.state_dict())
    assert two.progress == (1, 1.0)
    next(two)
    assert two.progress == (2, 0.2)
