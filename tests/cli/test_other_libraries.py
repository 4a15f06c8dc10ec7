"""`ls`, `inspect`, `verify` and `diff` on what transformers and Lightning wrote: nothing in a pickle is loaded."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from tests.checkpoint.reading.foreign_folders import save_plain
from tests.cli.conftest import Said
from tests.cli.other_libraries import (
    MAKERS,
    SHARDS,
    Setting,
    of_accelerate,
    of_lightning,
    of_lightning_with_dcp,
    of_sharded_trainer,
    of_trainer,
    of_trainer_with_fsdp,
)
from tests.store.filled import flip
from torchtitan_lite.log import counted

RECORD = "torchtitan-lite.digests.json"
DATA = (".pt", ".pth", ".ckpt", ".distcp", ".bin", ".pkl")
Make = Callable[[Path, int], Path]
OTHERS = {name: make for name, make in MAKERS.items() if name != "dcp"}

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def nothing_is_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, state: object) -> None:
        raise AssertionError("an object of the user's was loaded")

    monkeypatch.setattr(Setting, "__setstate__", refuse, raising=False)


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_every_verb_reads_it_and_a_record_finds_a_flipped_bit_of_any_file(
    make: Make, tmp_path: Path, said: Said
) -> None:
    root = tmp_path / "run"
    place, other = make(root, 10), make(root, 20)
    code, out, err = said("ls", root, "--json")
    assert (code, err) == (0, "")
    assert [(each["step"], each["state"], each["kind"]) for each in json.loads(out)["checkpoints"]] == [
        *((10, "foreign", "full"), (20, "foreign", "full"))
    ]
    assert said("inspect", place)[0] == 0 and "checkpoint of step 20, by " in said("inspect", root)[1]
    assert said("diff", place, place, "--values")[0] == 0 and said("diff", place, other)[0] in (0, 4)
    assert said("verify", root)[0] == 0
    files = [path for path in root.rglob("*") if path.is_file()]
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}
    assert said("verify", root, "--record")[0] == 0
    assert before == {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}
    assert len([path for path in root.rglob("*") if path.is_file() and path.name.endswith(RECORD)]) == 2
    home = place if place.is_dir() else root
    # Of a description that cannot be parsed it is the only finding.
    data = [path for path in files if place in (path, *path.parents) and path.suffix in DATA]
    for path in data:
        flip(path, path.stat().st_size // 2)
    code, out, _ = said("verify", place, "--json")
    found = {finding["file"] for finding in json.loads(out)["checkpoints"][0]["findings"]}
    assert code == 3 and found == {str(path.relative_to(home)) for path in data}


def test_the_tensors_of_a_trainer_have_their_names_and_shapes_and_pickles_their_size(
    tmp_path: Path, said: Said
) -> None:
    folder = of_trainer(tmp_path, 10, sharded=True)
    found = json.loads(said("inspect", folder, "--json")[1])
    assert (found["origin"], found["kind"], found["step"]) == ("transformers", "full", 10)
    assert {each["key"]: (each["dtype"], each["shape"]) for each in found["tensors"]} == {
        **{"embed.weight": ("float32", [4, 3]), "norm.weight": ("float32", [3])}
    }
    assert {each["name"]: each["is_read"] for each in found["files"]} == {
        **dict.fromkeys(SHARDS, True),
        **dict.fromkeys(("optimizer.pt", "rng_state.pth", "scheduler.pt"), False),
    }
    lines = said("inspect", folder)[1].splitlines()
    assert [line.split()[-2:] for line in lines if "optimizer.pt" in line] == [["not", "read"]]


def test_a_difference_of_one_weight_is_named(tmp_path: Path, said: Said) -> None:
    a, b = of_trainer(tmp_path / "a", 10), of_trainer(tmp_path / "b", 10, **{"norm.weight": torch.zeros(3)})
    code, out, _ = said("diff", a, b, "--values")
    assert code == 4 and "norm.weight   by up to 1   3 elements" in out and "embed" not in out
    sharded = of_trainer(tmp_path / "c", 10, sharded=True)
    assert said("diff", a, sharded, "--values")[0] == 0, "sharding does not count"


def test_nan_in_weights_is_named_and_is_no_damage(tmp_path: Path, said: Said) -> None:
    weights = {
        "half": torch.tensor([1.0, float("nan")], dtype=torch.bfloat16),
        "large": torch.tensor([float("inf")], dtype=torch.float16),
        "count": torch.tensor([-1]),
    }
    code, out, _ = said("verify", of_trainer(tmp_path, 10, **weights))
    assert code == 0 and "checkpoint-10: NaN is in half.\n" in out


def test_nan_in_a_folder_of_dcp_is_named_by_tensor_also_in_a_view(tmp_path: Path, said: Said) -> None:
    bad = torch.tensor([[1.0, 2.0], [float("nan"), 4.0], [5.0, 6.0]])
    large = torch.zeros(400_000, dtype=torch.float16)
    large[-1] = float("nan")
    state = {
        **{"model": {"bad": bad, "turned": bad.T, "without": bad[2:], "half": bad.bfloat16(), "large": large}},
        **{"optimizer": {"infinite": torch.tensor([float("inf"), float("-inf")]), "count": torch.tensor([-1])}},
    }
    folder = save_plain(state, tmp_path / "step-10")
    code, out, _ = said("verify", folder, "--json")
    [found] = json.loads(out)["checkpoints"]
    assert (code, found["status"]) == (0, "intact")
    assert sorted(found["nan_in"]) == [f"model.{name}" for name in ("bad", "half", "large", "turned")]
    assert "step-10: NaN is in model." in said("verify", folder)[1]


def _data_at(path: Path) -> int:
    return path.read_bytes().index(torch.ones(3).numpy().tobytes())


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda folder: (folder / SHARDS[1]).unlink(), f"of its 2 files, these are missing: {SHARDS[1]}"),
        (lambda folder: os.truncate(folder / SHARDS[0], 100), f"{SHARDS[0]}: its header"),
        (lambda folder: flip(folder / SHARDS[0], 9), f"{SHARDS[0]}: its header is not that of a safetensors file"),
        (lambda folder: flip(folder / SHARDS[0], 10), f"{SHARDS[0]}: embed.weight is not in it, but "),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "it is no map of tensors to files"),
        (lambda folder: flip(folder / "optimizer.pt", _data_at(folder / "optimizer.pt")), "optimizer.pt: bytes 0 to "),
    ],
)
def test_damage_without_a_record_names_the_file(
    damage: Callable[[Path], object], text: str, tmp_path: Path, said: Said
) -> None:
    folder = of_trainer(tmp_path, 10, sharded=True)
    damage(folder)
    code, out, err = said("verify", folder)
    assert (code, err) == (3, "") and text in out
    if "optimizer" not in text:
        assert said("inspect", folder)[0] == 3


def test_a_half_written_checkpoint_of_a_trainer_is_none(tmp_path: Path, said: Said) -> None:
    of_trainer(tmp_path, 10)
    (of_trainer(tmp_path, 20) / "trainer_state.json").unlink()
    code, out, err = said("ls", tmp_path)
    assert code == 0 and "half written: there is no trainer_state.json in it, which transformers writes last" in out
    code, out, err = said("verify", tmp_path)
    assert (code, out.split()[0]) == (0, "checkpoint-10")
    assert err.startswith("checkpoint-20: there is no trainer_state.json in it") and err.count("\n") == 1
    assert "checkpoint of step 10, by transformers" in said("inspect", tmp_path)[1]
    for verb in ("inspect", "verify"):
        code, out, err = said(verb, tmp_path / "checkpoint-20")
        assert (code, out) == (1, "") and "which transformers writes last" in err


def test_a_checkpoint_of_accelerate_without_its_generators_is_half_written(tmp_path: Path, said: Said) -> None:
    (of_accelerate(tmp_path, 2) / "random_states_0.pkl").unlink()
    assert "there is no random_states_0.pkl in it, which accelerate writes last" in said("ls", tmp_path)[1]
    code, _, err = said("verify", tmp_path / "checkpoint_2")
    assert code == 1 and "which accelerate writes last" in err


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_a_folder_and_a_step_name_it(make: Make, tmp_path: Path, said: Said) -> None:
    root = tmp_path / "run"
    for step in (9, 10):
        place = make(root, step)
    assert "checkpoint of step 9, by " in said("inspect", f"{root}:9")[1]
    named = said("inspect", place, "--json")
    assert said("inspect", f"{root}:10", "--json") == said("inspect", f"{root}:latest", "--json") == named
    code, out, err = said("inspect", f"{root}:7")
    assert (code, out, err) == (1, "", f"error: step 7 is not in {root} (it has 9, 10)\n")


def test_two_files_of_one_step_are_named(tmp_path: Path, said: Said) -> None:
    for name in ("epoch=0-step=10.ckpt", "epoch=0-step=10-v1.ckpt"):
        of_lightning(tmp_path, 10, name)
    code, _, err = said("inspect", f"{tmp_path}:10")
    assert code == 2 and "as epoch=0-step=10-v1.ckpt and epoch=0-step=10.ckpt: name one of them" in err


def test_a_checkpoint_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path, said: Said) -> None:
    of_trainer(tmp_path, 10)
    of_lightning(tmp_path, 30)
    weights = of_trainer(tmp_path, 20) / "model.safetensors"
    weights.unlink()
    weights.mkdir()
    code, out, _ = said("verify", tmp_path, "--json")
    assert (code, [each["status"] for each in json.loads(out)["checkpoints"]]) == (3, ["intact", "damaged", "intact"])
    assert said("ls", tmp_path)[0] == 0


def test_a_link_to_the_last_file_of_lightning_is_not_a_second_checkpoint(tmp_path: Path, said: Said) -> None:
    path = of_lightning(tmp_path, 10)
    (tmp_path / "last.ckpt").symlink_to(path.name)
    assert [each["name"] for each in json.loads(said("ls", tmp_path, "--json")[1])["checkpoints"]] == [path.name]


def test_a_folder_below_that_is_a_link_is_refused(tmp_path: Path, said: Said) -> None:
    folder = of_trainer_with_fsdp(tmp_path, 10)
    shutil.move(folder / "optimizer_0", tmp_path / "elsewhere")
    (folder / "optimizer_0").symlink_to(tmp_path / "elsewhere")
    assert "optimizer." not in said("inspect", folder)[1]
    of_trainer(tmp_path, 20)
    code, out, _ = said("verify", tmp_path, "--record", "--json")
    found = [(each["status"], "record" in each) for each in json.loads(out)["checkpoints"]]
    assert (code, found) == (1, [("unreadable", False), ("intact", True)])
    code, _, err = said("verify", folder, "--record")
    assert code == 3 and "optimizer_0 is not read: expected a file, found a symbolic link" in err


@pytest.mark.parametrize("verb", ["convert", "reshard", "pin", "add-metadata"])
@pytest.mark.parametrize("make", [of_trainer, of_lightning])
def test_a_verb_that_writes_refuses_it_in_one_sentence(make: Make, verb: str, tmp_path: Path, said: Said) -> None:
    place = make(tmp_path / "run", 10)
    out = tmp_path / "out"
    more = {"convert": [out, "--layout", "ours"], "reshard": [out, "--files", 1]}.get(verb, [])
    code, out, err = said(verb, place, *more)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "which only ls, inspect, verify, diff, prune and export take" in err and not (tmp_path / "out").exists()


def test_the_weights_that_fsdp_left_are_exported_by_the_name_of_their_folder(tmp_path: Path, said: Said) -> None:
    folder = of_trainer_with_fsdp(tmp_path, 10) / "pytorch_model_fsdp_0"
    out = tmp_path / "out.safetensors"
    assert said("export", folder, out)[0] == 0
    assert torch.equal(load_file(out)["weight"], torch.arange(6.0))


@pytest.mark.parametrize("make", [of_trainer, of_sharded_trainer, of_lightning_with_dcp, of_accelerate])
@pytest.mark.parametrize("format", ["safetensors", "torch", "dcp"])
def test_weights_are_exported_under_the_names_that_they_have(
    make: Make, format: str, tmp_path: Path, said: Said
) -> None:
    place, out = make(tmp_path / "run", 10), tmp_path / "out"
    if make is of_lightning_with_dcp:
        expected = {"weight": torch.ones(3)}
    else:
        expected = {name: t for file in place.glob("*.safetensors") for name, t in load_file(file).items()}
    code, printed, err = said("export", f"{tmp_path / 'run'}:10", out, "--format", format, "--dtype", "bfloat16")
    assert (code, err) == (0, "") and f"Exported {counted(len(expected), 'tensor')} of {place}" in printed
    if format == "dcp":
        found = {name: torch.zeros_like(tensor, dtype=torch.bfloat16) for name, tensor in expected.items()}
        dcp_load(found, checkpoint_id=out, no_dist=True)
    else:
        found = torch.load(out) if format == "torch" else load_file(out / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (of_lightning, [], "found epoch=0-step=10.ckpt, and export reads no pickle: try import-weights"),
        (of_trainer_with_fsdp, [], "has its tensors in optimizer_0 and pytorch_model_fsdp_0: name the folder"),
        (of_trainer, ["--format", "hf"], "has the form of Hugging Face's libraries already: copy it"),
    ],
)
def test_weights_that_are_not_exported_are_refused_with_a_way_out(
    make: Make, options: list[str], text: str, tmp_path: Path, said: Said
) -> None:
    place = make(tmp_path / "run", 10)
    code, out, err = said("export", place, tmp_path / "out", *options)
    assert (code, out, err.count("\n")) == (2, "", 1) and text in err and not (tmp_path / "out").exists()


def test_a_model_in_a_pickle_is_refused_by_the_name_of_its_file(tmp_path: Path, said: Said) -> None:
    folder = of_trainer(tmp_path, 10)
    (folder / "model.safetensors").unlink()
    torch.save({"norm.weight": torch.ones(3)}, folder / "pytorch_model.bin")
    code, _, err = said("export", folder, tmp_path / "out")
    assert code == 2 and "found pytorch_model.bin, and export reads no pickle: try import-weights" in err


def test_safetensors_reads_the_weights_next_to_a_record(tmp_path: Path, said: Said) -> None:
    folder = of_trainer(tmp_path, 10)
    assert said("verify", folder, "--record")[0] == 0
    assert torch.equal(load_file(folder / "model.safetensors")["norm.weight"], torch.ones(3))


@pytest.mark.slow
def test_transformers_resumes_next_to_records_and_after_a_prune(tmp_path: Path, said: Said) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config = LlamaConfig(
        **{"vocab_size": 8, "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1},
        **{"num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 8},
    )
    data = [{"input_ids": torch.arange(4), "labels": torch.arange(4)} for _ in range(4)]
    arguments = TrainingArguments(
        **{"output_dir": str(tmp_path), "max_steps": 4, "save_steps": 1, "per_device_train_batch_size": 2},
        **{"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no"},
        **{"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss", "greater_is_better": True},
    )
    Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=data, eval_dataset=data).train()
    assert said("verify", tmp_path, "--record")[0] == 0
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert said("prune", tmp_path, "--keep-latest", 1, "--yes")[1].count("younger than 1 h") == 4
    assert said("prune", tmp_path, "--keep-latest", 1, "--yes", "--min-age", 0)[0] == 0
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-4", Path(state["best_model_checkpoint"]).name}
    assert not state["best_model_checkpoint"].endswith("checkpoint-4")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    held = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    assert torch.equal(loaded.model.norm.weight, held["model.norm.weight"])
    arguments.max_steps = 5
    again = Trainer(model=loaded, args=arguments, train_dataset=data, eval_dataset=data)
    assert again.train(resume_from_checkpoint=True).global_step == 5
    flip(tmp_path / "checkpoint-4" / "training_args.bin")
    code, out, _ = said("verify", tmp_path)
    assert code == 3 and "training_args.bin: " in out
