"""What becomes of each checkpoint of another library in a folder, and why the others stay.

The rules are those of `store.retention`, for the checkpoints of each library by themselves. Besides, these stay: what
is not known to be complete, what a trainer or a link names as the best or the last, what was written less than a
minimum of time ago, and what has no step. Before anything goes, checkpoints are read in full from the latest on, until
one is found that is intact and without NaN: the latest that is intact stays, and so does the latest without NaN.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from torchtitan_lite.checkpoint.untrusted.inert_pickle import AnyName
from torchtitan_lite.checkpoint.untrusted.saved_file import SavedFile
from torchtitan_lite.disk.plain_file import read_plain
from torchtitan_lite.errors import CheckpointDamaged, CheckpointUnsafe, TorchtitanLiteError
from torchtitan_lite.examining.inventory import FolderState, ListedCheckpoint, inventory
from torchtitan_lite.examining.listed_tree import ListedTree
from torchtitan_lite.examining.opened import OF_HUGGING_FACE, WrittenBy, open_checkpoint
from torchtitan_lite.examining.other_libraries import GENERATORS, META, TRAINER_STATE, WEIGHTS
from torchtitan_lite.examining.recorded_digests import digests_path
from torchtitan_lite.examining.verification import look_at, read_through
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind
from torchtitan_lite.store.place import on_disk
from torchtitan_lite.store.retention import DAMAGED, LATEST, PROTECTED, RetentionPolicy, judge_checkpoints

INCOMPLETE, NO_STEP, NAMED, NOT_KNOWN, YOUNG = "incomplete", "no_step", "best_or_last", "best_not_known", "min_age"
"""What keeps a checkpoint besides the rules."""

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True)
class OtherVerdict:
    """What happens to one checkpoint."""

    checkpoint: OtherCheckpoint
    kept_by: tuple[str, ...]
    """The rules and reasons that keep it; empty if it goes."""
    finding: str = ""
    """More of the reason."""
    for_space: bool = False
    stays: OtherCheckpoint | None = None
    """The latest of its library that was read in full, if this one goes: without that one it may not."""

    @property
    def goes(self) -> bool:
        """Return whether it is removed."""
        return not self.kept_by


@dataclass(frozen=True)
class OthersOutlook:
    """Decides. `now` is in Unix seconds; `missing_bytes` is how much free space the disk lacks."""

    policy: RetentionPolicy
    min_age_seconds: float
    now: float
    missing_bytes: int
    progress: Progress
    """Shows how far the reading of a checkpoint is."""

    def verdicts(self, root: Path) -> list[OtherVerdict]:
        """Return what happens to each checkpoint in `root`, by ascending step. Raises ConfigError and OSError."""
        found = [_other(root.resolve(), entry) for entry in inventory(root)]
        by_person = named_by_person(root)
        families: dict[WrittenBy | None, list[OtherCheckpoint]] = {}
        for each in found:
            if not each.finding:
                # A checkpoint of torchtitan with weights only looks like plain DCP's.
                library = WrittenBy.DCP if each.origin is WrittenBy.TORCHTITAN else each.origin
                families.setdefault(library, []).append(each)
        verdicts = {each.path: OtherVerdict(each, (INCOMPLETE,), each.finding) for each in found if each.finding}
        missing_bytes = self.missing_bytes
        for family in families.values():
            outlook = dataclasses.replace(self, missing_bytes=max(0, missing_bytes))
            judged = outlook._of_family(_with_kinds(family), by_person)
            missing_bytes -= sum(each.checkpoint.nbytes for each in judged if each.goes)
            verdicts |= {each.checkpoint.path: each for each in judged}
        return [verdicts[each.path] for each in found]

    def _of_family(self, family: Sequence[OtherCheckpoint], by_person: frozenset[str]) -> list[OtherVerdict]:
        with_step = sorted((each for each in family if each.step is not None), key=_known_step)
        # A run that begins again in the folder of a longer one has lower steps.
        last_written = max(with_step, key=lambda each: (each.created_at, _known_step(each)), default=None)
        highest = _known_step(with_step[-1]) if with_step else None
        latest = [each for each in with_step if each is last_written or each.step == highest]
        names = frozenset(name for each in latest for name in each.named.names)
        finding = next((each.named.finding for each in latest if each.named.finding), "")
        reasons: dict[int, tuple[str, ...]] = {}
        for each in with_step:
            is_so = {
                LATEST: each is last_written,
                NAMED: each.name in names | by_person,
                NOT_KNOWN: bool(finding),
                YOUNG: self.now - each.tree.modified_at < self.min_age_seconds,
            }
            own = [*reasons.get(_known_step(each), ()), *(reason for reason, applies in is_so.items() if applies)]
            reasons[_known_step(each)] = tuple(dict.fromkeys(own))
        verdicts = self._judge(with_step, reasons, {}, {})
        if any(each.goes for each in verdicts):
            verdicts = self._judge(with_step, reasons, *self._read_from_the_latest(with_step))
        verdicts = [
            dataclasses.replace(each, finding=finding) if NOT_KNOWN in each.kept_by else each for each in verdicts
        ]
        return verdicts + [OtherVerdict(each, (NO_STEP,)) for each in family if each.step is None]

    def _judge(
        self,
        family: Sequence[OtherCheckpoint],
        reasons: Mapping[int, tuple[str, ...]],
        damaged: Mapping[Path, str],
        has_nan: Mapping[Path, bool],
    ) -> list[OtherVerdict]:
        """Apply the rules to those that are not `damaged`; `reasons` keep steps that no rule keeps, too."""
        sound = {each.path: each for each in family if each.path not in damaged}
        infos = [
            CheckpointInfo(
                *(_known_step(each), each.path, each.kind or CheckpointKind.FULL, each.created_at, each.nbytes),
                has_nan=has_nan.get(each.path, False),
            )
            for each in sound.values()
        ]
        protected = {step for step, own in reasons.items() if own}
        judged = judge_checkpoints(self.policy, infos, protected, now=self.now, missing_bytes=self.missing_bytes)
        latest = next((sound[path] for path in reversed([*sound]) if path in has_nan), None)
        verdicts = []
        for verdict in judged:
            by_rules = tuple(reason for reason in verdict.kept_by if reason != PROTECTED)
            kept_by = tuple(dict.fromkeys(by_rules + reasons[verdict.info.step]))
            stays = None if kept_by else latest
            other = sound[on_disk(verdict.info.path)]
            verdicts.append(OtherVerdict(other, kept_by, for_space=verdict.for_space, stays=stays))
        return verdicts + [
            OtherVerdict(each, (DAMAGED,), damaged[each.path]) for each in family if each.path in damaged
        ]

    def _read_from_the_latest(self, family: Sequence[OtherCheckpoint]) -> tuple[dict[Path, str], dict[Path, bool]]:
        """Read until one is intact and without NaN; return what is wrong with damaged ones, and who has NaN."""
        damaged: dict[Path, str] = {}
        has_nan: dict[Path, bool] = {}
        for each in reversed([each for each in family if each.kind is CheckpointKind.FULL]):
            finding, found_nan = self._read(each)
            if finding:
                damaged[each.path] = finding
            else:
                has_nan[each.path] = found_nan
                if not found_nan:
                    break
        return damaged, has_nan

    def _read(self, other: OtherCheckpoint) -> tuple[str, bool]:
        try:
            looked = look_at(other.path, digests_path(other.path))
            with self.progress(f"Reading {other.name}", other.nbytes) as advance:
                read = read_through(looked, advance)
        except (TorchtitanLiteError, OSError) as error:
            return f"it cannot be read: {error!s:.200}", False
        found = [f"{each.file}: {each.text}".removeprefix(": ") for each in (*looked.findings, *read.findings)]
        return found[0] if found else "", bool(read.nan_in)


def _with_kinds(family: Sequence[OtherCheckpoint]) -> list[OtherCheckpoint]:
    """Return `family`; one with weights only is an export, which stays, only where others are full."""
    if any(each.kind is CheckpointKind.FULL for each in family):
        return [*family]
    return [dataclasses.replace(each, kind=CheckpointKind.FULL) for each in family]


def _known_step(other: OtherCheckpoint) -> int:
    assert other.step is not None, "only those with a step are judged"
    return other.step


# The checkpoints of other libraries in a folder: which are complete, and what would be removed with each.
#
# One is complete only if every file in it is known to belong to it. Anything else stays: what it is, is not known.


_INDEX = re.compile(r".*\.index\.json")
_TEXTS = re.compile(
    r"(|generation_|adapter_|tokenizer_|preprocessor_|processor_|image_processor_|video_preprocessor_)config\.json|"
    r"(trainer_state|tokenizer|special_tokens_map|added_tokens|vocab|chat_template)\.json|"
    r"README\.md|vocab\.txt|merges\.txt|chat_template\.jinja|(tokenizer|spiece|sentencepiece\.bpe)\.model"
)
"""What transformers and peft write next to weights and pickles."""


@dataclass(frozen=True, kw_only=True)
class OtherCheckpoint(ListedCheckpoint):
    """A checkpoint of another library, or a part of one; `finding` is why it is not known to be complete."""

    path: Path
    tree: ListedTree
    """All that is removed with it; nothing for one that is not complete."""
    named: Named
    """Which ones it names as the best or the last."""

    def first_to_go(self) -> list[str]:
        """Return the files without which no library loads it, in the order in which they go.

        The weights of transformers go before trainer_state.json: without that the Trainer would load them, and train
        from step 0.
        """
        if not self.tree.folders:
            return [self.name]
        ranked = sorted((rank, path) for path in self.tree.files if (rank := _rank(path)) is not None)
        return [path for _, path in ranked]


def _rank(path: str) -> int | None:
    name = path.rpartition("/")[2]
    is_last = path in (TRAINER_STATE, GENERATORS)
    marks = (_INDEX.fullmatch(name), WEIGHTS.fullmatch(path), name == layout.METADATA, is_last)
    return next((rank for rank, is_mark in enumerate(marks) if is_mark), None)


def _other(root: Path, entry: ListedCheckpoint) -> OtherCheckpoint:
    path = root / entry.name
    tree, named, finding = ListedTree(path, {}, {}), Named(), ""
    try:
        if entry.state is not FolderState.FOREIGN:
            finding = entry.finding or entry.state.value.replace("_", " ")
        elif entry.origin is WrittenBy.OURS:
            finding = "it is a copy of a checkpoint of this package"
        else:
            # Before anything is read: what was looked at is what may be removed.
            is_file = path.is_file()
            listed = ListedTree.of_files(root, [path.name, digests_path(path).name]) if is_file else None
            listed = listed or ListedTree.of_folder(path)
            known = {*open_checkpoint(path).contents.files, digests_path(path).name}
            if unknown := sorted(_unknown_files(listed, known, entry.origin)):
                finding = f"{unknown[0]} is not known to belong to it"
            named = named_by_lightning(path) if entry.origin is WrittenBy.LIGHTNING else named_by_trainer(path)
            tree = tree if finding else listed
    except (CheckpointDamaged, CheckpointUnsafe) as error:
        finding = error.finding
    except (TorchtitanLiteError, OSError) as error:
        finding = f"{error!s:.200}"
    step = named.step if entry.step is None else entry.step
    own = {"step": step, "nbytes": tree.nbytes or entry.nbytes, "finding": finding}
    return OtherCheckpoint(**vars(entry) | own, path=path, tree=tree, named=named)


def _unknown_files(tree: ListedTree, known: AbstractSet[str], origin: WrittenBy | None) -> Iterator[str]:
    """Yield the files and folders in `tree` that do not belong to a checkpoint that `origin` wrote."""
    own = {layout.METADATA, META} if origin is WrittenBy.LIGHTNING else {layout.METADATA}
    folders = {""}
    for path in tree.files:
        below, _, name = path.rpartition("/")
        folders |= {below, *(str(parent) for parent in Path(path).parents)}
        is_text = not below and (_TEXTS.fullmatch(name) or _INDEX.fullmatch(name) or WEIGHTS.fullmatch(name))
        is_known = (
            name in own if origin not in OF_HUGGING_FACE else bool(is_text) or bool(below and name == layout.METADATA)
        )
        if path not in known and not is_known:
            yield path
    yield from tree.folders.keys() - folders


# Which checkpoints a trainer names as its best or its last one.
#
# transformers writes it into trainer_state.json, and Lightning into the pickle of a .ckpt file or of meta.pt. That
# pickle is parsed as inert values: nothing that it names is imported or called. People name one by a link. What cannot
# be read is not known, and then no checkpoint may count as one that is not named.


_MOST_STATE_BYTES = 256 << 20
_LAST = re.compile(r"last(-v[0-9]+)?\.ckpt")
_PATHS = ("best_model_path", "last_model_path")
"""In the state of Lightning's ModelCheckpoint."""


