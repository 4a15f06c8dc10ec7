"""`prune` on what plain DCP, transformers, accelerate and Lightning wrote: it prints, and removes only with --yes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.reading.foreign_folders import save_plain
from tests.cli.conftest import Said
from tests.cli.other_libraries import (
    MAKERS,
    of_dcp,
    of_lightning,
    of_trainer,
)
from tests.cli.pruned_others import DAY, age, by_name, gone, made
from tests.store.filled import contents, fill, flip, names

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
COMMAND = "prune"
HALF_WRITTEN = {
    "dcp": ".metadata",
    "accelerate": "random_states_0.pkl",
    "lightning-dcp": ".metadata",
    **dict.fromkeys(("trainer", "sharded", "fsdp"), "trainer_state.json"),
}
"""What a checkpoint lacks that is being written."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Let a writer append to `path` for as long as the block takes, and see that each byte of it stays."""
    begun, ended, count = threading.Event(), threading.Event(), 0

    def write() -> None:
        nonlocal count
        with path.open("ab", buffering=0) as file:
            while not ended.is_set():
                count += file.write(b"written ")
                begun.set()

    before = path.stat().st_size if path.exists() else 0
    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert begun.wait(60)
        yield
    finally:
        ended.set()
        writer.join()
    assert path.stat().st_size == before + count


@pytest.mark.parametrize("library", MAKERS)
def test_it_prints_first_and_removes_with_yes_while_the_latest_is_being_written(
    library: str, tmp_path: Path, call: Said
) -> None:
    root = tmp_path / "run"
    first, second, kept = made(MAKERS[library], root, 10, 20, 30)
    latest = MAKERS[library](root, 40)
    if library in HALF_WRITTEN:
        (latest / HALF_WRITTEN[library]).unlink()
    else:
        os.truncate(latest, latest.stat().st_size // 2)
    with writing(latest / "optimizer.bin" if latest.is_dir() else latest):
        before = {name: data for name, data in contents(root).items() if not name.startswith(latest.name)}
        code, out, err = call(root, "--keep-latest", 1, "--json")
        assert (code, err, json.loads(out)["dry_run"], gone(out)) == (0, "", True, [first.name, second.name])
        assert {name: data for name, data in contents(root).items() if not name.startswith(latest.name)} == before
        found = by_name(out)
        assert (
            found[latest.name]["kept_by"][0] in ("incomplete", "damaged") or "min_age" in found[latest.name]["kept_by"]
        )
        code, out, err = call(root, "--keep-latest", 1, "--yes")
    assert (code, err) == (0, "") and "2 of 4 checkpoints removed (" in out
    assert sorted(path.name for path in root.iterdir()) == sorted([kept.name, latest.name])
    assert {name: data for name, data in contents(root).items() if name.startswith(kept.name)} == {
        name: data for name, data in before.items() if name.startswith(kept.name)
    }


def test_the_table_says_why_each_one_stays(tmp_path: Path, call: Said) -> None:
    made(of_trainer, tmp_path, 10, 20, 30, 40)
    (tmp_path / "checkpoint-10" / "notes.txt").write_text("mine")
    code, out, _ = call(tmp_path, "--keep-latest", 1)
    assert code == 0
    lines = [line.split(maxsplit=4) for line in out.splitlines()]
    assert [line[-1] for line in lines[1:5] if line[0] != "checkpoint-10"] == [
        *("would be removed", "would be removed", "kept: latest 1, the latest")
    ]
    assert "kept: not known to be complete: notes.txt is not known to belong to it" in out
    assert out.endswith("2 of 4 checkpoints would be removed (19.3 KiB): nothing is removed without --yes\n")


def test_what_is_young_stays(tmp_path: Path, call: Said) -> None:
    old, young, _ = made(of_trainer, tmp_path, 10, 20, 30)
    os.utime(young / "scheduler.pt")
    code, out, _ = call(tmp_path, "--keep-latest", 1, "--json")
    assert (code, gone(out)) == (0, [old.name]) and by_name(out)[young.name]["kept_by"] == ["min_age"]
    os.utime(old / "scheduler.pt", (time.time() + DAY,) * 2)
    assert gone(call(tmp_path, "--keep-latest", 1, "--json")[1]) == [], "a clock is wrong"
    os.utime(old / "scheduler.pt")
    assert gone(call(tmp_path, "--keep-latest", 1, "--min-age", 0, "--json")[1]) == [old.name, young.name]


def test_what_the_latest_names_as_the_best_or_last_stays(tmp_path: Path, call: Said) -> None:
    trained, lit = tmp_path / "trained", tmp_path / "lit"
    for step in (10, 20, 30, 40):
        of_trainer(trained, step, best=10 if step < 40 else 20)
        of_lightning(lit, step, best=f"/elsewhere/epoch=0-step={10 if step < 40 else 20}.ckpt")
    of_lightning(lit, 5, "last-v1.ckpt")
    (lit / "best.ckpt").symlink_to("epoch=0-step=30.ckpt")
    age(tmp_path)
    out = call(trained, "--keep-latest", 1, "--json")[1]
    assert gone(out) == ["checkpoint-10", "checkpoint-30"]
    assert by_name(out)["checkpoint-20"]["kept_by"] == ["best_or_last"]
    out = call(lit, "--keep-latest", 1, "--yes", "--json")[1]
    assert gone(out) == ["epoch=0-step=10.ckpt"]
    assert sorted(path.name for path in lit.iterdir()) == [
        *("best.ckpt", "epoch=0-step=20.ckpt", "epoch=0-step=30.ckpt", "epoch=0-step=40.ckpt", "last-v1.ckpt")
    ]


def test_the_one_that_was_written_last_stays_whatever_its_step(tmp_path: Path, call: Said) -> None:
    of_trainer(tmp_path, 300)
    age(tmp_path, 9 * DAY)
    for step in (10, 15):
        age(of_trainer(tmp_path, step), 2 * DAY)
    age(of_trainer(tmp_path, 20, best=10))
    out = call(tmp_path, "--keep-latest", 1, "--json")[1]
    assert gone(out) == ["checkpoint-15"]
    assert {name: each["kept_by"] for name, each in by_name(out).items() if not each["removed"]} == {
        **{"checkpoint-10": ["best_or_last"], "checkpoint-20": ["latest"]},
        "checkpoint-300": ["keep_latest_k", "latest", "latest_without_nan"],
    }


def test_where_the_best_is_not_known_all_stay(tmp_path: Path, call: Said) -> None:
    made(of_trainer, tmp_path / "trained", 10, 20)
    (tmp_path / "trained" / "checkpoint-20" / "trainer_state.json").write_text("{}")
    made(of_lightning, tmp_path / "lit", 10)
    torch.save({"state_dict": {}}, tmp_path / "lit" / "epoch=0-step=20.ckpt")
    age(tmp_path)
    for root, text in (("trained", "cannot be read"), ("lit", "has no callbacks in it")):
        code, out, _ = call(tmp_path / root, "--keep-latest", 1)
        assert code == 0 and "0 of 2 checkpoints would be removed" in out
        assert f"which is the best is not known: {names(tmp_path / root)[-1]}" in out and text in out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_lightning_itself_names_as_the_best_stays(tmp_path: Path, call: Said) -> None:
    lightning = pytest.importorskip("lightning", reason="needs lightning")
    callbacks = pytest.importorskip("lightning.pytorch.callbacks", reason="needs lightning")

    class Model(lightning.LightningModule):  # type: ignore[misc]  # not installed everywhere
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            self.log("falls", float(-number))
            return self.layer(batch).mean()  # type: ignore[no-any-return]  # as above

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    saves = callbacks.ModelCheckpoint(tmp_path, monitor="falls", mode="max", save_top_k=-1, every_n_train_steps=2)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(max_steps=8, callbacks=[saves], default_root_dir=tmp_path, **quiet)
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(16, 2), batch_size=2))
    age(tmp_path)
    assert gone(call(tmp_path, "--keep-latest", 1, "--yes", "--json")[1]) == [
        *("epoch=0-step=4.ckpt", "epoch=0-step=6.ckpt")
    ]
    assert "epoch=0-step=2.ckpt" in names(tmp_path)


