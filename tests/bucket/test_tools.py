"""The command `torchtitan-lite` on folders of checkpoints in an object store."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bucket.stored import GOLDEN, add, cut, flip, held, remove, write
from tests.cli.command import CLI, Ended, command, on_a_terminal, plain
from torchtitan_lite.bucket import naming
from torchtitan_lite.bucket.bucket_store import BucketStore, open_bucket
from torchtitan_lite.cli.named_checkpoint import resolve
from torchtitan_lite.errors import CheckpointDamaged, CheckpointNotFound
from torchtitan_lite.examining.presence import refuse_if_gone, reporting_removal
from torchtitan_lite.store import layout
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import CheckpointKind, seal

DATA = layout.data_file(0, 0)


@pytest.fixture
def store(folder: str) -> Iterator[BucketStore]:
    with held(folder) as store:
        yield store


def keys(store: BucketStore) -> dict[str, int]:
    """Return all objects but the beats of the holder, with their sizes."""
    return {each.key: each.size for each in store.objects.list("") if naming.parse_beat(each.key) is None}


def entries(ended: Ended) -> dict[str, dict[str, object]]:
    return {each["name"]: each for each in ended.json["checkpoints"]}


@pytest.mark.slow
def test_a_step_is_spelt_by_its_number_its_name_or_the_name_of_its_prefix(folder: str, store: BucketStore) -> None:
    add(store, 7)
    nine = add(store, 9)
    add(store, 12, kind=CheckpointKind.WEIGHTS_ONLY)
    for spelling in ("", "/", ":latest", ":9", "/step-9", "/step-9/", f"/{nine.path.name}"):
        target = resolve(f"{folder}{spelling}")
        assert (target.folder, target.root, target.step) == (nine.path, folder, 9), spelling


@pytest.mark.slow
def test_a_folder_without_full_steps_is_its_latest_weights_and_a_damaged_one_is_an_error(
    folder: str, store: BucketStore
) -> None:
    info = add(store, 7, kind=CheckpointKind.WEIGHTS_ONLY)
    assert resolve(folder).folder == info.path
    remove(info, layout.MANIFEST)
    ended = command("inspect", folder)
    assert (ended.code, ended.out) == (3, "")
    assert ended.err == f"error: every checkpoint in {folder} is damaged: step 7: {layout.MANIFEST} is missing\n"


@pytest.mark.parametrize(
    ("spelling", "code", "sentence"),
    [
        (":8", 1, "step 8 is not in FOLDER (it has 7)"),
        ("/step-8", 1, "step 8 is not in FOLDER (it has 7)"),
        ("/step-8.0123456789abcdef", 1, "FOLDER/step-8.0123456789abcdef holds no checkpoint: there is no manifest"),
        (":seven", 2, "'FOLDER:seven' is not the address of a folder"),
        ("/none", 1, "FOLDER/none holds no checkpoint: there is no complete checkpoint in it"),
        ("/none:7", 1, "step 7 is not in FOLDER/none (it has no checkpoint)"),
    ],
)
def test_what_is_no_checkpoint_is_one_sentence(
    spelling: str, code: int, sentence: str, folder: str, store: BucketStore
) -> None:
    add(store, 7)
    ended = command("inspect", f"{folder}{spelling}")
    assert (ended.code, ended.out, ended.err.count("\n")) == (code, "", 1)
    assert ended.err.startswith(f"error: {sentence.replace('FOLDER', folder)}")


def test_a_checkpoint_that_was_set_aside_is_read_by_its_name(folder: str, store: BucketStore) -> None:
    info = add(store, 7)
    store.quarantine(7, ["a block is wrong"])
    target = resolve(str(info.path))
    assert (target.folder, target.root, target.step) == (info.path, "", None)
    assert command("inspect", str(info.path), "--json").json["step"] == 7
    ended = command("pin", str(info.path))
    assert (ended.code, "so no rule removes it and it needs no pin" in ended.err) == (1, True)


def filled(store: BucketStore) -> None:
    """Add one checkpoint of each state."""
    for step in (7, 9):
        add(store, step)
    add(store, 11, lineage=Lineage("old"))
    add(store, 12, kind=CheckpointKind.WEIGHTS_ONLY)
    add(store, 10)
    add(store, 13, lineage=Lineage("branch", 9, 9, ((11, "old"),)))
    store.quarantine(10, ["a block is wrong"])
    cut(add(store, 14), DATA)
    write(store, 15)
    with store.pins.changing() as pinned:
        pinned.add(9)


@pytest.mark.slow
def test_ls_lists_each_checkpoint_with_its_address(folder: str, store: BucketStore) -> None:
    filled(store)
    ended = command("ls", folder, "--json")
    assert ended.json["folder"] == folder
    assert ended.json["in_use_by"].startswith("run trains (process ")
    listed = ended.json["checkpoints"]
    assert [(each["step"], each["state"], each["finding"]) for each in listed] == [
        (7, "committed", ""),
        (9, "committed", ""),
        (10, "quarantined", "a block is wrong"),
        (11, "abandoned", "rolled back to step 9"),
        (12, "committed", ""),
        (13, "committed", ""),
        (14, "damaged", f"{DATA} has 85311 bytes, not 85312"),
        (15, "half_written", "a save into it is under way or was cut off"),
    ]
    assert all(each["path"] == f"{folder}/{each['name']}" for each in listed)
    assert [each["step"] for each in listed if each["pinned"]] == [9]
    nine = next(each for each in listed if each["step"] == 9)
    assert resolve(f"{folder}:9").folder == resolve(str(nine["path"])).folder
    assert (nine["kind"], nine["bytes"], nine["world_size"]) == ("full", store.get(9).nbytes, 2)


@pytest.mark.slow
def test_the_table_of_ls_has_80_columns_and_the_address_of_the_latest(folder: str, store: BucketStore) -> None:
    filled(store)
    code, screen = on_a_terminal("ls", folder)
    lines = plain(screen).splitlines()
    assert code == 0
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(f"{folder}: 4 checkpoints, ")
    assert lines[-2:] == ["The address of step 13:", str(store.get(13).path)]
    rows = {words[0]: words[-1] for line in lines if (words := line.split())}
    assert (rows["9"], rows["13"]) == ("pinned", "latest")


def test_ls_shows_what_is_being_removed_and_nothing_that_is_gone(folder: str, store: BucketStore) -> None:
    add(store, 7)
    info = add(store, 9)
    trash = store.discard(info)
    assert entries(command("ls", folder, "--json"))[info.path.name]["state"] == "being_removed"
    store.empty(trash)
    assert [each["step"] for each in command("ls", folder, "--json").json["checkpoints"]] == [7]


def test_ls_shows_a_checkpoint_whose_objects_are_all_gone_as_damaged(folder: str, store: BucketStore) -> None:
    add(store, 7)
    info = add(store, 9)
    store.objects.delete([key for key in keys(store) if key.startswith(f"{info.path.name}/")])
    last = command("ls", folder).out.splitlines()[-4]
    assert last.split(maxsplit=1) == [info.path.name, f"0 B       damaged: {layout.MANIFEST} is missing"]
    assert command("verify", folder).code == 3


def test_ls_shows_the_rules_of_the_run(folder: str, store: BucketStore) -> None:
    for step in (7, 9, 11):
        add(store, step, extra={"config": {"checkpoint": {"keep_latest_k": 2}}})
    found = command("ls", folder, "--json").json
    assert found["retention"] == {"keep_latest_k": 2}
    assert [each["step"] for each in found["checkpoints"] if each["to_be_removed"]] == [7]


def test_ls_shows_the_same_where_the_head_is_lost(folder: str, store: BucketStore) -> None:
    add(store, 7)
    before = entries(command("ls", folder, "--json"))
    store.objects.delete([naming.HEAD])
    found = command("ls", folder, "--json")
    assert (entries(found), found.json["in_use_by"]) == (before, None)


def test_ls_of_one_checkpoint_and_of_an_empty_folder_are_errors(folder: str, store: BucketStore) -> None:
    assert (
        command("ls", folder).err == f"error: {folder} holds no checkpoint: there is no checkpoint of any step in it\n"
    )
    info = add(store, 7)
    for step in (f"{folder}:7", f"{folder}/step-7", str(info.path)):
        ended = command("ls", step)
        assert (ended.code, ended.err) == (
            2,
            f"error: {step} is a checkpoint, not a folder of checkpoints: use inspect\n",
        )


@pytest.mark.slow
def test_verify_reads_every_byte_and_writes_nothing(folder: str, store: BucketStore) -> None:
    filled(store)
    nbytes = store.get(9).nbytes
    before = keys(store)
    ended = command("verify", folder, "--json")
    assert ended.code == 3
    assert [each["status"] for each in ended.json["checkpoints"]] == [*["intact"] * 4, "damaged"]
    assert [each["name"] for each in ended.json["checkpoints"]] == [entry.name for entry in store.head().kept]
    one = command("verify", f"{folder}:9", "--json")
    (checkpoint,) = one.json["checkpoints"]
    assert (one.code, checkpoint["bytes"], checkpoint["compared_with"]) == (0, nbytes, "digests")
    assert keys(store) == before


def test_verify_finds_a_flipped_bit_that_sizes_do_not_show(folder: str, store: BucketStore) -> None:
    flip(add(store, 7), DATA, 5000)
    assert command("verify", folder, "--sizes").code == 0
    ended = command("verify", f"{folder}:7", "--json")
    (finding,) = ended.json["checkpoints"][0]["findings"]
    assert (ended.code, finding["file"]) == (3, DATA)
    assert finding["finding"] == "bytes 0 to 85312 are not what was saved: another digest"
    assert "model.weight" in finding["keys"]


@pytest.mark.parametrize("sizes", [[], ["--sizes"]])
def test_verify_finds_missing_and_cut_files_and_names_unknown_ones(
    sizes: list[str], folder: str, store: BucketStore
) -> None:
    info = add(store, 7)
    remove(info, DATA)
    cut(info, layout.data_file(1, 0))
    store.objects.put(f"{info.path.name}/notes.txt", b"mine")
    ended = command("verify", folder, *sizes, "--json")
    (found,) = ended.json["checkpoints"]
    assert (ended.code, found["unknown_files"]) == (3, ["notes.txt"])
    texts = {each["file"]: each["finding"] for each in found["findings"]}
    assert texts == {DATA: "it is missing", layout.data_file(1, 0): "it has 24895 bytes, not 24896"}


def test_verify_finds_a_manifest_that_is_missing_or_not_what_was_committed(folder: str, store: BucketStore) -> None:
    other, lost = add(store, 7), add(store, 9)
    text = store.objects.get(f"{other.path.name}/{layout.MANIFEST}")[0].rpartition(b',\n"digest"')[0]
    changed = seal(text.replace(b'"world_size": 2', b'"world_size": 3'))
    assert changed is not None
    store.objects.put(f"{other.path.name}/{layout.MANIFEST}", changed)
    remove(lost, layout.MANIFEST)
    ended = command("verify", folder, "--json")
    first, second = (each["findings"][0] for each in ended.json["checkpoints"])
    assert (ended.code, first["file"]) == (3, layout.MANIFEST)
    assert first["finding"].startswith("expected ") and "as its last line" in first["finding"]
    assert second["finding"] == f"{layout.MANIFEST} is missing"
    assert command("verify", f"{folder}:9").code == 3


def test_inspect_shows_the_same_as_on_disk(folder: str, store: BucketStore) -> None:
    add(store, 7)
    there, here = (command("inspect", each, "--json").json for each in (f"{folder}:7", GOLDEN))
    for each in (there, here):
        del each["folder"]
    assert there == here
    assert command("inspect", folder).out.startswith(f"{folder}/step-7.")


def test_diff_compares_a_step_in_a_store_with_one_on_disk(folder: str, store: BucketStore, tmp_path: Path) -> None:
    add(store, 7)
    assert command("diff", folder, GOLDEN).code == 0
    assert command("convert", GOLDEN, tmp_path / "plain").code == 0
    ended = command("diff", f"{folder}:7", tmp_path / "plain", "--values", "--json")
    assert (ended.code, ended.json["equal"]) == (0, True)
    assert all(each["bitwise_equal"] for each in ended.json["values"]["read"].values())


@pytest.mark.parametrize(
    ("verb", "options"),
    [
        ("export", ["--format", "dcp"]),
        ("export", ["--format", "torch"]),
        ("convert", ["--layout", "dcp"]),
        ("reshard", ["--files", "3"]),
    ],
)
def test_what_is_made_of_a_step_in_a_store_is_what_is_made_of_it_on_disk(
    verb: str, options: list[str], folder: str, store: BucketStore, tmp_path: Path
) -> None:
    add(store, 7)
    for step, out in ((folder, "there"), (GOLDEN, "here")):
        ended = command(verb, step, tmp_path / out, *options)
        assert (ended.code, ended.err) == (0, "")
    if (tmp_path / "here").is_dir():
        assert command("diff", tmp_path / "there", tmp_path / "here", "--values").code == 0
    else:
        assert (tmp_path / "there").stat().st_size == (tmp_path / "here").stat().st_size


def test_convert_copies_a_step_to_a_disk_with_its_manifest(folder: str, store: BucketStore, tmp_path: Path) -> None:
    info = add(store, 9, lineage=Lineage("runa", 7))
    ended = command("convert", folder, tmp_path / "step-9", "--layout", "ours")
    assert (ended.code, ended.err) == (0, "")
    assert command("verify", tmp_path / "step-9").code == 0
    assert command("diff", folder, tmp_path / "step-9").code == 0
    (found,) = command("ls", tmp_path, "--json").json["checkpoints"]
    assert (found["step"], found["lineage"]["run_id"], found["created_at"]) == (9, "runa", info.created_at)
    wrong = command("convert", folder, tmp_path / "step-8", "--layout", "ours")
    assert (wrong.code, "is the name of step 8" in wrong.err) == (2, True)


def test_a_damaged_step_is_neither_exported_nor_compared(folder: str, store: BucketStore, tmp_path: Path) -> None:
    flip(add(store, 7), DATA, 5000)
    ended = command("export", folder, tmp_path / "out", "--format", "dcp")
    assert (ended.code, "is damaged: bytes 0 to 85312 of" in ended.err) == (3, True)
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_is_replaced_while_it_is_read_is_no_damage(folder: str, store: BucketStore) -> None:
    info = add(store, 7)
    gone = "it was removed or replaced while it was read"
    with pytest.raises(CheckpointNotFound, match=gone), reporting_removal(info.path):
        add(store, 7)
        raise CheckpointDamaged(str(info.path), "a file is missing")


def test_an_error_of_the_store_is_not_taken_for_a_removal(folder: str, store: BucketStore) -> None:
    info = add(store, 7)
    refuse_if_gone(info.path, (errno.ETIMEDOUT,))
    with pytest.raises(CheckpointNotFound):
        refuse_if_gone(info.path, ("e_tag=another",))


def test_a_damaged_head_takes_no_pins_and_its_checkpoints_are_listed(folder: str, store: BucketStore) -> None:
    add(store, 7)
    store.objects.put(naming.HEAD, store.objects.get(naming.HEAD)[0][:-9])
    assert [each["step"] for each in command("ls", folder, "--json").json["checkpoints"]] == [7]
    ended = command("pin", f"{folder}:7")
    finding = "it is damaged; the next start of a job rebuilds it from the manifests"
    assert (ended.code, ended.err) == (1, f"error: {folder}/head.json cannot be used for checkpoints: {finding}\n")


@pytest.mark.slow
def test_a_pinned_step_is_not_pruned_and_pins_need_no_lease(folder: str, store: BucketStore) -> None:
    for step in (7, 9, 11):
        add(store, step)
    first = command("pin", f"{folder}:7", "--json").json
    assert first == {"folder": folder, "step": 7, "changed": True, "pinned": [7]}
    assert command("pin", f"{folder}/step-7").out == f"Step 7 of {folder} was pinned already\n"
    assert command("pin", f"{folder}:8").code == 1
    verdicts = command("prune", folder, "--keep-latest", "1", "--dry-run", "--json").json["checkpoints"]
    assert [(each["step"], each["removed"]) for each in verdicts] == [(7, False), (9, True), (11, False)]
    assert [info.step for info in store.committed()] == [7, 9, 11]
    assert command("unpin", f"{folder}:7").out == f"Unpinned step 7 of {folder}\n"
    assert command("unpin", f"{folder}:8").out == f"Step 8 of {folder} was not pinned\n"
    assert store.pins.read() == frozenset()


@pytest.mark.slow
def test_prune_removes_what_no_rule_keeps_and_its_objects(folder: str) -> None:
    with held(folder) as store:
        for step in (7, 9, 11):
            add(store, step)
    command("pin", f"{folder}:7")
    ended = command("prune", folder, "--keep-latest", "1", "--json")
    assert (ended.code, ended.err, ended.json["folder"]) == (0, "", folder)
    assert [(each["step"], each["removed"]) for each in ended.json["checkpoints"]] == [
        (7, False),
        (9, True),
        (11, False),
    ]
    after = open_bucket(folder)
    assert [info.step for info in after.committed()] == [7, 11]
    assert {name.split(".")[0] for name in keys(after) if "/" in name} == {"step-7", "step-11"}
    assert after.head().holder is None


@pytest.mark.slow
def test_prune_refuses_a_folder_whose_job_lives(folder: str) -> None:
    with held(folder, timeout_seconds=1.0) as store:
        for step in (7, 9):
            add(store, step)
        arguments = [*CLI, "prune", folder, "--keep-latest", "1"]
        ended = subprocess.run(arguments, capture_output=True, text=True, check=False)
        note, error = ended.stderr.splitlines()
        assert (ended.returncode, ended.stdout) == (1, "")
        assert note == f"note: a silent job has {folder}; waiting up to 30 s to see whether it lives"
        assert error.startswith(f"error: {folder} is in use by run trains (process ")
        assert [info.step for info in store.committed()] == [7, 9]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["bring-back", "FOLDER:7", "step-7"], "FOLDER:7 is one checkpoint: name the folder of checkpoints, FOLDER"),
        (["memory", "FOLDER"], "FOLDER is an address, and memory works only on folders on disk"),
        (["report", "FOLDER"], "FOLDER is an address, and report works only on folders on disk"),
        (["import-weights", "FOLDER", "out"], "FOLDER is an address, and import-weights works only on folders on disk"),
        (["import-weights", "in", "FOLDER"], "OUT FOLDER: expected a folder on disk, found an address"),
        (["convert", "FOLDER", "FOLDER"], "OUT FOLDER: expected a folder on disk, found an address"),
        (["reshard", "FOLDER", "FOLDER", "--files", "2"], "OUT FOLDER: expected a folder on disk, found an address"),
        (["export", "FOLDER", "FOLDER"], "OUT FOLDER: expected a folder on disk, found an address"),
        (
            ["prune", "FOLDER:7", "--keep-latest", "1"],
            "FOLDER:7 is one checkpoint: name the folder of checkpoints, FOLDER",
        ),
        (
            ["prune", "FOLDER", "--min-free-disk-gb", "1"],
            "--min-free-disk-gb: FOLDER is in an object store, which always has room",
        ),
        (
            ["ls", "s3://bucket"],
            "'s3://bucket' is not the address of a folder in an object store: expected s3:// (Amazon S3 and "
            "compatible stores), gs:// (Google Cloud Storage), az:// (Azure Blob Storage), then a bucket of letters, "
            "digits, '.', '_' and '-', then a folder, whose names may also have !,'()=+@. Write a kind of store, a "
            "bucket and a folder in it, as in s3://bucket/run",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_does_not_work_in_a_store_is_one_sentence(
    arguments: list[str], sentence: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = command(*(each.replace("FOLDER", folder) for each in arguments))
    assert (ended.code, ended.out, ended.err) == (2, "", f"error: {sentence.replace('FOLDER', folder)}\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["ls", "inspect", "verify", "pin"])
def test_without_the_client_of_stores_it_is_named(verb: str, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    ended = command(verb, f"{folder}/{verb}")
    sentence = "obstore is not installed. Install it with: pip install 'torchtitan-lite[cloud]'"
    assert (ended.code, ended.out, ended.err) == (1, "", f"error: {sentence}\n")


def test_a_bucket_that_does_not_exist_is_named(folder: str) -> None:
    ended = command("ls", "s3://no-such-bucket/run")
    assert (ended.code, ended.err.count("\n")) == (1, 1)
    assert "s3://no-such-bucket/run" in ended.err and "the bucket does not exist" in ended.err
