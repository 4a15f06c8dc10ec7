"""docs/config.md and llama_debug.toml agree with the dataclasses of the configuration."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from scripts.generate_config_reference import PAGE, render_reference
from torchtitan_lite.config.argument_parser import doc_strings
from torchtitan_lite.config.keys import KEYS, SECTIONS
from torchtitan_lite.config.manager import parse_config

ROOT = Path(__file__).parents[2]


def test_every_key_has_a_doc_string():
    for cls in SECTIONS.values():
        assert cls.__doc__
        assert list(doc_strings(cls)) == [field.name for field in dataclasses.fields(cls)]


def test_the_config_reference_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == render_reference(), "run: python scripts/generate_config_reference.py"


def test_llama_debug_has_every_key_and_unset_ones_as_comments():
    section, found = "", []
    for line in (ROOT / "train_configs" / "llama_debug.toml").read_text().splitlines():
        if header := re.match(r"\[(\w+)\]", line):
            section = header[1]
        if key := re.match(r"(?:# )?(\w+) = ", line):
            found.append(f"{section}.{key[1]}")
    assert found == list(KEYS)


def test_llama_debug_keeps_the_values_that_scripts_rely_on():
    config = parse_config(["--job.config_file", "llama_debug.toml"])
    checkpoint = config.checkpoint
    assert checkpoint.enable_checkpoint
    assert checkpoint.interval <= config.training.steps // 2
    assert (checkpoint.keep_latest_k, checkpoint.async_mode) == (0, "disabled")
    assert config.metrics.enable_tensorboard
    assert config.metrics.log_freq <= 10
    assert config.job.dump_folder == "./outputs"
    assert (config.training.mixed_precision_param, config.model.dropout) == ("float32", 0.0)
    assert config.training.seed is not None
