"""Where documents come from, and what makes a corpus the same corpus."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest

from torchtitan_lite.config.job_config import Training
from torchtitan_lite.data.documents import (
    SAMPLED_BYTES,
    JsonDocuments,
    TextFiles,
    build_documents,
    matching_files,
    stdlib_sources,
)
from torchtitan_lite.errors import ConfigError, CorpusChanged


def write(folder: Path, **contents: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / f"{name}.txt").write_bytes(content.encode())
    return sorted(folder.glob("*.txt"))


def write_jsonl(path: Path, *lines: str) -> list[Path]:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return [path]


def test_the_default_corpus_is_megabytes_of_the_standard_library_without_tests() -> None:
    documents = build_documents(Training())
    assert documents.fingerprint.kind.startswith("stdlib of Python 3.")
    assert documents.fingerprint.bytes == documents.lengths.sum() > 4_000_000
    names = {path.relative_to(sysconfig.get_path("stdlib")).as_posix() for path in stdlib_sources()}
    assert "json/decoder.py" in names
    assert not [name for name in names if {"test", "tests", "site-packages"}.intersection(name.split("/"))]


def test_a_python_without_sources_is_an_error_that_names_the_keys_for_own_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dataset=text"):
        stdlib_sources(tmp_path)


def test_a_glob_finds_files_at_any_depth_sorted_and_leaves_out_folders(tmp_path: Path) -> None:
    write(tmp_path / "b", one="1")
    write(tmp_path, a="2")
    (tmp_path / "folder.txt").mkdir()
    assert matching_files(f"{tmp_path}/**/*.txt") == [tmp_path / "a.txt", tmp_path / "b" / "one.txt"]
    assert matching_files(f"{tmp_path}/b/../a.txt")[0].read_text() == "2"


def test_a_relative_glob_is_looked_up_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "with [brackets]", a="2")
    monkeypatch.chdir(tmp_path / "with [brackets]")
    assert [path.name for path in matching_files("*.txt")] == ["a.txt"]


def test_a_glob_that_matches_nothing_is_an_error_naming_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"training\.dataset_path: no file matches 'no/such/\*\.txt'"):
        build_documents(Training(dataset="text", dataset_path="no/such/*.txt"))


def test_text_files_are_one_document_each(tmp_path: Path) -> None:
    documents = TextFiles(write(tmp_path, a="hello", b="", c="wörld"))
    assert documents.lengths.tolist() == [5, 0, 6]
    assert documents.read(0, 1, 3) == b"el"
    assert documents.read(2, 0, 6).decode() == "wörld"


def test_a_file_that_shrinks_during_the_run_is_noticed(tmp_path: Path) -> None:
    documents = TextFiles(write(tmp_path, a="hello"))
    (tmp_path / "a.txt").write_bytes(b"h")
    with pytest.raises(CorpusChanged, match=r"a\.txt: shorter"):
        documents.read(0, 0, 5)


def test_each_json_line_is_a_document_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    (path,) = write_jsonl(tmp_path / "d.jsonl", '{"text": "höi"}', "", '{"n": 1, "text": "two\\nlines"}')
    pieces = list(JsonDocuments([path], "text").pieces(path))
    assert [piece.text for piece in pieces] == ["höi", "two\nlines"]
    assert pieces[-1].progress == 1.0


@pytest.mark.parametrize(
    ("line", "finding"),
    [
        ("{broken", "expected one JSON object a line"),
        ('["text"]', "expected a JSON object"),
        ('{"content": "x"}', "expected text under 'text', found text under: content"),
        ('{"text": 5}', "expected text under 'text', found text under: none"),
    ],
)
def test_a_bad_json_line_is_named_by_file_and_line(tmp_path: Path, line: str, finding: str) -> None:
    paths = write_jsonl(tmp_path / "d.jsonl", json.dumps({"text": "fine"}), line)
    with pytest.raises(ConfigError, match=rf"d\.jsonl:2: {finding}"):
        list(JsonDocuments(paths, "text").pieces(*paths))


def test_a_corpus_that_moved_completely_is_the_same(tmp_path: Path) -> None:
    before = TextFiles(write(tmp_path / "here", a="x", b="y")).fingerprint
    assert TextFiles(write(tmp_path / "there", a="x", b="y")).fingerprint == before


def test_a_changed_byte_or_name_changes_the_digest_only(tmp_path: Path) -> None:
    first = TextFiles(write(tmp_path / "1", a="x", b="y")).fingerprint
    for other in (write(tmp_path / "2", a="x", b="z"), write(tmp_path / "3", a="x", c="y")):
        second = TextFiles(other).fingerprint
        assert (second.files, second.bytes) == (first.files, first.bytes)
        assert second.digest != first.digest


def test_the_head_and_the_tail_of_a_large_file_are_in_the_digest(tmp_path: Path) -> None:
    content = bytearray(4 * SAMPLED_BYTES)
    digests = set()
    for changed in (0, SAMPLED_BYTES - 1, 3 * SAMPLED_BYTES, 4 * SAMPLED_BYTES - 1):
        content[changed] ^= 1
        (tmp_path / "a.txt").write_bytes(content)
        digests.add(TextFiles([tmp_path / "a.txt"]).fingerprint.digest)
    assert len(digests) == 4
