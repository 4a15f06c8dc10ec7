"""The commands that set up, on a machine that has bash and a Python, and no network.

The Python is a stand-in: it makes no environment and installs nothing, but writes down what it was asked, and says
that what it installed can be imported. Whatever else it is asked, the Python of this test run answers.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
TOOLS = ("bash", "cat", "cksum", "cp", "dirname", "env", "flock", "mkdir", "mktemp", "rm")
STAND_IN = r"""#!/usr/bin/env bash
case "$1 $2" in
"-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && asked=venv ;;
"-m pip") [[ $3 != --version ]] || exit 0; asked="pip ${*:3}" result="${PIP_EXIT:-0}" ;;
"-m pytest") asked="pytest ${*:3}" result="${PYTEST_EXIT:-0}" ;;
"-m torch.distributed.run") asked="$PWD: torchrun ${*:3}" ;;
"-c import numpy"*) exit 0 ;;
*) [[ "$2" != *"$REFUSED"* ]] || exit 1; exec "$REAL" "$@" ;;
esac
echo "$asked" >>"$ASKED"
[[ "$asked ${KILLED_IN:-none}" != pip*pip ]] || kill -KILL 0
exit "${result:-0}"
"""
SET_UP = ["venv", "pip install --disable-pip-version-check -c requirements.txt -e .[test]"]
IN_TWO = "pytest -n 2 --dist loadfile --no-loadscope-reorder"
FAST = f"{IN_TWO} -m not slow and not exhaustive"
THOROUGH = "--hypothesis-profile thorough"
ALL = f"{IN_TWO} -m not exhaustive {THOROUGH}"


class Machine:
    """A copy of the commands in a folder with blanks in its name, and a user who stands elsewhere."""

    def __init__(self, tmp_path: Path) -> None:
        self.repo, self.bin, self.home = tmp_path / "a copy", tmp_path / "bin", tmp_path / "home"
        self.asked_file = tmp_path / "asked"
        for folder in (self.repo, self.bin, self.home):
            folder.mkdir()
        for name in ("run_tests.sh", "run_train.sh", "pyproject.toml", "requirements.txt"):
            shutil.copy(ROOT / name, self.repo)
        for name in ("scripts", ".ci"):
            shutil.copytree(ROOT / name, self.repo / name)
        for tool in TOOLS:
            if found := shutil.which(tool):
                (self.bin / tool).symlink_to(found)
        python = self.bin / "python3"
        python.write_text(STAND_IN)
        python.chmod(0o755)

    def run(self, command: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": str(self.bin),
            "HOME": str(self.home),
            "PYTHONPATH": str(ROOT),
            "REAL": sys.executable,
            "REFUSED": "nothing",
            "ASKED": str(self.asked_file),
        }
        return subprocess.run(
            [str(self.repo / command), *arguments],
            cwd=self.home,
            env=environment | variables,
            start_new_session=True,
            capture_output=True,
            text=True,
            check=False,
        )

    def asked(self) -> list[str]:
        """What the stand-in was asked since the last call."""
        if not self.asked_file.exists():
            return []
        lines = self.asked_file.read_text().splitlines()
        self.asked_file.unlink()
        return lines


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    yield Machine(tmp_path)


def last_line(finished: subprocess.CompletedProcess[str]) -> str:
    return finished.stderr.strip().splitlines()[-1]


def test_the_first_run_sets_up_under_the_constraints_and_the_second_does_not(machine: Machine) -> None:
    assert machine.run("run_tests.sh").returncode == 0
    assert machine.asked() == [*SET_UP, FAST]
    assert machine.run("run_tests.sh").returncode == 0
    assert machine.asked() == [FAST]


def test_a_changed_requirement_is_installed_into_the_environment_there_is(machine: Machine) -> None:
    machine.run("run_tests.sh")
    machine.asked()
    with (machine.repo / "requirements.txt").open("a") as file:
        file.write("something==1.0\n")
    machine.run("run_tests.sh")
    assert machine.asked() == [SET_UP[1], FAST]


def test_a_set_up_that_was_killed_is_made_anew(machine: Machine) -> None:
    assert machine.run("run_tests.sh", KILLED_IN="pip").returncode == -9
    assert machine.asked() == SET_UP
    assert machine.run("run_tests.sh").returncode == 0
    assert machine.asked() == [*SET_UP, FAST]


def test_an_environment_folder_without_a_python_is_made_anew(machine: Machine) -> None:
    (machine.repo / ".venv" / "bin").mkdir(parents=True)
    assert machine.run("run_tests.sh").returncode == 0
    assert machine.asked() == [*SET_UP, FAST]


def test_a_python_without_venv_is_one_sentence_that_says_what_to_install(machine: Machine) -> None:
    finished = machine.run("run_tests.sh", REFUSED="ensurepip")
    assert finished.returncode == 3
    assert "install python3-venv" in last_line(finished)
    assert machine.asked() == []
    assert not (machine.repo / ".venv").exists()


@pytest.mark.parametrize("command", ["run_tests.sh", "run_train.sh"])
def test_no_python_that_is_new_enough_is_one_sentence(machine: Machine, command: str) -> None:
    finished = machine.run(command, REFUSED="version_info")
    assert finished.returncode == 3
    assert finished.stderr.splitlines() == [
        "set-up: no Python 3.10 or newer was found: install python3, or name one in PYTHON."
    ]


def test_a_failing_pip_ends_with_3_and_is_tried_again(machine: Machine) -> None:
    finished = machine.run("run_tests.sh", PIP_EXIT="1")
    assert finished.returncode == 3
    assert "pip could not install" in last_line(finished)
    machine.asked()
    assert machine.run("run_tests.sh").returncode == 0
    assert machine.asked()[-2:] == [SET_UP[1], FAST]


def test_ci_runs_the_slow_tests_too_and_ends_as_pytest_does(machine: Machine) -> None:
    assert machine.run(".ci/run", PYTEST_EXIT="5").returncode == 5
    assert machine.asked()[-1] == ALL


def test_pytest_gets_the_arguments_as_they_are(machine: Machine) -> None:
    machine.run("run_tests.sh", "-k", "a or b", "--all", "tests/store")
    assert machine.asked()[-1] == f"{ALL} -k a or b tests/store"
    machine.run("run_tests.sh", "--exhaustive", "-n", "0")
    assert machine.asked()[-1] == f"{IN_TWO} {THOROUGH} -n 0"


def is_environment() -> bool:
    return sys.prefix != sys.base_prefix or (Path(sys.prefix) / "conda-meta").is_dir()


@pytest.mark.skipif(not is_environment(), reason="this Python is in no virtual or conda environment")
def test_an_environment_with_torch_is_used_as_it_is(machine: Machine) -> None:
    finished = machine.run("run_tests.sh", "--version", PYTHON=sys.executable)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("pytest ") or finished.stderr.startswith("pytest ")
    assert machine.asked() == []
    assert not (machine.repo / ".venv").exists()


def test_what_an_environment_has_is_a_constraint_on_what_it_gets() -> None:
    script = f'source "{ROOT}/scripts/env.sh"; PYTHON="$1" constraints_that_keep_what_is_there'
    kept = subprocess.run(["bash", "-c", script, "bash", sys.executable], capture_output=True, text=True, check=True)
    for name in ("torch", "numpy", "pytest"):
        assert f"{name}=={metadata.version(name)}" in kept.stdout.splitlines()


def test_training_is_launched_where_the_user_stands(machine: Machine) -> None:
    finished = machine.run("run_train.sh", "--job.description", "two words", NGPU="3", LOG_RANK="0,2")
    assert finished.returncode == 0, finished.stderr
    where, launch = machine.asked()[-1].split(": torchrun ")
    assert where == str(machine.home)
    assert launch.startswith("--standalone --local-addr=localhost --nproc-per-node=3 --local-ranks-filter=0,2 ")
    train = machine.repo / "train.py"
    assert launch.endswith(f" {train} --job.config_file=llama_debug.toml --job.description two words")


@pytest.mark.parametrize(
    ("arguments", "variables", "complaint"),
    [
        (["--checkpoint.intervall", "5"], {}, "interval"),
        ([], {"CONFIG_FILE": "nowhere.toml"}, "nowhere.toml"),
        ([], {"NGPU": "two"}, "NGPU: expected a number of processes, found 'two'."),
    ],
)
def test_wrong_usage_of_training_ends_with_2_before_a_process_is_launched(
    machine: Machine, arguments: list[str], variables: dict[str, str], complaint: str
) -> None:
    finished = machine.run("run_train.sh", *arguments, **variables)
    assert finished.returncode == 2
    assert complaint in finished.stderr
    assert "Traceback" not in finished.stderr
    assert not any("torchrun" in asked for asked in machine.asked())


def test_help_is_shown_and_nothing_is_launched(machine: Machine) -> None:
    finished = machine.run("run_train.sh", "--help")
    assert finished.returncode == 0
    assert "--checkpoint.interval" in finished.stdout
    assert not any("torchrun" in asked for asked in machine.asked())


def test_what_is_asked_for_has_a_version_that_was_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked_for = {_name(line) for line in [*project["dependencies"], *extras["test"], *extras["dev"]]}
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line and line[0] != "#"]
    assert all(re.fullmatch(r'[\w-]+==[\w.]+(; python_version (<|>=) "3\.\d+")?', line) for line in lines)
    assert "torch==2.13.0" in lines
    assert asked_for - {"torchtitan_lite"} <= {_name(line) for line in lines}


def test_an_environment_is_asked_for_all_that_the_project_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    script = (ROOT / "scripts" / "env.sh").read_text()
    needed, needed_by_dev = (
        {_name(name) for name in re.findall(rf'^{variable}="(.*?)"', script, re.MULTILINE)[0].split()}
        for variable in ("NEEDED", "NEEDED_BY_DEV")
    )
    # torch is asked by importing it, tomli only below Python 3.11
    assert needed == {_name(line) for line in project["dependencies"] + extras["test"]} - {"torch", "tomli"}
    assert needed_by_dev == {_name(line) for line in extras["dev"]} - {"torchtitan_lite"}


def _name(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement)[0].replace("-", "_").lower()


def test_the_commands_can_be_run_as_they_are() -> None:
    for command in ("run_train.sh", "run_tests.sh", ".ci/run", "scripts/check.sh"):
        assert os.access(ROOT / command, os.X_OK), command
