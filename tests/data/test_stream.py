"""A dataset of Hugging Face's library, read as a stream: packed, saved and resumed on each rank."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.bpe import TEXTS, write_tokenizer
from torchtitan_lite.config.job_config import Job, JobConfig, Training
from torchtitan_lite.data.loader import build_dataloader
from torchtitan_lite.data.stream import EpochProgress, StreamLoader
from torchtitan_lite.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from torchtitan_lite.errors import ConfigError, CorpusChanged

pytest.importorskip("datasets", reason="the extra datasets is not part of test: it is large")

FILES = 4


@pytest.fixture(scope="module", autouse=True)
def _offline(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("dataset")
    for number in range(FILES):
        lines = [json.dumps({"text": text, "n": n}) for n, text in enumerate(TEXTS[number::FILES])]
        (found / f"train-{number}.jsonl").write_text("\n".join(lines) + "\n")
    return found


def loader(
    folder: Path, *, rank: int = 0, num_ranks: int = 1, tokenizer: Tokenizer | None = None, **training: Any
) -> StreamLoader:
    options: dict[str, Any] = {"seq_len": 31, "batch_size": 2, "global_batch_size": 4, **training}
    config = JobConfig(
        job=Job(dump_folder=str(folder / "out")),
        training=Training(dataset="huggingface", dataset_path=str(folder), **options),
    )
    made = build_dataloader(config, tokenizer or ByteTokenizer(), seed=0, rank=rank, num_ranks=num_ranks)
    assert isinstance(made, StreamLoader)
    return made


def tokens(one: StreamLoader, steps: int) -> list[int]:
    return [int(token) for batch in islice(one, steps) for token in batch.flatten()]


def test_documents_are_packed_one_after_the_other_between_their_marks(folder: Path) -> None:
    taken = tokens(loader(folder), 5)
    documents = [TEXTS[index] for number in range(FILES) for index in range(number, len(TEXTS), FILES)]
    stream = [token for text in documents for token in (256, *text.encode(), 257)]
    assert taken == stream[: 5 * 4 * 32]
    batch = next(loader(folder))
    assert (batch.shape, batch.dtype) == ((2, 2, 32), torch.int64)


def test_each_rank_takes_other_documents(folder: Path) -> None:
    texts = [bytes(token for token in tokens(loader(folder, rank=rank, num_ranks=2), 60) if token < 256).decode(
        errors="ignore") for rank in range(2)]  # fmt: skip
    found = [{line for line in text.splitlines() if line.startswith("# module")} for text in texts]
    assert found[0] and found[1] and not found[0] & found[1]


@pytest.mark.parametrize("steps", [0, 1, 7, 40, 200])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_resume_on_the_same_ranks_continues_with_the_next_token_over_epochs(
    folder: Path, steps: int, num_ranks: int, tmp_path: Path
) -> None:
    tokenizer = FileTokenizer(write_tokenizer(tmp_path))
    for rank in range(num_ranks):
        straight = loader(folder, rank=rank, num_ranks=num_ranks, tokenizer=tokenizer)
        tokens(straight, steps)
        state = straight.state_dict()
        epoch, following = straight.progress, tokens(straight, 30)
        resumed = loader(folder, rank=rank, num_ranks=num_ranks, tokenizer=tokenizer)
        resumed.check_state(state)
        resumed.load_state_dict(state)
        assert resumed.progress == epoch
        assert tokens(resumed, 30) == following
        assert resumed.last_positions == straight.last_positions
        assert resumed.progress == straight.progress
    assert steps < 200 or epoch.epoch > 0


def test_an_epoch_is_counted_and_its_length_is_not_known(folder: Path) -> None:
    one = loader(folder)
    assert one.progress == EpochProgress(0, None)
    tokens(one, 150)
    assert one.progress.epoch > 0 and one.progress.fraction is None


def test_positions_count_over_all_ranks(folder: Path) -> None:
    one = loader(folder, rank=1, num_ranks=2)
    assert list(one.last_positions) == []
    tokens(one, 2)
    assert list(one.last_positions) == [6, 7]


def test_another_number_of_ranks_is_refused_by_name(folder: Path) -> None:
    state = loader(folder, rank=0, num_ranks=2).state_dict()
    with pytest.raises(ConfigError, match=r"one for each of 2 data-parallel ranks and does not fit 1. Resume on 2"):
        loader(folder).check_state(state)


def test_its_view_names_the_dataset_and_the_tokenizer(folder: Path, tmp_path: Path) -> None:
    other = loader(folder, tokenizer=FileTokenizer(write_tokenizer(tmp_path))).view()
    for rank in range(2):
        view = loader(folder, rank=rank, num_ranks=2).view()
        assert [*view.facts.values()] == [f"{folder}, train", "bytes"]
        assert len(other.where_it_differs(view).facts) == 1


@pytest.mark.parametrize("change", ["tokenizer", "seq_len", "source"])
def test_other_data_are_refused_by_name(folder: Path, tmp_path: Path, change: str) -> None:
    state = loader(folder).state_dict()
    if change == "tokenizer":
        other = loader(folder, tokenizer=FileTokenizer(write_tokenizer(tmp_path)))
    elif change == "seq_len":
        other = loader(folder, seq_len=15)
    else:
        (tmp_path / "a.jsonl").write_text('{"text": "other"}\n')
        other = loader(tmp_path)
    before = other.state_dict()
    with pytest.raises(CorpusChanged, match=f"{change}: .* -> "):
        other.load_state_dict(state)
    assert other.state_dict()["rank0"].tolist() == before["rank0"].tolist()


def test_what_datasets_cannot_open_is_an_error_that_names_the_keys(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"training\.dataset_path: datasets .* did not open .*no such"):
        loader(tmp_path / "no such")
    with pytest.raises(ConfigError, match=r"split 'validation'.*Correct dataset_path, dataset_subset or dataset_split"):
        loader(folder, dataset_split="validation")


def test_a_dataset_without_the_text_is_refused_before_the_first_step(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected text under 'body', found text under: text.*dataset_text_key"):
        loader(folder, dataset_text_key="body")


def test_a_rank_without_a_share_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "only one"}\n')
    with pytest.raises(ConfigError, match=r"the share of data-parallel rank 1 of 2 in .* is empty"):
        loader(tmp_path, rank=1, num_ranks=2)


def test_what_save_to_disk_wrote_is_refused_with_the_way_to_use_it(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ConfigError, match=r"written by save_to_disk.*training\.dataset=parquet"):
        loader(tmp_path / "saved")
