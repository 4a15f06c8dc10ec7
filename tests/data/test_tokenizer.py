"""What a tokenizer.json gives, which marks it has, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.data.bpe import TEXTS, write_tokenizer
from torchtitan_lite.data.tokenizer import ByteTokenizer, FileTokenizer, build_tokenizer
from torchtitan_lite.errors import ConfigError


def test_bytes_are_utf_8_and_two_marks() -> None:
    tokenizer = build_tokenizer("bytes")
    assert tokenizer.encode(["aö", "", "\ud800"]) == [[97, 195, 182], [], [237, 160, 128]]
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eos, tokenizer.fingerprint) == (258, 256, 257, "bytes")


def test_the_files_of_the_byte_tokenizer_give_the_same_tokens(tmp_path: Path) -> None:
    for name, content in ByteTokenizer().files().items():
        (tmp_path / name).write_bytes(content)
    read, own = build_tokenizer(str(tmp_path)), ByteTokenizer()
    assert read.encode(TEXTS) == own.encode(TEXTS)
    assert (read.vocab_size, read.bos, read.eos) == (own.vocab_size, own.bos, own.eos)


@pytest.mark.parametrize("given", ["tokenizer.json", ""])
def test_a_file_or_its_folder_gives_the_tokens_of_the_library_without_marks(tmp_path: Path, given: str) -> None:
    file = write_tokenizer(tmp_path)
    tokenizer, library = build_tokenizer(str(tmp_path / given)), Tokenizer.from_file(str(file))
    assert tokenizer.encode(TEXTS) == [library.encode(text).ids for text in TEXTS]
    assert tokenizer.vocab_size == library.get_vocab_size()
    assert library.decode(tokenizer.encode(TEXTS[:1])[0]) == TEXTS[0]


def test_truncation_and_padding_in_the_file_are_off(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path)
    library = Tokenizer.from_file(str(file))
    library.enable_truncation(3)
    library.enable_padding(length=3)
    expected = FileTokenizer(file).encode(["a", TEXTS[0]])
    library.save(str(file))
    assert FileTokenizer(file).encode(["a", TEXTS[0]]) == expected


def test_a_lone_surrogate_becomes_the_replacement_character(tmp_path: Path) -> None:
    tokenizer = FileTokenizer(write_tokenizer(tmp_path))
    assert tokenizer.encode(["a\ud800b \ud83d\ude00"]) == tokenizer.encode(["a\ufffdb \U0001f600"])


def test_the_vocabulary_reaches_to_the_largest_number_also_with_holes(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path)
    content = json.loads(file.read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 900, "content": "<far>"})
    file.write_text(json.dumps(content))
    found = FileTokenizer(file)
    assert found.vocab_size > max(number for tokens in found.encode(["<far>"]) for number in tokens)


@pytest.mark.parametrize(
    ("special", "config", "bos", "eos"),
    [
        (["<s>", "</s>"], None, 0, 1),
        (["<|endoftext|>"], None, None, 0),
        (["[UNK]"], None, None, None),
        (["<a>", "<b>"], {"bos_token": "<b>", "eos_token": {"content": "<a>", "special": True}}, 1, 0),
        (["<s>", "</s>"], {"bos_token": None}, None, 1),
        (["<s>", "</s>", "<eos>"], {"eos_token": "<eos>"}, 0, 2),
    ],
)
def test_the_marks_are_those_named_next_to_the_file_or_the_only_ones_of_a_known_name(
    tmp_path: Path, special: list[str], config: dict[str, object] | None, bos: int | None, eos: int | None
) -> None:
    tokenizer = FileTokenizer(write_tokenizer(tmp_path, special=special, config=config))
    assert (tokenizer.bos, tokenizer.eos) == (bos, eos)


def test_two_candidates_for_a_mark_are_refused_by_name(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path, special=["<s>", "</s>", "<|endoftext|>"])
    with pytest.raises(
        ConfigError, match=r"several tokens that may be the eos_token: </s>, <\|endoftext\|>. Name one in"
    ):
        FileTokenizer(file)


def test_a_named_mark_that_the_vocabulary_lacks_is_refused_by_name(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path, config={"eos_token": "<end>"})
    with pytest.raises(ConfigError, match=r"the eos_token '<end>'.* is not in the vocabulary"):
        FileTokenizer(file)


def test_the_fingerprint_is_of_the_contents_and_the_marks_and_not_of_the_place(tmp_path: Path) -> None:
    first = FileTokenizer(write_tokenizer(tmp_path / "a")).fingerprint
    assert FileTokenizer(write_tokenizer(tmp_path / "b")).fingerprint == first
    assert FileTokenizer(write_tokenizer(tmp_path / "c", vocab_size=401)).fingerprint != first
    assert FileTokenizer(write_tokenizer(tmp_path / "d", config={"bos_token": None})).fingerprint != first


def test_the_files_for_an_export_are_the_given_ones_and_load_as_the_same_tokenizer(tmp_path: Path) -> None:
    named = FileTokenizer(write_tokenizer(tmp_path / "a", config={"eos_token": "</s>", "chat_template": "x"}))
    bare = FileTokenizer(write_tokenizer(tmp_path / "b"))
    for number, tokenizer in enumerate((named, bare)):
        folder = tmp_path / f"copy{number}"
        folder.mkdir()
        for name, content in tokenizer.files().items():
            (folder / name).write_bytes(content)
        assert build_tokenizer(str(folder)).fingerprint == tokenizer.fingerprint
    assert json.loads(named.files()["tokenizer_config.json"])["chat_template"] == "x"


@pytest.mark.parametrize(
    ("made", "given", "finding"),
    [
        ({}, "no/such", "found nothing"),
        ({"a.txt": ""}, "", "found a folder without one"),
        ({"a.txt": ""}, "a.txt", "found another file"),
        ({"tokenizer.model": ""}, "", "tokenizer.model of SentencePiece or tiktoken.*save_pretrained"),
        ({"tokenizer.json": '{"a": 1}'}, "", "is no tokenizer.json that tokenizers .* reads"),
        ({"tokenizer.json": "\udcff"}, "", "is no tokenizer.json that tokenizers .* reads"),
    ],
)
def test_what_is_no_tokenizer_json_is_refused_with_what_was_found(
    tmp_path: Path, made: dict[str, str], given: str, finding: str
) -> None:
    for name, content in made.items():
        (tmp_path / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=finding):
        build_tokenizer(str(tmp_path / given))


@pytest.mark.parametrize("content", ["{", '{"bos_token": 5}'])
def test_a_broken_file_next_to_it_is_refused_by_name(tmp_path: Path, content: str) -> None:
    file = write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        FileTokenizer(file)
