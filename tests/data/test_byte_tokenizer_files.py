"""The byte tokenizer as others load it: the same tokens as in training."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from torchtitan_lite.data.tokenizer import BOS, EOS, ByteTokenizer

FILES = ByteTokenizer().files()
TOKENIZER = Tokenizer.from_str(FILES["tokenizer.json"].decode())


@given(st.text())
def test_a_text_is_the_mark_before_it_and_its_bytes(text: str) -> None:
    tokens = TOKENIZER.encode(text)
    assert tokens.ids == [BOS, *text.encode()]
    assert TOKENIZER.decode(tokens.ids) == text


def test_every_byte_has_its_token() -> None:
    assert [TOKENIZER.decode([byte]) for byte in range(256)] == [
        bytes([byte]).decode("utf-8", "replace") for byte in range(256)
    ]


def test_the_marks_follow_the_bytes() -> None:
    settings = json.loads(FILES["tokenizer_config.json"])
    assert [TOKENIZER.token_to_id(settings[name]) for name in ("bos_token", "eos_token")] == [BOS, EOS]
    assert TOKENIZER.get_vocab_size(with_added_tokens=True) == ByteTokenizer.vocab_size
    assert TOKENIZER.decode([BOS, 104, 105, EOS]) == "hi"
    assert TOKENIZER.encode("a", "b").ids == [BOS, 97, 98]
