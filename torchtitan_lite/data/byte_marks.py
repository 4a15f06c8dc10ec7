"""The tokens of the byte tokenizer that are no bytes: they stand before and after each document."""

from __future__ import annotations

BOS = 256
EOS = 257
