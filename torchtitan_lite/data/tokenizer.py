"""Tokenizers: text to numbers.

A tokenizer never changes during a run, and its fingerprint is part of the data's state: equal fingerprints mean equal
tokens of equal text. `encode` adds no marks. Who makes a stream of documents puts BOS before and EOS after each of
them, as far as the tokenizer has them. A `tokenizer.json` needs the library `tokenizers`, which is imported only then.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtitan_lite.errors import ConfigError, ExtraMissing

BYTES = "bytes"
BOS, EOS = 256, 257
"""The tokens of the byte tokenizer that are no bytes: they stand before and after each document."""
TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
BOS_NAMES = ("<s>", "<bos>", "<|bos|>", "[BOS]", "<|begin_of_text|>", "<|startoftext|>")
EOS_NAMES = ("</s>", "<eos>", "<|eos|>", "[EOS]", "<|end_of_text|>", "<|endoftext|>")
"""Names that BOS and EOS have where no file next to tokenizer.json names them."""
_MAP_FILE = "special_tokens_map.json"
_FURTHER_FILES = (CONFIG_FILE, _MAP_FILE, "chat_template.jinja")


def build_tokenizer(path: str) -> Tokenizer:
    """Return the tokenizer that model.tokenizer_path names: "bytes", a tokenizer.json, or a folder that holds one.

    Raises ConfigError if there is none at `path`, and ExtraMissing without the library `tokenizers`.
    """
    return ByteTokenizer() if path == BYTES else FileTokenizer(tokenizer_file(path))


class ByteTokenizer:
    """The bytes of the text in UTF-8, and two marks."""

    vocab_size = 258
    """One more than the largest token."""
    bos: int | None = BOS
    eos: int | None = EOS
    fingerprint = BYTES

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the bytes of each text."""
        return [list(text.encode("utf-8", "surrogatepass")) for text in texts]

    def files(self) -> dict[str, bytes]:
        """Return the files of a tokenizer of transformers that gives the same tokens."""
        return {TOKENIZER_FILE: _json(_tokenizer_json()), CONFIG_FILE: _json(_tokenizer_config(_BOS_TEXT, _EOS_TEXT))}


