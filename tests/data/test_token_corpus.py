"""The tokens of a corpus are made once, shared by all processes, and made again if they are not what they should be."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import signal
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.bpe import TEXTS, write_tokenizer
from tests.disks import make_read_only, small_disk
from tests.forked import Forked
from torchtitan_lite.config.job_config import Checkpoint, Job, JobConfig, Training
from torchtitan_lite.data.documents import PIECE_BYTES, JsonDocuments, ParquetColumns, TextFiles, build_documents
from torchtitan_lite.data.loader import ByteCorpus, build_dataloader
from torchtitan_lite.data.token_corpus import TokenCorpus
from torchtitan_lite.data.tokenizer import ByteTokenizer, FileTokenizer
from torchtitan_lite.errors import ConfigError, CorpusChanged, TokensNotWritten


class Counting(ByteTokenizer):
    """The byte tokenizer, which counts what it encodes."""

    encoded = 0

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        self.encoded += len(texts)
        return super().encode(texts)


def write_texts(folder: Path, texts: Sequence[str] = TEXTS) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_bytes(text.encode())
    return sorted(folder.glob("*.txt"))


def write_parquet(path: Path, texts: Sequence[str | None] = TEXTS, rows: int = 7, key: str = "text") -> list[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": list(range(len(texts))), key: texts}), path, row_group_size=rows)
    return [path]


def corpus(tmp_path: Path, texts: Sequence[str] = TEXTS, **options: bool) -> TokenCorpus:
    sources = TextFiles(write_texts(tmp_path / "texts", texts), "text")
    return TokenCorpus(sources, Counting(), tmp_path / "kept", **{"writes": True, **options})


def stream(found: TokenCorpus | ByteCorpus) -> list[int]:
    return found.read(0, found.num_tokens).tolist()


def token_files(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "kept").rglob("*") if path.is_file() and path.name != "lock")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="torchtitan_lite")
    return caplog


def test_text_jsonl_and_parquet_give_the_same_stream_as_the_documents_one_by_one(tmp_path: Path) -> None:
    tokenizer = FileTokenizer(write_tokenizer(tmp_path))
    expected = [token for text in TEXTS for token in (0, *tokenizer.encode([text])[0], 1)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS) + "\n\n")
    for texts in (
        TextFiles(write_texts(tmp_path / "texts"), "text"),
        JsonDocuments([tmp_path / "a.jsonl"], "text"),
        ParquetColumns(write_parquet(tmp_path / "a.parquet"), "text"),
    ):
        assert stream(TokenCorpus(texts, tokenizer, tmp_path / "kept", writes=True)) == expected


def test_bytes_of_lines_of_json_and_of_parquet_are_those_of_the_same_files_of_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    lines = JsonDocuments([tmp_path / "a.jsonl"], "text")
    parquet = ParquetColumns(write_parquet(tmp_path / "a.parquet"), "text")
    expected = stream(ByteCorpus(TextFiles(write_texts(tmp_path / "texts"))))
    for documents in (lines, parquet):
        assert stream(TokenCorpus(documents, ByteTokenizer(), tmp_path / "kept", writes=True)) == expected


def test_all_of_a_jsonl_file_is_in_the_digest(tmp_path: Path) -> None:
    digests = set()
    for text in ("b", "c"):
        (tmp_path / "d.jsonl").write_text(f'{{"text": "a"}}\n{{"text": "{text}"}}\n')
        lines = JsonDocuments([tmp_path / "d.jsonl"], "text")
        digests.add(TokenCorpus(lines, ByteTokenizer(), tmp_path / "kept", writes=True).fingerprint.digest)
    assert len(digests) == 2


def test_a_position_in_lines_of_json_that_were_read_in_place_continues_in_their_tokens(tmp_path: Path) -> None:
    """The state, and the windows after it, are those of the version before their bytes were kept as tokens."""
    (tmp_path / "a.jsonl").write_text('{"text": "höi"}\n\n{"n": 1, "text": "two\\nlines \\ud800"}\n', encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n{"text": "the last one, without a newline"}')
    saved = {
        **{"next_position": 3, "seed": 3, "epoch": 0, "global_batch_size": 1, "seq_len": 7, "tokenizer": "bytes"},
        **{"corpus_kind": "jsonl, key text", "corpus_files": 2, "corpus_bytes": 112},
        "corpus_digest": "3b97cad7ce9bc09283e43a2330f0650a",
    }
    training = Training(dataset="jsonl", dataset_path=f"{tmp_path}/*.jsonl", seq_len=7, batch_size=1)
    config = JobConfig(job=Job(dump_folder=str(tmp_path / "out")), training=training)
    loader = build_dataloader(config, ByteTokenizer(), seed=5, rank=0, num_ranks=1)
    loader.load_state_dict(saved)
    windows = [next(loader).flatten().tolist() for _ in range(3)]
    assert [bytes(token for token in window if token < 256) for window in windows] == [
        b" one, wi",
        b"the last",
        b" \xed\xa0\x80",
    ]


def test_where_bos_and_eos_are_one_token_it_only_follows_each_document(tmp_path: Path) -> None:
    marks: dict[str, object] = {"bos_token": "<|e|>", "eos_token": "<|e|>"}
    tokenizer = FileTokenizer(write_tokenizer(tmp_path, special=["<|e|>"], config=marks))
    found = TokenCorpus(TextFiles(write_texts(tmp_path / "t", ["a", "b"]), "text"), tokenizer, tmp_path, writes=True)
    (a,), (b,) = tokenizer.encode(["a", "b"])
    assert stream(found) == [a, 0, b, 0]


def test_a_large_text_file_is_one_document_although_it_is_read_in_pieces(tmp_path: Path) -> None:
    text = "".join(f"line {number} wörld\n" for number in range(PIECE_BYTES // 16)) + "é" * 10
    assert len(text.encode()) > PIECE_BYTES
    pieces = list(TextFiles([], "text").pieces(write_texts(tmp_path, [text])[0]))
    assert "".join(piece.text for piece in pieces) == text
    assert [(piece.begins, piece.ends) for piece in pieces] == [(True, False), (False, True)]
    assert pieces[0].text.endswith("\n")


def test_a_second_process_and_a_restart_read_the_tokens_that_are_there(tmp_path: Path) -> None:
    first = corpus(tmp_path)
    tokens = stream(first)
    again = corpus(tmp_path)
    for path in sorted((tmp_path / "texts").iterdir()):
        os.utime(path, ns=(1, 1))  # A copy has other times: its contents count.
    later = corpus(tmp_path)
    assert stream(again) == stream(later) == tokens
    assert first.fingerprint == again.fingerprint == later.fingerprint
    assert (again._tokenizer.encoded, later._tokenizer.encoded) == (0, 0)  # type: ignore[attr-defined]
    assert len(token_files(tmp_path)) == 1


def _take(folder: str, result: str) -> None:
    tokenizer = Counting()
    texts = TextFiles(sorted((Path(folder) / "texts").iterdir()), "text")
    assert stream(TokenCorpus(texts, tokenizer, Path(folder) / "kept", writes=True))
    Path(result).write_text(str(tokenizer.encoded))


def test_of_processes_that_start_at_once_one_makes_the_tokens(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    processes = [Forked(_take, str(tmp_path), str(tmp_path / f"result{number}")) for number in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    made = [int(path.read_text()) for path in tmp_path.glob("result*")]
    assert sorted(made) == [0, 0, len(TEXTS)]
    assert len(token_files(tmp_path)) == 1


def test_a_process_that_waits_says_for_which_one_and_how_far_that_is(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    paths = write_texts(tmp_path / "texts")
    TokenCorpus(TextFiles(paths, "text"), Counting(), tmp_path / "kept", writes=True).read(0, 1)
    (file,) = token_files(tmp_path)
    file.unlink()
    with (file.parent / "lock").open("r+b", buffering=0) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        held.truncate(0)
        held.write(b"process 4711 on node7: 12 %")
        naps: list[float] = []

        def sleep(seconds: float) -> None:
            naps.append(seconds)
            if len(naps) == 400:
                fcntl.flock(held, fcntl.LOCK_UN)

        found = TokenCorpus(TextFiles(paths, "text"), Counting(), tmp_path / "kept", writes=True, sleep=sleep)
        assert stream(found)
    waiting = "Waiting for process 4711 on node7: 12 %, which tokenises the corpus"
    assert log.messages.count(waiting) == 3, "at once, after 30 s and after 60 s of 80 s"


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "replaced"])
def test_damaged_tokens_are_made_again_with_a_line_about_it(
    tmp_path: Path, damage: str, log: pytest.LogCaptureFixture
) -> None:
    expected = stream(corpus(tmp_path))
    (file,) = token_files(tmp_path)
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes({"cut": data[:-9], "flipped": data, "emptied": b"", "replaced": b"\0" * 4096}[damage])
    again = corpus(tmp_path)
    assert stream(again) == expected
    assert "The tokens in" in log.text and "are damaged" in log.text
    assert stream(corpus(tmp_path)) == expected
    assert log.text.count("Tokenising") == 2


def test_damage_during_a_run_is_healed_where_it_is_read(tmp_path: Path) -> None:
    found, other = corpus(tmp_path), corpus(tmp_path)
    assert found.num_tokens == other.num_tokens
    (file,) = token_files(tmp_path)
    with file.open("r+b") as opened:
        opened.write(b"\xff\xff\xff")
    expected = stream(corpus(tmp_path / "other"))
    assert stream(found) == stream(other) == expected
    assert other._tokenizer.encoded == 0, "the other process reads what the first one made again"  # type: ignore[attr-defined]


def test_a_changed_file_of_the_same_size_is_tokenised_again_and_has_another_fingerprint(tmp_path: Path) -> None:
    before = corpus(tmp_path)
    tokens, fingerprint = stream(before), before.fingerprint
    after = corpus(tmp_path, [TEXTS[0].replace("module", "MODULE"), *TEXTS[1:]])
    assert stream(after) != tokens
    assert after.fingerprint.digest != fingerprint.digest
    assert (after.fingerprint.files, after.fingerprint.bytes) == (fingerprint.files, fingerprint.bytes)


def test_a_corpus_that_changed_during_the_run_is_not_mixed_into_it(tmp_path: Path) -> None:
    found = corpus(tmp_path)
    assert found.num_tokens
    (file,) = token_files(tmp_path)
    with file.open("r+b") as opened:
        opened.write(b"\xff\xff\xff")
    write_texts(tmp_path / "texts", [TEXTS[0].replace("module", "MODULE")])
    with pytest.raises(CorpusChanged, match=r"000\.txt: it changed during this run"):
        found.read(0, 10)


def _die_in_the_middle(folder: str) -> None:
    class Killed(ByteTokenizer):
        def encode(self, texts: Sequence[str]) -> list[list[int]]:
            os.kill(os.getpid(), signal.SIGKILL)
            return []

    texts = TextFiles(sorted((Path(folder) / "texts").iterdir()), "text")
    stream(TokenCorpus(texts, Killed(), Path(folder) / "kept", writes=True))


def test_a_kill_while_the_tokens_are_made_leaves_nothing_that_a_later_start_uses(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    assert Forked(_die_in_the_middle, str(tmp_path)).wait(60) == -signal.SIGKILL
    (left,) = token_files(tmp_path)
    assert left.name.endswith(".tmp")
    found = corpus(tmp_path)
    assert stream(found) == stream(corpus(tmp_path / "other"))
    assert [path.name for path in token_files(tmp_path)] == ["tokens"]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    expected = stream(corpus(tmp_path))
    (file,) = token_files(tmp_path)
    file.rename(file.with_name(".tokens.elsewhere.1.tmp"))
    assert stream(corpus(tmp_path)) == expected
    assert token_files(tmp_path) == [file]


def test_a_run_that_may_write_nothing_reads_the_tokens_that_are_there_or_keeps_its_own(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    expected = stream(corpus(tmp_path / "other"))
    found = corpus(tmp_path, writes=False)
    assert stream(found) == expected
    assert not (tmp_path / "kept").exists()
    assert "This run writes nothing into" in log.text
    corpus(tmp_path).read(0, 1)
    later = corpus(tmp_path, writes=False)
    assert stream(later) == expected
    assert later._tokenizer.encoded == 0  # type: ignore[attr-defined]


def test_a_folder_that_cannot_be_written_is_an_error_that_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("a file")
    with pytest.raises(ConfigError, match=r"training\.tokens_folder: the tokens could not be written in .*kept"):
        corpus(tmp_path).read(0, 1)


def test_other_tokenizers_and_other_files_have_their_own_tokens(tmp_path: Path) -> None:
    tokenizers = [ByteTokenizer(), FileTokenizer(write_tokenizer(tmp_path))]
    sources = [TextFiles(write_texts(tmp_path / "a"), "text"), TextFiles(write_texts(tmp_path / "b", ["b"]), "text")]
    for tokenizer in tokenizers:
        for source in sources:
            assert TokenCorpus(source, tokenizer, tmp_path / "kept", writes=True).num_tokens
    assert len(token_files(tmp_path)) == 4


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    class Endless(TextFiles):
        def pieces(self, path: Path) -> Iterator:
            for _ in range(200):
                yield from super().pieces(path)

    paths = write_texts(tmp_path, ["".join(TEXTS) * 8])
    tracemalloc.start()
    try:
        found = TokenCorpus(Endless(paths, "text"), ByteTokenizer(), tmp_path / "kept", writes=True)
        assert found.num_tokens * 2 > 30 << 20
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


def test_a_text_file_that_is_not_utf_8_is_named_with_the_place(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"fine\n\xe9t\xe9\n")
    with pytest.raises(ConfigError, match=r"a\.txt: expected UTF-8, found b'\\xe9' near byte 5"):
        list(TextFiles([path], "text").pieces(path))


def test_rows_without_text_are_skipped_and_an_empty_text_is_a_document(tmp_path: Path) -> None:
    (path,) = write_parquet(tmp_path / "a.parquet", ["a", None, "", "b"], rows=2)
    pieces = list(ParquetColumns([path], "text").pieces(path))
    assert [piece.text for piece in pieces] == ["a", "", "b"]
    assert pieces[-1].progress == 1.0


def test_a_column_of_texts_that_repeat_is_text_too(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.array(["a", "b", "a"]).dictionary_encode()}), path)
    assert [piece.text for piece in ParquetColumns([path], "text").pieces(path)] == ["a", "b", "a"]


def test_a_missing_column_is_an_error_that_names_those_there_are(tmp_path: Path) -> None:
    (path,) = write_parquet(tmp_path / "a.parquet", key="content")
    with pytest.raises(
        ConfigError, match=r"a\.parquet: expected a column of text 'text', found columns of text: content \(of id, con"
    ):
        list(ParquetColumns([path], "text").pieces(path))
    with pytest.raises(ConfigError, match=r"expected a column of text 'id', .*Set --training\.dataset_text_key"):
        list(ParquetColumns([path], "id").pieces(path))


def test_a_missing_column_in_the_last_file_is_found_before_the_first_is_tokenised(tmp_path: Path) -> None:
    paths = [*write_parquet(tmp_path / "a.parquet"), *write_parquet(tmp_path / "b.parquet", key="content")]
    tokenizer = Counting()
    with pytest.raises(ConfigError, match=r"b\.parquet: expected a column of text 'text'"):
        TokenCorpus(ParquetColumns(paths, "text"), tokenizer, tmp_path / "kept", writes=True).read(0, 1)
    assert tokenizer.encoded == 0


@pytest.mark.parametrize("content", [b"", b"no parquet at all", b"PAR1" + b"\0" * 100 + b"PAR1"])
def test_a_broken_parquet_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(ConfigError, match=r"a\.parquet is not a Parquet file that pyarrow .* reads"):
        list(ParquetColumns([], "text").pieces(tmp_path / "a.parquet"))


def test_a_loader_of_parquet_with_a_tokenizer_is_built_from_the_config(tmp_path: Path) -> None:
    write_parquet(tmp_path / "data" / "a.parquet")
    tokenizer = FileTokenizer(write_tokenizer(tmp_path))
    training = Training(dataset="parquet", dataset_path=f"{tmp_path}/data/*.parquet", seq_len=15, batch_size=2)
    config = JobConfig(job=Job(dump_folder=str(tmp_path / "out")), training=training)
    loader = build_dataloader(config, tokenizer, seed=1, rank=1, num_ranks=2)
    assert next(loader).shape == (1, 2, 16)
    state = loader.state_dict()
    assert state["tokenizer"] == tokenizer.fingerprint
    assert state["corpus_kind"] == "parquet, key text"
    assert list((tmp_path / "out" / "tokens").glob("*/tokens"))
    changed = FileTokenizer(write_tokenizer(tmp_path / "other", vocab_size=401))
    other = build_dataloader(config, changed, seed=1, rank=1, num_ranks=2)
    with pytest.raises(CorpusChanged, match=f"tokenizer: {tokenizer.fingerprint} -> {changed.fingerprint}"):
        other.load_state_dict(state)


def test_a_dry_run_makes_no_tokens(tmp_path: Path) -> None:
    write_parquet(tmp_path / "data" / "a.parquet")
    training = Training(dataset="parquet", dataset_path=f"{tmp_path}/data/*.parquet", seq_len=15, max_epochs=1)
    real = JobConfig(job=Job(dump_folder=str(tmp_path / "real")), training=training)
    state = build_dataloader(real, ByteTokenizer(), seed=1, rank=0, num_ranks=1).state_dict()
    dry = JobConfig(job=Job(dump_folder=str(tmp_path / "dry")), training=training, checkpoint=Checkpoint(dry_run=True))
    loader = build_dataloader(dry, ByteTokenizer(), seed=1, rank=0, num_ranks=1)
    loader.check_state(state)  # type: ignore[attr-defined]
    assert not (tmp_path / "dry").exists()


def test_bytes_of_files_of_text_are_read_without_a_file_of_tokens(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    training = Training(dataset="text", dataset_path=f"{tmp_path}/texts/*.txt", seq_len=15)
    config = JobConfig(job=Job(dump_folder=str(tmp_path / "out")), training=training)
    next(build_dataloader(config, ByteTokenizer(), seed=1, rank=0, num_ranks=1))
    assert not (tmp_path / "out").exists()
    as_tokens = TokenCorpus(build_documents(training), ByteTokenizer(), tmp_path / "kept", writes=True)
    assert stream(as_tokens) == stream(ByteCorpus(build_documents(training)))


def test_a_full_disk_names_the_folder_and_the_key(tmp_path: Path) -> None:
    texts = ["a" * 3_000_000, "b" * 3_000_000]
    with small_disk(tmp_path / "kept"), pytest.raises(TokensNotWritten) as raised:
        corpus(tmp_path, texts).read(0, 1)
    assert not isinstance(raised.value, ConfigError), "the exit code is 1"
    message = r"the tokens of the corpus could not be written in \S+/kept/[0-9a-f]+: No space left on device, "
    message += r"\S+ \S+ are free\. "
    message += r"Make room there, or set --training\.tokens_folder to a folder on .*"
    assert re.fullmatch(message, str(raised.value))
    with small_disk(tmp_path / "other"), pytest.raises(ConfigError, match="a folder that this user may write"):
        make_read_only(tmp_path / "other")
        TokenCorpus(
            TextFiles(write_texts(tmp_path / "texts"), "text"), Counting(), tmp_path / "other", writes=True
        ).read(0, 1)
