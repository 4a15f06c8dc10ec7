"""A working directory for torchtitan's debug model, and options with which it trains there on processors."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

SMALL = (
    *("--module", "llama3", "--config", "llama3_debugmodel", "--checkpoint.enable", "--debug.seed=1"),
    *("--validator.no-enable", "--training.local_batch_size=2", "--training.seq_len=64"),
    "--parallelism.spmd_backend=partial_dtensor",  # the other one wants a newer torch
)


def with_data(place: Path) -> Path:
    """Write the corpus and the tokenizer that the debug model wants into the folder `place`; return it."""
    drawn = random.Random(0)
    words = ["".join(drawn.choices("abcdefghijklmnop", k=drawn.randint(2, 8))) for _ in range(300)]
    texts = [" ".join(drawn.choices(words, k=120)) for _ in range(200)]
    corpus, assets = place / "tests/assets/c4_test/data.json", place / "tests/assets/tokenizer"
    for folder in (corpus.parent, assets):
        folder.mkdir(parents=True)
    lines = [json.dumps({"text": text, "timestamp": "2020-01-01T00:00:00Z", "url": ""}) for text in texts]
    corpus.write_text("\n".join(lines) + "\n")
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(assets / "tokenizer.json"))
    (assets / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return place
