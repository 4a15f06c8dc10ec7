"""A tokenizer.json made on the spot, with the library tokenizers, and a corpus for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXTS = [
    f"# module {number}\ndef function_{number}(value):\n    return value + {number} * {number % 7}\n\n"
    f"print(function_{number}({number}), 'wörld ✓')\n"
    for number in range(120)
]


def write_tokenizer(
    folder: Path,
    *,
    vocab_size: int = 400,
    special: Sequence[str] = ("<s>", "</s>"),
    texts: Sequence[str] = TEXTS,
    config: dict[str, object] | None = None,
) -> Path:
    """Train a byte-level BPE on `texts` and return its tokenizer.json; `config` becomes tokenizer_config.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"