@dataclass(frozen=True)
class Named:
    """What one checkpoint says of others."""

    names: frozenset[str] = frozenset()
    """Of the folders or files that it names as the best or the last."""
    step: int | None = None
    """Its own, if it says it."""
    finding: str = ""
    """Why it is not known which ones it names."""


def named_by_trainer(folder: Path) -> Named:
    """Return what trainer_state.json in `folder` names as the best; nothing where accelerate has no such file."""
    if not (folder / TRAINER_STATE).is_file():
        return Named()
    try:
        state = json.loads(read_plain(folder / TRAINER_STATE, _MOST_STATE_BYTES))
        best, step = state["best_model_checkpoint"], state.get("best_global_step")
        names = {PurePath(best).name} if best else set()
        return Named(frozenset(names | ({f"checkpoint-{step}"} if isinstance(step, int) else set())))
    except (OSError, TorchtitanLiteError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return Named(finding=f"{folder.name}/{TRAINER_STATE} cannot be read: {error!s:.100}")


def named_by_lightning(path: Path) -> Named:
    """Return what the callbacks in `path` name, and its step. Raises `CheckpointDamaged` if it is cut."""
    file = path / META if path.is_dir() else path
    try:
        held = SavedFile(file, AnyName()).root
    except CheckpointDamaged:
        raise
    except (OSError, TorchtitanLiteError) as error:
        return Named(finding=f"{file.name} cannot be parsed without running it: {error!s:.100}")
    held = held if type(held) is dict else {}
    step = held.get("global_step")
    step = step if type(step) is int else None
    if type(held.get("callbacks")) is not dict:
        return Named(step=step, finding=f"{file.name} has no callbacks in it")
    return Named(frozenset(PurePath(name).name for name in _checkpoint_paths(held["callbacks"])), step)


def _checkpoint_paths(callbacks: dict[Any, Any]) -> Iterator[str]:
    for state in callbacks.values():
        for key in _PATHS if type(state) is dict else ():
            if type(state.get(key)) is str and state[key]:
                yield state[key]


def named_by_person(root: Path) -> frozenset[str]:
    """Return the names in `root` that say themselves that they are the last, and those that links in it lead to."""
    names, home = set(), root.resolve()
    for path in root.iterdir():
        if _LAST.fullmatch(path.name):
            names.add(path.name)
        if path.is_symlink() and (target := path.resolve()).is_relative_to(home) and target != home:
            names.add(target.relative_to(home).parts[0])
    return frozenset(names)
