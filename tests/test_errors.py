"""The errors of the package: they survive pickle between ranks, and their messages help."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from torchtitan_lite import errors
from torchtitan_lite.errors import TorchtitanLiteError

SAMPLES: dict[str, Any] = {
    "str": "a/path of-something",
    "int": 41,
    "int | None": 43,
    "float": 0.125,
    "Sequence[int]": (100, 200),
    "Mapping[int, str]": {100: "a digest", 200: "a size"},
    "Sequence[str]": ("files: 3 -> 4", "bytes: 5 -> 6"),
}
"""A value for every annotation in a constructor; a new annotation fails here until it is added."""

FIXES = {
    errors.CheckpointNotFound: "--checkpoint.load_step",
    errors.CheckpointDamaged: "--checkpoint.load_step",
    errors.CheckpointUnreadable: "Start the same command again once it can be read; only if the step is lost",
    errors.AllCheckpointsDamaged: "--job.dump_folder",
    errors.CheckpointUnsafe: "--checkpoint.load_step",
    errors.FormatTooNew: "Upgrade torchtitan_lite",
    errors.FormatTooOld: "--job.dump_folder",
    errors.PinsUnreadable: "delete it to unpin all",
    errors.SaveFailed: "Earlier checkpoints are untouched",
    errors.WriterProcessDied: "starts a new one",
    errors.FolderUnusable: "or set another a/path of-something",
    errors.FolderNotShared: "--job.dump_folder",
    errors.FolderInUse: "--job.dump_folder",
    errors.LeaseLost: "--job.dump_folder",
    errors.CorpusChanged: "--checkpoint.exclude_from_loading=dataloader",
    errors.TokensNotWritten: "--training.tokens_folder",
    errors.PeerLost: "see the first error in the output of the other ranks",
    errors.TrainingDiverged: "--checkpoint.load_step",
}
"""The fix in each message, or that there is nothing to do; the other errors get their message where they are raised."""


def tree(root: type[TorchtitanLiteError] = TorchtitanLiteError) -> Iterator[type[TorchtitanLiteError]]:
    yield root
    for kind in root.__subclasses__():
        yield from tree(kind)


def fields_of(kind: type[TorchtitanLiteError]) -> dict[str, Any]:
    """Return a sample of each argument of the constructor; none if it takes only a message."""
    if kind.__init__ is Exception.__init__ or "__init__" not in kind.__dict__:
        return {}
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    return {parameter.name: SAMPLES[parameter.annotation] for parameter in parameters}


def sample(kind: type[TorchtitanLiteError]) -> TorchtitanLiteError:
    return kind(**fields_of(kind)) if fields_of(kind) else kind("what happened")


every_error = pytest.mark.parametrize("kind", list(tree()), ids=lambda kind: kind.__name__)


@every_error
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_survives_pickle_with_its_fields_and_message(kind: type[TorchtitanLiteError], protocol: int) -> None:
    error = sample(kind)
    error.reported_elsewhere = True
    arrived = pickle.loads(pickle.dumps(error, protocol))
    assert type(arrived) is kind
    assert str(arrived) == str(error)
    assert arrived.args == error.args
    assert vars(arrived) == vars(error)
    assert arrived.reported_elsewhere


@every_error
def test_an_error_keeps_every_argument_as_a_field(kind: type[TorchtitanLiteError]) -> None:
    error = sample(kind)
    assert {name: getattr(error, name) for name in fields_of(kind)} == fields_of(kind)


@every_error
def test_a_message_contains_every_field_of_the_error(kind: type[TorchtitanLiteError]) -> None:
    message = str(sample(kind))
    for value in fields_of(kind).values():
        parts = value if isinstance(value, tuple) else [*value, *value.values()] if isinstance(value, dict) else [value]
        assert all(str(part) in message for part in parts)


@pytest.mark.parametrize(("kind", "fix"), FIXES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_message_names_the_fix(kind: type[TorchtitanLiteError], fix: str) -> None:
    assert fix in str(sample(kind))


@every_error
def test_an_error_is_not_reported_elsewhere_and_of_no_other_rank_when_it_is_raised(
    kind: type[TorchtitanLiteError],
) -> None:
    error = sample(kind)
    assert (error.reported_elsewhere, error.origin_rank) == (False, 0)


@every_error
def test_an_error_is_in_the_tree_of_the_docstring(kind: type[TorchtitanLiteError]) -> None:
    line = next(line for line in (errors.__doc__ or "").splitlines() if kind.__name__ in line.split()[-30:])
    builtin = next((base for base in kind.__bases__ if base.__module__ == "builtins"), Exception)
    assert builtin is Exception or f"({builtin.__name__})" in line


def test_the_error_for_a_missing_step_lists_the_existing_ones() -> None:
    assert str(errors.CheckpointNotFound("outputs/checkpoint", 700, [200, 400, 600])) == (
        "step 700 is not in outputs/checkpoint (it has 200, 400, 600). "
        "Set --checkpoint.load_step to one of these, or -1 for the latest; in a loop of your own, load() takes it."
    )
    assert "it has no checkpoint" in str(errors.CheckpointNotFound("outputs/checkpoint", 700))
    assert ".metadata" in str(errors.CheckpointNotFound("nowhere", None))


@pytest.mark.parametrize("address", ["/mnt/other", "s3://bucket/run"])
def test_what_is_wrong_with_the_folder_of_uploads_names_its_key(address: str) -> None:
    key = "--checkpoint.upload_folder"
    assert f"et another {key}" in str(errors.FolderUnusable(address, "EIO", key))
    assert f"with another --job.dump_folder and {key}." in str(errors.AllCheckpointsDamaged(address, {}, key))


@every_error
def test_a_cause_that_is_a_sentence_ends_in_one_full_stop(kind: type[TorchtitanLiteError]) -> None:
    texts = {name: f"{value}." for name, value in fields_of(kind).items() if name in ("cause", "finding")}
    assert ".." not in str(kind(**fields_of(kind) | texts))
