"""Values of a torchtitan TOML that have another name here, or that mean what this package does not have.

They are looked at before the kinds of values, whose errors name the nearest choice: for a family of models or a corpus
that would be another run.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from torchtitan_lite.config.keys import KEYS
from torchtitan_lite.config.sources import Setting
from torchtitan_lite.errors import ConfigError

FAMILIES = ("llama3", "llama")
_C4 = {"training.dataset": "huggingface", "training.dataset_path": "allenai/c4", "training.dataset_subset": "en"}
DATASETS: Mapping[str, Mapping[str, str]] = {
    "c4": _C4,
    "c4_validation": {**_C4, "training.dataset_split": "validation"},
}
"""Names of torchtitan, with the keys that they stand for; those that are given themselves count."""

_STREAM = "--training.dataset=huggingface --training.dataset_path="
_CAPTIONS = (
    "pictures with captions, for Flux; this package trains on text",
    "Set --training.dataset=c4, or another one",
)
_OTHERS: Mapping[str, tuple[str, str]] = {
    "c4_test": (
        "a part of c4 in torchtitan's repository, which is not in this package",
        f"Set {_STREAM}TORCHTITAN/tests/assets/c4_test with the path of that repository, or --training.dataset=c4",
    ),
    **dict.fromkeys(("cc12m", "cc12m_test", "cc12m_wds", "coco_validation"), _CAPTIONS),
}


def check_family(model: Setting | None) -> None:
    """Raise ConfigError if a model of another family is named."""
    if model is not None and model.text.lower() not in FAMILIES:
        raise ConfigError(
            f"{model.where} = {model.text}: train.py trains only the family llama3. Train another model in a loop of "
            "your own, with the same checkpoints: docs/own_loop.md."
        )


def with_datasets(settings: Mapping[str, Setting]) -> Mapping[str, Setting]:
    """Return the last setting of each key, with what a dataset of torchtitan stands for in its place.

    Raises ConfigError for a dataset that this package does not have.
    """
    given = settings.get("training.dataset")
    if given is None:
        return settings
    name = given.text.lower().replace("-", "_")
    if name in DATASETS:
        meant = {key: Setting(key, text, given.where) for key, text in DATASETS[name].items()}
        return {**meant, **settings, "training.dataset": meant["training.dataset"]}
    if name in _OTHERS:
        meaning, fix = _OTHERS[name]
        raise ConfigError(f"{given.where} = {given.text}: {meaning}. {fix}.")
    choices = KEYS["training.dataset"].choices
    if not difflib.get_close_matches(given.text.lower(), choices, n=1):
        raise ConfigError(
            f"{given.where}: expected one of {', '.join(choices)}, found {given.text!r}. For a dataset of Hugging Face "
            f"set {_STREAM}NAME."
        )
    return settings