class FileTokenizer:
    """A tokenizer.json. Truncation and padding that it asks for are off; special tokens in a text are found in it.

    `fingerprint` is a digest of the file and of the two marks.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._data = path.read_bytes()
        self._tokenizer = _loaded(path, self._data)
        vocabulary: Mapping[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ConfigError(f"model.tokenizer_path: {path} has no tokens. Train it first.")
        self.vocab_size = 1 + max(vocabulary.values())
        special = [token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special]
        self._bos_name, self.bos = self._mark("bos_token", BOS_NAMES, special, vocabulary)
        self._eos_name, self.eos = self._mark("eos_token", EOS_NAMES, special, vocabulary)
        digest = hashlib.blake2b(self._data, digest_size=16)
        digest.update(f"\0{self.bos}\0{self.eos}".encode())
        self.fingerprint = digest.hexdigest()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text. Uses all cores."""
        encodings = self._tokenizer.encode_batch_fast([_sound(text) for text in texts], add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def files(self) -> dict[str, bytes]:
        """Return tokenizer.json and those next to it; a tokenizer_config.json is made where there is none."""
        files = {name: self._path.with_name(name) for name in _FURTHER_FILES}
        found = {name: path.read_bytes() for name, path in files.items() if path.is_file()}
        config = _tokenizer_config(self._bos_name, self._eos_name)
        return {TOKENIZER_FILE: self._data, CONFIG_FILE: json.dumps(config, indent=2).encode() + b"\n"} | found

    def _mark(
        self, key: str, known: Iterable[str], special: Sequence[str], vocabulary: Mapping[str, int]
    ) -> tuple[str | None, int | None]:
        """Return the text and the number of the token `key`; None for a tokenizer without one."""
        named, config = _marks_named_next_to(self._path), self._path.with_name(CONFIG_FILE)
        found = [named[key]] if key in named else [name for name in known if name in special]
        if len(found) > 1:
            raise ConfigError(
                f"model.tokenizer_path: {self._path} has several tokens that may be the {key}: "
                f'{", ".join(map(str, found))}. Name one in {config}, as in {{"{key}": "{found[0]}"}}.'
            )
        name = found[0] if found else None
        if name is None:
            return None, None
        if name not in vocabulary:
            raise ConfigError(
                f"model.tokenizer_path: the {key} {name!r}, which a file next to {self._path} names, is not in the "
                f"vocabulary. Correct it in {config}; null is a tokenizer without one."
            )
        return name, vocabulary[name]


Tokenizer = ByteTokenizer | FileTokenizer


def marks_of(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens before and after each document; where BOS and EOS are one token, it only follows."""
    bos, eos = tokenizer.bos, tokenizer.eos
    return [bos] if bos is not None and bos != eos else [], [eos] if eos is not None else []


def tokenizer_file(given: str) -> Path:
    """Return the tokenizer.json at `given`, a file or a folder. Raise ConfigError if there is none."""
    path = Path(given).expanduser()
    if path.is_dir() and (path / TOKENIZER_FILE).is_file():
        return path / TOKENIZER_FILE
    if path.is_file() and path.suffix == ".json":
        return path
    folder = path if path.is_dir() else path.parent
    if path.suffix == ".model" or (folder / "tokenizer.model").is_file():
        finding = "a tokenizer.model of SentencePiece or tiktoken, which is not supported"
        fix = "Save the same tokenizer with transformers (save_pretrained), which writes a tokenizer.json"
    else:
        finding = "a folder without one" if path.is_dir() else "another file" if path.exists() else "nothing"
        fix = "Correct the path, or set --model.tokenizer_path=bytes"
    raise ConfigError(
        f"model.tokenizer_path: expected 'bytes', a tokenizer.json or a folder that holds one at {given!r}, found "
        f"{finding} (looked from {Path.cwd()}). {fix}."
    )


def _loaded(path: Path, data: bytes) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ExtraMissing.of(error, "tokenizers") from error
    try:
        tokenizer = tokenizers.Tokenizer.from_str(data.decode())
    except Exception as error:  # The library raises Exception itself.
        raise ConfigError(
            f"model.tokenizer_path: {path} is no tokenizer.json that tokenizers {tokenizers.__version__} reads: "
            f"{error}. Save it again, or install the version that wrote it."
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _marks_named_next_to(path: Path) -> dict[str, str | None]:
    """Return the bos_token and eos_token of the files next to tokenizer.json; None is a token that is not used."""
    named: dict[str, str | None] = {}
    for file in (path.with_name(_MAP_FILE), path.with_name(CONFIG_FILE)):  # The later one counts.
        if not file.is_file():
            continue
        try:
            content = json.loads(file.read_bytes())
        except ValueError as error:
            raise ConfigError(
                f"model.tokenizer_path: {file} is not JSON: {error}. Correct it, or remove it."
            ) from error
        for key in ("bos_token", "eos_token"):
            if isinstance(content, dict) and key in content:
                value = content[key]
                value = value["content"] if isinstance(value, dict) and "content" in value else value
                if value is not None and not isinstance(value, str):
                    raise ConfigError(f"model.tokenizer_path: {file}: expected the text of {key}, found {value!r}.")
                named[key] = value
    return named


def _sound(text: str) -> str:
    """Return `text` with U+FFFD in place of lone surrogates, which JSON may hold and UTF-8 may not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


# The byte tokenizer as files that transformers and tokenizers load.
#
# Token i < 256 is the byte i, and the two marks follow. A text gets the mark before it, as every document in training
# has; the mark after it is what a model writes at the end.


_BOS_TEXT, _EOS_TEXT = "<|begin_of_text|>", "<|end_of_text|>"
_MARK = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def _tokenizer_json() -> dict[str, Any]:
    first = {"SpecialToken": {"id": _BOS_TEXT, "type_id": 0}}
    texts = [{"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB")]
    marks = [{"id": number, "content": text, **_MARK} for number, text in ((BOS, _BOS_TEXT), (EOS, _EOS_TEXT))]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": marks,
        "normalizer": None,
        "pre_tokenizer": _BYTE_LEVEL,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, texts[0]],
            "pair": [first, *texts],
            "special_tokens": {_BOS_TEXT: {"id": _BOS_TEXT, "ids": [BOS], "tokens": [_BOS_TEXT]}},
        },
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: number for number, character in enumerate(_alphabet())},
            "merges": [],
        },
    }


def _tokenizer_config(bos: str | None, eos: str | None) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "clean_up_tokenization_spaces": False,
    }


def _alphabet() -> list[str]:
    """Return the character for each byte in GPT-2's alphabet, which ByteLevel uses.

    It is the character of the same number where that can be seen, and one from 256 on where not.
    """
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(number if number in seen else next(others)) for number in range(0x100)]


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
