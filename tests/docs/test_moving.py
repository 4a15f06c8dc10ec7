"""The programs and commands on docs/moving.md run, in their order, and continue what the other tool left."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked import REPO, run_code, run_script

PAGE = (REPO / "docs" / "moving.md").read_text(encoding="utf-8")
EXAMPLES = REPO / "docs" / "examples" / "moving"
LINKED = re.compile(r"\(examples/moving/(\w+\.py)\)")
STEP = re.compile(
    r"(?P<before>[^\n]*)\n\n```(?:python|toml)\n(?P<code>.*?)^```$"
    r"|^    (?P<command>(?:python|torchtitan-lite) [^\n]*)$",
    re.MULTILINE | re.DOTALL,
)
NAME = re.compile(r"\b[Aa]s `(\w+\.(?:py|toml))`")
DEADLINE_SECONDS = 240.0
TASK = "task.py"

Outputs = dict[str, str]
"""The output of each command, and of each program without a name."""


def section(title: str) -> Iterator[tuple[str, str, str]]:
    """Yield the file name, the code and the command of each program and command below the heading `title`."""
    _, _, below = PAGE.partition(f"\n## {title}\n")
    assert below, f"there is no section {title}"
    for match in STEP.finditer(below.partition("\n## ")[0]):
        names = NAME.findall(match["before"] or "")
        yield (names[0] if names else ""), match["code"] or "", match["command"] or ""


def run_section(title: str, folder: Path) -> Outputs:
    """Write the programs and run the commands of a section in `folder`."""
    outputs: Outputs = {}
    for name in (TASK, *LINKED.findall(PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0])):
        write(name, folder)
    for name, code, command in section(title):
        if name:
            (folder / name).write_text(code)
        elif code:
            outputs[code] = run("python unnamed.py", folder, code)
        else:
            outputs[command] = run(command, folder)
    return outputs


def write(name: str, folder: Path) -> None:
    """Write the program `name`, of the page or of those that it links, into `folder`."""
    if name in LINKED.findall(PAGE):
        shutil.copy(EXAMPLES / name, folder)
        return
    [code] = [match["code"] for match in STEP.finditer(PAGE) if match["code"] and name in NAME.findall(match["before"])]
    (folder / name).write_text(code)


def run(command: str, folder: Path, code: str = "") -> str:
    """Run a command of the page, or `code`, and return what it prints."""
    program, *arguments = shlex.split(command)
    log = folder / "output.log"
    log.write_text("")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPO)}
    if program == "torchtitan-lite":
        code = f"import sys\nfrom torchtitan_lite.cli.app import main\nsys.exit(main({arguments!r}))"
    elif arguments[0] == "-m":
        code = (
            f"import runpy, sys\nsys.argv = {arguments[1:]!r}\nrunpy.run_module({arguments[1]!r}, run_name='__main__')"
        )
    if code:
        process = run_code(code, log, environment, folder)
    else:
        script = REPO / "train.py" if arguments[0] == "train.py" else folder / arguments[0]
        process = run_script(script, arguments[1:], log, environment, folder)
    ended = process.wait(DEADLINE_SECONDS)
    assert ended == 0, f"{command}:\n{log.read_text()}"
    return log.read_text()


def losses(*outputs: str) -> dict[int, str]:
    """Return the loss of each step; nine digits distinguish any two floats of 32 bits."""
    return {
        int(step): loss
        for text in outputs
        for step, loss in re.findall(r"^step +(\d+): loss (\S+)$", text, re.MULTILINE)
    }


def uninterrupted(script: str, folder: Path, *arguments: str) -> dict[int, str]:
    """Return the losses of the old loop in a folder of its own."""
    alone = folder / "alone"
    alone.mkdir()
    for name in (TASK, script):
        write(name, alone)
    return losses(run(shlex.join(["python", script, *arguments]), alone))


def need(*libraries: str) -> None:
    for library in libraries:
        try:
            version(library)
        except PackageNotFoundError:
            pytest.skip(f"{library} is not installed")


def test_every_program_and_command_on_the_page_is_in_a_section_that_a_test_runs() -> None:
    titles = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
    assert titles == [
        "The first start",
        "From torch.save",
        "From plain DCP",
        "From torchtitan",
        "From Lightning",
        "From transformers' Trainer",
        "From accelerate",
    ]
    in_sections = sum(1 for title in titles for _ in section(title))
    fences = len(re.findall(r"^```\w*$", PAGE, re.MULTILINE)) // 2
    commands = len(re.findall(r"^    (?:python|torchtitan-lite|torchrun|\./)", PAGE, re.MULTILINE))
    assert in_sections == fences + commands
    assert not [*section("The first start")]
    assert sorted(LINKED.findall(PAGE)) == sorted(path.name for path in EXAMPLES.iterdir())
    assert not [name for name in LINKED.findall(PAGE) if f"    python {name} " not in PAGE]


def test_every_loop_of_the_page_that_saves_ends_after_a_signal() -> None:
    programs = [match["code"] for match in STEP.finditer(PAGE) if match["code"]]
    programs += [path.read_text(encoding="utf-8") for path in EXAMPLES.iterdir()]
    # Callbacks do not own the loop: the examples next to the page show how they end it.
    loops = [code for code in programs if re.search(r"^ +(manager|checkpoint)\.save\(", code, re.MULTILINE)]
    assert len(loops) == 4
    assert all("preempted_by" in code for code in loops)


@pytest.mark.slow  # ten processes, one after the other
def test_a_loop_with_torch_save_continues_with_the_manager_and_returns(tmp_path: Path) -> None:
    straight = uninterrupted("save_before.py", tmp_path, "25")
    outputs = run_section("From torch.save", tmp_path)
    first, second, third = (outputs[f"python save_{which}"] for which in ("before.py 5", "after.py 10", "after.py 20"))
    assert [*losses(second)] == [6, 7, 8, 9, 10] and [*losses(third)] == [*range(11, 21)]
    assert losses(first, second, third, outputs["python save_before.py 25"]) == straight
    assert [*losses(outputs["python save_before.py 25"])] == [*range(21, 26)]
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert sorted(weights) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert (tmp_path / "weights" / "model.safetensors").is_file()
    assert "the weights are the entry 'model'" in outputs["torchtitan-lite import-weights last.pt start --names same"]


@pytest.mark.slow  # eleven processes, one after the other
def test_a_loop_with_plain_dcp_continues_with_the_manager_and_returns(tmp_path: Path) -> None:
    straight = uninterrupted("dcp_before.py", tmp_path, "20")
    write("save_before.py", tmp_path)
    write(TASK, tmp_path)
    run("python save_before.py 5", tmp_path)
    run("python -m torch.distributed.checkpoint.format_utils torch_to_dcp last.pt old_dcp/step-5", tmp_path)
    outputs = run_section("From plain DCP", tmp_path)
    first, second, third = (
        outputs["python dcp_before.py 5"],
        *(outputs[f"python dcp_after.py {n} old/step-5"] for n in (10, 20)),
    )
    assert [*losses(second)] == [6, 7, 8, 9, 10] and [*losses(third)] == [*range(11, 21)]
    assert losses(first, second, third) == straight
    assert losses(outputs["python dcp_back.py"]) == {11: straight[11]}
    assert outputs["python numbered.py"].splitlines()[-1] == f"5 {3e-2 * 0.99**5}"
    full = torch.load(tmp_path / "full.pt", weights_only=True)
    assert {"model", "optimizer", "lr_scheduler"} <= full.keys()
    assert (tmp_path / "plain" / "step-10" / ".metadata").is_file()
    # The converted folder is the loop's own from then on.
    shutil.rmtree(tmp_path / "outputs_dcp")
    (tmp_path / "converted").rename(tmp_path / "outputs_dcp")
    assert losses(run("python dcp_after.py 10 none", tmp_path)) == losses(second)


@pytest.mark.slow  # two runs of the trainer, and three more processes
def test_the_trainer_takes_over_a_folder_in_torchtitans_layout_with_torchtitans_toml(tmp_path: Path) -> None:
    write("titan.toml", tmp_path)
    start = "python train.py --job.config_file titan.toml"
    straight = run(f"{start} --job.dump_folder straight --metrics.no_enable_tensorboard", tmp_path)
    assert "Training completed" in straight
    convert = "torchtitan-lite convert straight/checkpoint:4 titan/checkpoint/step-4 --layout torchtitan --dp-ranks 1"
    run(convert, tmp_path)
    outputs = run_section("From torchtitan", tmp_path)
    [log] = [text for command, text in outputs.items() if "initial_load_path" in command]
    assert "Training starts at step 5" in log and "Training completed" in log
    assert "the data begin from their start" in log
    assert [*losses(outputs["python titan_after.py"])] == [*range(1, 11)]
    assert (tmp_path / "back" / "checkpoint" / "step-8" / ".metadata").is_file()


def a_ckpt(folder: Path, steps: int) -> dict[str, Any]:
    """Write `last.ckpt`, laid out as Lightning 2.6 does, of the model of the page. Return the state that is in it."""
    write(TASK, folder)
    write("save_before.py", folder)
    run(f"python save_before.py {steps}", folder)
    last: dict[str, Any] = torch.load(folder / "last.pt", weights_only=True)
    held = {
        "epoch": 0,
        "global_step": steps,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": {f"model.{name}": tensor for name, tensor in last["model"].items()},
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1}}}},
        "callbacks": {},
        "optimizer_states": [last["optimizer"]],
        "lr_schedulers": [last["scheduler"]],
    }
    torch.save(held, folder / "last.ckpt")
    return last


@pytest.mark.slow  # four starts with the import of lightning
def test_a_run_of_lightning_continues_with_the_callback_and_its_file_is_read_without_it(tmp_path: Path) -> None:
    need("lightning", "torchdata")
    straight = tmp_path / "alone"
    straight.mkdir()
    write("lightning_run.py", straight)
    expected = losses(run("python lightning_run.py before 20", straight))
    a_ckpt(tmp_path, 5)
    outputs = run_section("From Lightning", tmp_path)
    first, second, third = (
        outputs[f"python lightning_run.py {which}"] for which in ("before 5", "after 10", "after 20")
    )
    assert [*losses(second)] == [6, 7, 8, 9, 10] and [*losses(third)] == [*range(11, 21)]
    assert losses(first, second, third) == expected
    back = torch.load(tmp_path / "back.ckpt", weights_only=True)
    assert back["global_step"] == 20 and back["optimizer_states"][0]["state"]


@pytest.mark.slow
def test_a_ckpt_of_lightning_is_loaded_and_imported_without_lightning(tmp_path: Path) -> None:
    last = a_ckpt(tmp_path, 5)
    steps = [
        (name, code, command)
        for name, code, command in section("From Lightning")
        if "lightning_run" not in name + command
    ]
    printed = ""
    for name, code, command in steps:
        if name:
            (tmp_path / name).write_text(code)
        else:
            save = "\nimport torch\ntorch.save(model.state_dict(), 'now.pt')\n" if code else ""
            printed += run(command or "python unnamed.py", tmp_path, code + save)
    assert f"5 {[3e-2 * 0.99**5]}" in printed
    now = torch.load(tmp_path / "now.pt", weights_only=True)
    assert now.keys() == last["model"].keys()
    assert all(torch.equal(now[name], tensor) for name, tensor in last["model"].items())


@pytest.mark.slow  # four starts with the import of transformers
def test_a_run_of_transformers_trainer_continues_with_the_callback(tmp_path: Path) -> None:
    need("transformers", "accelerate")
    alone = tmp_path / "alone"
    alone.mkdir()
    write("trainer_run.py", alone)
    expected = losses(run("python trainer_run.py before 20", alone))
    outputs = run_section("From transformers' Trainer", tmp_path)
    first, second, third = (outputs[f"python trainer_run.py {which}"] for which in ("before 5", "after 10", "after 20"))
    assert losses(first, second, third) == expected
    assert [*losses(third)] == [*range(11, 21)]


@pytest.mark.slow  # three starts with the import of accelerate
def test_a_loop_with_accelerate_continues_with_the_manager(tmp_path: Path) -> None:
    need("accelerate")
    straight = uninterrupted("accelerate_run.py", tmp_path, "before", "20")
    outputs = run_section("From accelerate", tmp_path)
    assert losses(*outputs.values()) == straight
    assert [*losses(outputs["python accelerate_run.py after 20"])] == [*range(11, 21)]
