"""The checkpoints of other libraries in a folder: which are complete, and what would be removed with each.

One is complete only if every file in it is known to belong to it. Anything else stays: what it is, is not known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.checkpoint.examining.inventory import FolderState, ListedCheckpoint, inventory
from torchtitan_lite.checkpoint.examining.lightning_checkpoint import META
from torchtitan_lite.checkpoint.examining.named_best import Named, named_by_lightning, named_by_trainer
from torchtitan_lite.checkpoint.examining.opened import OF_HUGGING_FACE, WrittenBy, open_checkpoint
from torchtitan_lite.checkpoint.examining.recorded_digests import record_of
from torchtitan_lite.checkpoint.examining.transformers_folder import GENERATORS, TRAINER_STATE, WEIGHTS
from torchtitan_lite.disk.listed_tree import ListedTree
from torchtitan_lite.errors import CheckpointDamaged, CheckpointUnsafe, TorchtitanLiteError
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import CheckpointKind

_INDEX = re.compile(r".*\.index\.json")
_TEXTS = re.compile(
    r"(|generation_|adapter_|tokenizer_|preprocessor_|processor_|image_processor_|video_preprocessor_)config\.json|"
    r"(trainer_state|tokenizer|special_tokens_map|added_tokens|vocab|chat_template)\.json|"
    r"README\.md|vocab\.txt|merges\.txt|chat_template\.jinja|(tokenizer|spiece|sentencepiece\.bpe)\.model"
)
"""What transformers and peft write next to weights and pickles."""


@dataclass(frozen=True)
class OtherCheckpoint:
    """A checkpoint of another library, or a part of one."""

    path: Path
    origin: WrittenBy | None
    step: int | None
    kind: CheckpointKind | None
    created_at: float
    """Unix seconds."""
    nbytes: int
    tree: ListedTree
    """All that is removed with it; nothing for one that is not complete."""
    named: Named
    """Which ones it names as the best or the last."""
    finding: str = ""
    """Why it is not known to be complete."""

    @property
    def name(self) -> str:
        """Return its name in the folder."""
        return self.path.name

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


def other_checkpoints(root: Path) -> list[OtherCheckpoint]:
    """Return those in `root`, by ascending step. Raises OSError if it cannot be listed."""
    return [_other(root.resolve(), entry) for entry in inventory(root)]


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
            listed = ListedTree.of_files(root, [path.name, record_of(path).name]) if is_file else None
            listed = listed or ListedTree.of_folder(path)
            known = {*open_checkpoint(path).contents.files, record_of(path).name}
            if unknown := sorted(_unknown(listed, known, entry.origin)):
                finding = f"{unknown[0]} is not known to belong to it"
            named = named_by_lightning(path) if entry.origin is WrittenBy.LIGHTNING else named_by_trainer(path)
            tree = tree if finding else listed
    except (CheckpointDamaged, CheckpointUnsafe) as error:
        finding = error.finding
    except (TorchtitanLiteError, OSError) as error:
        finding = f"{error!s:.200}"
    step = named.step if entry.step is None else entry.step
    nbytes = tree.nbytes or entry.nbytes
    return OtherCheckpoint(path, entry.origin, step, entry.kind, entry.created_at, nbytes, tree, named, finding)


def _unknown(tree: ListedTree, known: AbstractSet[str], origin: WrittenBy | None) -> Iterator[str]:
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
