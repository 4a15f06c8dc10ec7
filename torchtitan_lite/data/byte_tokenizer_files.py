"""The byte tokenizer as files that transformers and tokenizers load.

Token i < 256 is the byte i, and the two marks follow. A text gets the mark before it, as every document in training
has; the mark after it is what a model writes at the end.
"""

from __future__ import annotations

import json
from typing import Any

from torchtitan_lite.data.byte_marks import BOS, EOS

_BOS_TEXT, _EOS_TEXT = "<|begin_of_text|>", "<|end_of_text|>"
_MARK = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def byte_tokenizer_files() -> dict[str, bytes]:
    """Return the contents of each file, by name."""
    return {"tokenizer.json": _json(_tokenizer_json()), "tokenizer_config.json": _json(_tokenizer_config())}


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


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _BOS_TEXT,
        "eos_token": _EOS_TEXT,
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
