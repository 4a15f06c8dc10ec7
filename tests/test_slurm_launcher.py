"""The launcher for Slurm, run for real with stand-ins for `srun` and `scontrol` that record their arguments.

The stand-in for `srun` plays the complete job; in one test it runs torchrun and the training on this machine.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tests.e2e.jobs import DEADLINE_SECONDS, TINY, Job, free_port
from tests.forked import FORKED_RANKS
from tests.processes import children, command_line, own_children, send, wait_until
from torchtitan_lite.json_lines import JsonLines

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "slurm_train.sh"
TORCHRUN = Path(torch.__file__).parent / "distributed" / "run.py"
SCONTROL = """#!/usr/bin/env bash
case "$1" in
show) printf 'node%s\\n' 7 8 ;;
requeue) echo "$@" >>"$RECORD/requeued"; exit "${REQUEUE_CODE:-0}" ;;
esac
"""
SRUN = """#!/usr/bin/env bash
[[ ${!#} != true ]] || exit "${NODES:-0}"
log_event() { cat "$RECORD/$1" >>"$DUMP_FOLDER/events.jsonl"; }
on_signal() { log_event preempted; exit 1; }
printf '%s\\n' "$@" >"$RECORD/srun"
case "$STEP" in
waits) trap on_signal USR1; : >"$RECORD/started"; while true; do sleep 0.02; done ;;
stubborn) trap 'exit 9' USR1; : >"$RECORD/started"; while true; do sleep 0.02; done ;;
saves) log_event preempted; exit 1 ;;
loads) trap 'exit 1' USR1; : >"$RECORD/started"; while true; do sleep 0.02; done ;;
loses_a_node) log_event preempted; log_event finished; exit 1 ;;
ends) log_event finished ;;
fails) exit 7 ;;
esac
"""
SRUN_NODES = """#!/usr/bin/env bash
# Each node is a session of its own, so that a test can kill all of it.
while [[ $1 == --* ]]; do shift; done
[[ $1 != true ]] || exit 0
for node in 0 1 2; do
    PET_LOCAL_ADDR=localhost setsid "$@" &
    nodes[node]=$!
done
printf '%s\n' "${nodes[@]}" >"$RECORD/nodes"
trap 'kill -USR1 -- "${nodes[@]/#/-}"' USR1
code=0
for node in "${nodes[@]}"; do
    while kill -0 "$node" 2>/dev/null; do wait "$node" || code=$?; done
