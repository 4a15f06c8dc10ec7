"""`prune --yes` in a folder of another library that is killed, or where something changes meanwhile."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Said
from tests.cli.other_libraries import MAKERS, of_trainer, of_trainer_with_fsdp
from tests.cli.pruned_others import made
from tests.store.crashing import Crash, Cut
from tests.store.filled import contents
from torchtitan_lite.cli.prune import Prune, prune_others
from torchtitan_lite.cli.screen import Screen
from torchtitan_lite.disk.durable import Durable
from torchtitan_lite.errors import CheckpointNotFound
from torchtitan_lite.examining.opened import open_checkpoint
from torchtitan_lite.store.store import CheckpointStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
COMMAND = "prune"
LOADED = {
    **dict.fromkeys(("dcp", "lightning-dcp"), (".metadata",)),
    **dict.fromkeys(("trainer", "accelerate"), ("model.safetensors",)),
    **{"sharded": ("model.safetensors.index.json",), "lightning": ("",)},
    "fsdp": ("pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata"),
}
"""What the library needs for a load."""


def pruned(root: Path, durable: Durable) -> int:
    """Remove all but the latest with `durable`."""
    verb = Prune(str(root), keep_latest=1, yes=True, min_age=0.0)
    return prune_others(verb, CheckpointStore(root), Screen(as_json=True), durable)


@pytest.mark.parametrize("library", MAKERS)
def test_a_kill_at_any_point_leaves_it_as_it_was_or_nothing_that_loads(
    library: str, tmp_path: Path, call: Said
) -> None:
    made(MAKERS[library], tmp_path / "as-made", 10, 20)
    for at in range(1, 100):
        root = tmp_path / str(at)
        shutil.copytree(tmp_path / "as-made", root)
        [place] = [path for path in root.iterdir() if "10" in path.name]
        before = contents(root)
        try:
            pruned(root, Cut(at))
        except Crash:
            left = contents(root)
            assert {name: data for name, data in before.items() if "10" not in name}.items() <= left.items()
            if left != before and place.exists():
                assert not all((place / name).exists() for name in LOADED[library]), "of the library"
                with pytest.raises(CheckpointNotFound):
                    open_checkpoint(place)
                assert call(root, "--keep-latest", 1, "--min-age", 0, "--yes", "--json")[0] in (0, 1)
                assert contents(root) == left, "what is left is not known to be complete"
        else:
            assert at > 1 and not place.exists()
            return
    raise AssertionError("more operations than expected")


class Meanwhile(Durable):
    """The real disk, on which another process does something right before a file is removed."""

    def __init__(self, name: str, does: Callable[[], object]) -> None:
        self._name, self._does = name, does

    def remove_file(self, path: Path) -> None:
        if path.name == self._name:
            self._does()
        super().remove_file(path)


@pytest.mark.parametrize(
    ("does", "text", "stays"),
    [
        (lambda root: (root / "checkpoint-20" / "new.bin").write_bytes(b"new"), "new.bin was written", 6),
        (lambda root: (root / "checkpoint-20" / "optimizer.pt").write_bytes(b"new"), "optimizer.pt was written", 5),
        (lambda root: (root / "checkpoint-20" / "below").mkdir(), "a folder in it was made", 5),
        (lambda root: shutil.rmtree(root / "checkpoint-30"), "checkpoint-30, which was to stay, is another one", 5),
    ],
)
def test_a_change_since_the_listing_stops_it_before_that_checkpoint(
    does: Callable[[Path], object], text: str, stays: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(of_trainer, tmp_path, 10, 20, 30)
    assert pruned(tmp_path, Meanwhile("scheduler.pt", lambda: does(tmp_path))) == 1
    found = json.loads(capsys.readouterr().out)
    assert text in found["stopped"] and [each["name"] for each in found["checkpoints"] if each["removed"]] == [
        "checkpoint-10"
    ]
    assert len([path for path in (tmp_path / "checkpoint-20").iterdir() if path.is_file()]) == stays


def test_a_file_that_appears_in_the_middle_of_a_removal_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, *_ = made(of_trainer, tmp_path, 10, 20)
    assert pruned(tmp_path, Meanwhile("model.safetensors", lambda: (folder / "new.bin").write_bytes(b"new"))) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["checkpoints"][0]["files_left"] == 0 and not found["checkpoints"][0]["removed"]
    assert (
        found["stopped"]
        == "checkpoint-10: new.bin was written since it was listed, and stays; the listed files are removed"
    )
    assert [path.name for path in folder.iterdir()] == ["new.bin"]


def test_a_folder_that_becomes_a_link_in_the_middle_is_not_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, *_ = made(of_trainer_with_fsdp, tmp_path / "run", 10, 20)
    elsewhere = shutil.copytree(folder / "optimizer_0", tmp_path / "elsewhere")

    def swap() -> None:
        shutil.rmtree(folder / "optimizer_0")
        (folder / "optimizer_0").symlink_to(elsewhere)

    assert pruned(tmp_path / "run", Meanwhile("trainer_state.json", swap)) == 1
    assert len([*elsewhere.iterdir()]) == 2 and "checkpoint-10" in capsys.readouterr().out


def test_a_disk_that_refuses_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        raise OSError(13, "Permission denied", "optimizer.pt")

    made(of_trainer, tmp_path, 10, 20)
    verb, store = Prune(str(tmp_path), keep_latest=1, yes=True, min_age=0.0), CheckpointStore(tmp_path)
    assert prune_others(verb, store, Screen(), Meanwhile("optimizer.pt", refuse)) == 1
    out = capsys.readouterr().out
    assert "removed in part: 3 of its 5 files are left" in out
    assert "0 of 2 checkpoints removed\nStopped: checkpoint-10 could not be removed: optimizer.pt: Permission" in out
    prune_others(verb, store, Screen(), Durable())
    assert "kept: not known to be complete: there is no trainer_state.json in it" in capsys.readouterr().out