def test_an_object_of_the_users_in_a_file_of_lightning_is_not_loaded(
    tmp_path: Path, call: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(of_lightning, tmp_path, 10, 20)

    def refuse(self: object, state: object) -> None:
        raise AssertionError("an object of the user's was loaded")

    monkeypatch.setattr("tests.cli.other_libraries.Setting.__setstate__", refuse, raising=False)
    assert gone(call(tmp_path, "--keep-latest", 1, "--yes", "--json")[1]) == ["epoch=0-step=10.ckpt"]


def end_of_largest_entry(path: Path) -> int:
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
    return path.read_bytes().index(b"PK\x07\x08", largest.header_offset)


@pytest.mark.parametrize("library", ["dcp", "lightning", "fsdp"])
def test_the_latest_that_reads_in_full_stays(library: str, tmp_path: Path, call: Said) -> None:
    first, second, damaged = made(MAKERS[library], tmp_path, 10, 20, 30)
    data = max(
        (path for path in (damaged, *damaged.rglob("*")) if path.is_file()), key=lambda path: path.stat().st_size
    )
    flip(data, end_of_largest_entry(data) - 10 if library == "lightning" else None)
    age(tmp_path)
    out = call(tmp_path, "--keep-latest", 1, "--json")[1]
    found = by_name(out)
    assert gone(out) == [first.name] and found[damaged.name]["kept_by"] == ["damaged"]
    assert found[second.name]["kept_by"] == ["keep_latest_k", "latest", "latest_without_nan"]


def test_exported_weights_stay_and_are_not_the_latest_to_resume_from(tmp_path: Path, call: Said) -> None:
    _, _, damaged = made(of_dcp, tmp_path, 10, 20, 30)
    save_plain({"model": {"weight": torch.ones(3)}}, tmp_path / "step-40")
    flip(damaged / "__0_0.distcp")
    age(tmp_path)
    out = call(tmp_path, "--keep-latest", 1, "--json")[1]
    assert {name: each["kept_by"] for name, each in by_name(out).items()} == {
        **{"step-10": [], "step-20": ["keep_latest_k", "latest", "latest_without_nan"], "step-30": ["damaged"]},
        "step-40": ["weights_only", "latest"],
    }


def test_weights_without_anything_to_resume_from_are_judged(tmp_path: Path, call: Said) -> None:
    for step in (10, 20):
        (of_trainer(tmp_path, step) / "optimizer.pt").unlink()
    age(tmp_path)
    assert gone(call(tmp_path, "--keep-latest", 1, "--json")[1]) == ["checkpoint-10"]


def test_for_free_space_no_more_goes_than_is_needed(tmp_path: Path, call: Said) -> None:
    made(of_trainer, tmp_path, 10, 20, 30)
    assert gone(call(tmp_path, "--min-free-disk-gb", 10**6, "--json")[1]) == ["checkpoint-10", "checkpoint-20"]
    assert gone(call(tmp_path, "--min-free-disk-gb", 1e-9, "--json")[1]) == []


def test_the_latest_without_nan_stays(tmp_path: Path, call: Said) -> None:
    made(of_trainer, tmp_path, 10, 20)
    of_trainer(tmp_path, 30, **{"norm.weight": torch.full((3,), float("nan"))})
    age(tmp_path)
    out = call(tmp_path, "--keep-latest", 1, "--json")[1]
    assert gone(out) == ["checkpoint-10"] and by_name(out)["checkpoint-20"]["kept_by"] == ["latest_without_nan"]


def test_a_link_in_a_checkpoint_or_to_one_keeps_it_and_is_never_followed(tmp_path: Path, call: Said) -> None:
    root, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    linked, _, _ = made(of_trainer, root, 10, 20, 30)
    shutil.move(linked / "scheduler.pt", elsewhere)
    (linked / "scheduler.pt").symlink_to(elsewhere)
    (root / "checkpoint-5").symlink_to(made(of_trainer, tmp_path / "other", 5)[0])
    code, out, _ = call(root, "--keep-latest", 1, "--yes", "--json")
    assert (code, gone(out)) == (0, ["checkpoint-20"])
    assert "expected a file, found a symbolic link" in by_name(out)[linked.name]["finding"]
    assert elsewhere.exists() and len([*(tmp_path / "other" / "checkpoint-5").iterdir()]) == 5


def test_the_model_next_to_the_checkpoints_of_a_trainer_stays(tmp_path: Path, call: Said) -> None:
    made(of_trainer, tmp_path, 10, 20)
    shutil.copy(tmp_path / "checkpoint-20" / "model.safetensors", tmp_path)
    assert gone(call(tmp_path, "--keep-latest", 1, "--yes", "--json")[1]) == ["checkpoint-10"]
    assert torch.equal(load_file(tmp_path / "model.safetensors")["norm.weight"], torch.ones(3))


def test_a_record_goes_with_its_checkpoint(tmp_path: Path, call: Said, said: Said) -> None:
    for root, make in ((tmp_path / "lit", of_lightning), (tmp_path / "dcp", of_dcp)):
        made(make, root, 10, 20)
        assert said("verify", root, "--record")[0] == 0
        assert call(root, "--keep-latest", 1, "--yes", "--min-age", 0)[0] == 0
        assert not [path for path in root.rglob("*") if "10" in path.name]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "no rule is given"),
        (["--keep-latest", 1, "--yes", "--dry-run"], "--yes removes and --dry-run removes nothing"),
        (["--keep-latest", 1, "--min-age", -1], "--min-age: expected a finite number of at least 0"),
    ],
)
def test_options_that_do_not_fit_are_one_sentence(options: list[object], text: str, tmp_path: Path, call: Said) -> None:
    made(of_trainer, tmp_path, 10, 20)
    code, out, err = call(tmp_path, *options)
    assert (code, out, err.count("\n")) == (2, "", 1) and text in err


def test_in_a_folder_of_ours_nothing_of_another_library_goes(tmp_path: Path, call: Said) -> None:
    made(of_trainer, tmp_path, 10, 20)
    code, _, err = call(tmp_path / "checkpoint-10", "--keep-latest", 1)
    assert code == 2 and "checkpoint-10 is one checkpoint: name the folder of checkpoints" in err
    fill(tmp_path, 1, 2)
    code, _, err = call(tmp_path, "--keep-latest", 1, "--yes")
    assert code == 2 and "--yes is for checkpoints of other libraries" in err
    assert call(tmp_path, "--keep-latest", 1)[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-20", "step-2"]