done
exit "$code"
"""
SRUN_HERE = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""


class Cluster:
    """A job that Slurm has started on two nodes: its environment, its working directory, its calls of Slurm."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "log"
        self.record, self.dump_folder = folder / "record", folder / "a dump folder"
        self.jobs: list[Job] = []
        for made in (folder / "bin", self.record, self.dump_folder):
            made.mkdir()
        self.command("scontrol", SCONTROL)
        self.command("srun", SRUN)
        for event in ("preempted", "finished"):
            JsonLines(self.record / event).append({"event": event, "step": 4, "time": 1.0})

    def command(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        # Slurm starts a copy of the script from its spool folder.
        spooled = shutil.copy(SCRIPT, self.folder / "slurm_script")
        environment = {
            **os.environ,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "RECORD": str(self.record),
            "DUMP_FOLDER": str(self.dump_folder),
            "PYTHON": sys.executable,
            "OMP_NUM_THREADS": "1",
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": "node[7-8]",
            "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_GPUS_ON_NODE": "4",
        }
        command = ["bash", spooled, f"--job.dump_folder={self.dump_folder}", *arguments]
        with self.log.open("w") as log:
            process = subprocess.Popen(
                command, env=environment | variables, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, text=True
            )
        self.jobs.append(Job([process], self.dump_folder, self.log))
        return process

    def run(self, *arguments: str, **variables: str) -> tuple[int, str]:
        """Run the launcher to its end. Return its exit code and its output."""
        code = self.start(*arguments, **variables).wait(DEADLINE_SECONDS)
        return code, self.log.read_text()

    def requeued(self) -> list[str]:
        path = self.record / "requeued"
        return path.read_text().splitlines() if path.exists() else []

    def srun(self) -> list[str]:
        """Return the arguments of srun."""
        return (self.record / "srun").read_text().splitlines()

    def wait_for_step(self, process: subprocess.Popen[str]) -> None:
        assert wait_until((self.record / "started").exists, self.log.read_text, lambda: process.poll() is not None)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    for job in cluster.jobs:
        job.kill()


@pytest.mark.slow
def test_a_job_that_was_preempted_is_queued_again_once(cluster: Cluster) -> None:
    code, said = cluster.run(STEP="saves")
    assert (code, cluster.requeued()) == (0, ["requeue 4711"]), said


def test_a_job_that_finished_is_not_queued_again(cluster: Cluster) -> None:
    code, said = cluster.run(STEP="ends")
    assert (code, cluster.requeued()) == (0, []), said


def test_a_job_that_failed_is_not_queued_again_and_keeps_its_exit_code(cluster: Cluster) -> None:
    code, said = cluster.run(STEP="fails")
    assert (code, cluster.requeued()) == (7, [])
    assert "failed with 7; not queued again" in said


def test_a_job_that_only_loads_writes_no_event_and_is_queued_again_for_the_signal(cluster: Cluster) -> None:
    process = cluster.start("--checkpoint.load_only", STEP="loads")
    cluster.wait_for_step(process)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(DEADLINE_SECONDS) == 0, cluster.log.read_text()
    assert cluster.requeued() == ["requeue 4711"]


def test_a_job_that_only_loads_and_fails_without_a_signal_is_not_queued_again(cluster: Cluster) -> None:
    code, _ = cluster.run("--checkpoint.load_only", STEP="fails")
    assert (code, cluster.requeued()) == (7, [])


def test_a_job_that_finished_without_one_of_its_nodes_is_finished(cluster: Cluster) -> None:
    code, said = cluster.run(STEP="loses_a_node")
    assert (code, cluster.requeued()) == (0, []), said


def test_a_job_that_fails_because_a_node_is_lost_is_queued_again(cluster: Cluster) -> None:
    code, said = cluster.run(STEP="fails", NODES="1")
    assert (code, cluster.requeued()) == (0, ["requeue 4711"])
    assert "a node is lost; queueing job 4711 again" in said


def test_a_failure_after_an_earlier_preemption_is_a_failure(cluster: Cluster) -> None:
    cluster.run(STEP="saves")
    code, _ = cluster.run(STEP="fails", SLURM_RESTART_COUNT="1")
    assert (code, cluster.requeued()) == (7, ["requeue 4711"])


@pytest.mark.slow
def test_each_preemption_queues_it_again_until_it_finishes(cluster: Cluster) -> None:
    codes = [cluster.run(STEP=step)[0] for step in ("saves", "saves", "ends")]
    assert (codes, cluster.requeued()) == ([0, 0, 0], ["requeue 4711"] * 2)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_slurms_signal_is_forwarded_to_the_step_and_the_script_waits_for_it(
    cluster: Cluster, number: signal.Signals
) -> None:
    process = cluster.start(STEP="waits")
    cluster.wait_for_step(process)
    process.send_signal(number)
    assert process.wait(DEADLINE_SECONDS) == 0, cluster.log.read_text()
    assert cluster.requeued() == ["requeue 4711"]


def test_a_job_that_a_signal_ends_unsaved_keeps_its_own_exit_code(cluster: Cluster) -> None:
    process = cluster.start(STEP="stubborn")
    cluster.wait_for_step(process)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(DEADLINE_SECONDS) == 9, "not 138, the code of an interrupted wait"
    assert cluster.requeued() == []
    assert "asked to leave, but ended with 9 before it saved" in cluster.log.read_text()


def test_a_job_that_cannot_be_queued_again_ends_with_1_and_a_message(cluster: Cluster) -> None:
    code, said = cluster.run(STEP="saves", REQUEUE_CODE="1")
    assert code == 1
    assert "could not be queued again" in said


def test_wrong_usage_is_found_before_a_step_is_started(cluster: Cluster) -> None:
    code, said = cluster.run("--checkpoint.intervall=3", STEP="ends")
    assert code == 2
    assert "checkpoint.interval" in said
    assert not (cluster.record / "srun").exists()


def test_outside_of_slurm_it_ends_with_3_and_the_command_to_use(cluster: Cluster) -> None:
    code, said = cluster.run(SLURM_JOB_ID="")
    assert code == 3
    assert "sbatch scripts/slurm_train.sh" in said


def test_a_clone_without_an_environment_ends_with_3_and_the_command_that_the_page_has(cluster: Cluster) -> None:
    code, said = cluster.run(STEP="ends", PYTHON=str(cluster.folder / "no python"))
    assert code == 3
    command = "./run_train.sh --help"
    assert command in said
    assert command in (ROOT / "docs" / "clusters.md").read_text()


def test_each_node_runs_one_torchrun_with_its_rendezvous_on_the_first_node(cluster: Cluster) -> None:
    cluster.run("--training.steps=3", STEP="ends", SLURM_RESTART_COUNT="2")
    arguments = cluster.srun()
    assert "--ntasks-per-node=1" in arguments[: arguments.index(sys.executable)]
    assert arguments[arguments.index(sys.executable) :][:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert {"--nnodes=2", "--nproc-per-node=4", "--rdzv-backend=c10d", "--rdzv-endpoint=node7:24711"} < set(arguments)
    assert "--rdzv-id=4711.2" in arguments, "each start has a rendezvous of its own"
    assert arguments[arguments.index(str(ROOT / "train.py")) :][-2:] == [
        f"--job.dump_folder={cluster.dump_folder}",
        "--training.steps=3",
    ]


def test_with_a_spare_node_all_nodes_meet_in_a_store_outside_of_torchrun_and_one_fewer_trains(cluster: Cluster) -> None:
    code, said = cluster.run(STEP="ends", SPARE_NODES="1", SLURM_JOB_ID=str(free_port() - 20000))
    assert code == 0, said
    arguments = cluster.srun()
    assert {"--no-kill", "--wait=0"} < set(arguments[: arguments.index("bash")])
    assert {"--nnodes=1", "--max-restarts=1", "--rdzv-conf=is_host=0"} < set(arguments)


@pytest.mark.parametrize(
    ("code", "lives", "queued"), [(5, False, ["requeue 4711"]), (5, True, []), (0, False, []), (0, True, [])]
)
def test_a_node_queues_the_job_again_only_if_it_failed_and_the_script_is_lost_with_its_node(
    cluster: Cluster, code: int, lives: bool, queued: Sequence[str]
) -> None:
    (on_node,) = re.findall(r"^ON_NODE='(.*?)'$", SCRIPT.read_text(), re.MULTILINE | re.DOTALL)
    variables = {**os.environ, "PATH": f"{cluster.folder / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "4711"}
    variables["RECORD"] = str(cluster.record)
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = str(store.getsockname()[1])
        if not lives:
            store.close()
        command = ["bash", "-c", on_node, "torchrun", "127.0.0.1", port, "bash", "-c", f"exit {code}"]
        assert subprocess.run(command, env=variables, check=False).returncode == code
    assert cluster.requeued() == queued


@pytest.mark.parametrize("spare", ["2", "one"])
def test_a_number_of_spare_nodes_that_leaves_none_is_refused(cluster: Cluster, spare: str) -> None:
    code, said = cluster.run(STEP="ends", SPARE_NODES=spare)
    assert code == 2
    assert "SPARE_NODES" in said
    assert not (cluster.record / "srun").exists()


def test_torchrun_forwards_the_signal(cluster: Cluster) -> None:
    cluster.run(STEP="ends")
    forwarded = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    assert {"--checkpoint.preemption_grace_seconds=240", forwarded} < set(cluster.srun())


@pytest.mark.skipif(
    "--shutdown-timeout" not in TORCHRUN.read_text(), reason="torchrun has --shutdown-timeout since torch 2.12"
)
def test_torchrun_waits_longer_than_the_ranks(cluster: Cluster) -> None:
    cluster.run(STEP="ends")
    assert "--shutdown-timeout=270" in cluster.srun()
    cluster.run("--checkpoint.preemption_grace_seconds=900", STEP="ends")
    assert "--shutdown-timeout=930" in cluster.srun()


def test_slurm_signals_earlier_than_torchrun_kills() -> None:
    text = SCRIPT.read_text()
    directives = re.findall(r"^#SBATCH (\S+)$", text, re.MULTILINE)
    assert {"--requeue", "--open-mode=append"} < set(directives)
    (lead,) = [int(line.partition("--signal=B:USR1@")[2]) for line in directives if line.startswith("--signal=B:USR1@")]
    grace, margin = (int(re.findall(rf"^{name}_SECONDS=(\d+)", text, re.MULTILINE)[0]) for name in ("GRACE", "MARGIN"))
    assert lead >= grace + margin


@pytest.mark.slow
def test_a_real_job_saves_on_a_signal_is_queued_again_and_finishes(cluster: Cluster) -> None:
    cluster.command("scontrol", SCONTROL.replace("'node%s\\n' 7 8", "'localhost\\n'"))
    cluster.command("srun", SRUN_HERE)
    tiny = [*TINY, "--checkpoint.interval=1000"]
    first = cluster.start(*tiny, "--training.steps=4000", NGPU="2")
    (job,) = cluster.jobs
    job.wait_until(lambda job: 3 in job.losses())
    first.send_signal(signal.SIGUSR1)
    assert job.wait() == [0], job.log
    assert cluster.requeued() == ["requeue 4711"]
    (preempted,) = job.events("preempted")
    assert preempted["signal"] == signal.SIGUSR1
    step = preempted["step"]
    assert job.checkpoints == [f"step-{step}"]
    code, said = cluster.run(*tiny, f"--training.steps={step + 2}", NGPU="2", SLURM_RESTART_COUNT="1", **FORKED_RANKS)
    assert (code, cluster.requeued()) == (0, ["requeue 4711"]), said
    assert f"Training starts at step {step + 1}," in said
    assert [event["step"] for event in job.events("finished")] == [step + 2]


@pytest.mark.slow
def test_the_spare_node_takes_the_place_of_a_lost_one(cluster: Cluster) -> None:
    cluster.command("scontrol", SCONTROL.replace("'node%s\\n' 7 8", "'localhost\\n%.0s' 1 2 3"))
    cluster.command("srun", SRUN_NODES)
    tiny = [*TINY, "--checkpoint.interval=5", "--training.global_batch_size=4"]
    process = cluster.start(
        *[*tiny, "--training.steps=4000", "--checkpoint.keep_latest_k=2"],
        **{**FORKED_RANKS, "NGPU": "1", "SPARE_NODES": "1", "SLURM_JOB_ID": str(free_port() - 20000)},
    )
    (job,) = cluster.jobs
    job.wait_until(lambda job: 12 in job.losses())
    before = training_nodes(cluster)
    assert len(before) == 2, "the third one waits"
    for pid in [*children(before[0]), before[0]]:
        send(pid, signal.SIGKILL)
    job.wait_until(lambda job: job.events("loaded"))
    loaded = job.events("loaded")[0]["step"]
    job.wait_until(lambda job: loaded + 5 in job.losses() and len(training_nodes(cluster)) == 2)
    assert before[0] not in training_nodes(cluster)
    process.send_signal(signal.SIGUSR1)
    assert job.wait() == [0], job.log
    assert cluster.requeued() != []
    assert job.events("preempted")[0]["given_up_steps"] == 0


def training_nodes(cluster: Cluster) -> list[int]:
    """Return the process ids of the shells whose torchrun has workers."""
    nodes = map(int, (cluster.record / "nodes").read_text().split())
    return [node for node in nodes if any(map(is_training, children(node)))]


def is_training(pid: int) -> bool:
    """Return whether `pid` is a torchrun that has started its workers."""
    return "torch.distributed.run" in command_line(pid) and bool(own_children(pid))
