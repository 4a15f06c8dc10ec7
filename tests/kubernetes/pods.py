"""Pods of the manifests on this machine: a container is a PID namespace on a host of tests/hosts.py.

What a kubelet and the controllers of Job and JobSet do with it, and nothing more: start the command with its
environment, send SIGTERM to process 1 and SIGKILL after the grace period, and apply the policies to exit codes.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.hosts import Host
from tests.processes import children, command_line, send

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples" / "kubernetes"
_OF_VENV = {
    ".venv/bin/python": [sys.executable],
    ".venv/bin/torchtitan-lite": [sys.executable, "-m", "torchtitan_lite.cli"],
}
NEW_PROCESSES = ("unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc")
_NAMESPACE = 'mount --bind "$0" /proc/sys/kernel/random/boot_id; exec "$@"'
"""The host's boot id is below the new /proc."""
_LABEL = re.compile(r"metadata\.labels\['jobset\.sigs\.k8s\.io/jobset-name'\]")


def manifests(name: str) -> list[dict[str, Any]]:
    """Return the documents of a file of the examples."""
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def jobs_of(jobset: Mapping[str, Any]) -> dict[str, Any]:
    """Return the specs of the jobs of `jobset`, the spec of a JobSet, by name."""
    return {job["name"]: job["template"]["spec"] for job in jobset["replicatedJobs"]}


def pod_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec of the pods of a job."""
    found: dict[str, Any] = job["template"]["spec"]
    return found


def environment_of(container: Mapping[str, Any], jobset: str) -> dict[str, str]:
    """Return the variables of `container` in the JobSet with the name `jobset`."""
    known: dict[str, str] = {}
    for each in container.get("env", ()):
        if "value" in each:
            known[each["name"]] = re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], each["value"])
        else:
            assert _LABEL.fullmatch(each["valueFrom"]["fieldRef"]["fieldPath"])
            known[each["name"]] = jobset
    return known


def command_of(container: Mapping[str, Any]) -> list[str]:
    """Return the command of `container` with its arguments; the image's .venv is the environment of the tests."""
    first, *others = container["command"]
    found = _OF_VENV.get(first, [first])
    return [*found, *others, *container.get("args", ())]


@dataclass(frozen=True)
class Pod:
    """A pod of one container that runs on `host`."""

    spec: Mapping[str, Any]
    process: subprocess.Popen[str]

    @classmethod
    def start(
        cls,
        spec: Mapping[str, Any],
        host: Host,
        *,
        jobset: str,
        log: Path,
        mounts: Mapping[Path, Path],
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Pod:
        """Start the pod with further `arguments` and variables; its volumes are in `mounts`."""
        (container,) = spec["containers"]
        inside = [*NEW_PROCESSES, "sh", "-ec", _NAMESPACE, f"{host.folder}/boot_id", *command_of(container)]
        variables = {"PYTHON": sys.executable, **environment_of(container, jobset), **(environment or {})}
        return cls(spec, host.start([*inside, *arguments], log, variables, mounts))

    def terminate(self) -> int:
        """Do what a kubelet does to a pod that is deleted or evicted; return the exit code."""
        for process in children(self.process.pid)[:1]:
            send(process, signal.SIGTERM)
        try:
            return self.process.wait(self.spec["terminationGracePeriodSeconds"])
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class SharedPod:
    """A pod on `host` whose containers have one PID namespace and the volumes of `mounts`.

    Its volume at /tmp is the folder `tmp`, by TMPDIR: a mount there would hide a clone or an environment in /tmp.
    """

    def __init__(self, host: Host, log: Path, mounts: Mapping[Path, Path], tmp: Path) -> None:
        self._host, self._log, self._mounts, self._tmp = host, log, mounts, tmp
        # What Kubernetes calls the pause container.
        first = host.start([*NEW_PROCESSES, "sleep", "infinity"], log)
        while not (found := [pid for pid in children(first.pid) if command_line(pid).startswith("sleep")]):
            assert first.poll() is None
        (self._first,) = found

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start `command` in a container of its own."""
        place = ["nsenter", f"--pid=/proc/{self._first}/ns/pid", "unshare", "--mount"]
        inside = ["sh", "-ec", 'mount -t proc proc /proc; exec "$@"', "sh", *command]
        folders = {"XDG_RUNTIME_DIR": "", "TMPDIR": str(self._tmp), "PYTHON": sys.executable, "NGPU": "1"}
        return self._host.start([*place, *inside], self._log, folders, self._mounts)


def kill(container: subprocess.Popen[str]) -> None:
    """Kill all processes of a container at once, as the kernel does when its memory is full."""
    for pid in [*children(container.pid), container.pid]:
        send(pid, signal.SIGKILL)
    container.wait()


def end_of(jobset: Mapping[str, Any], job: str, codes: Sequence[int], restarts: int) -> str:
    """Return what JobSet does once pods of `job` have ended with `codes`: "completes", "fails" or "restarts"."""
    spec = jobs_of(jobset)[job]
    if not any(codes):
        return "completes" if job in jobset["successPolicy"]["targetReplicatedJobs"] else "continues"
    reason = _failure_of(spec, [code for code in codes if code])
    if not reason:
        return "continues"
    for rule in jobset["failurePolicy"]["rules"]:
        if reason in rule["onJobFailureReasons"]:
            assert rule["action"] == "FailJobSet"
            return "fails"
    return "restarts" if restarts < jobset["failurePolicy"]["maxRestarts"] else "fails"


def _failure_of(job: Mapping[str, Any], codes: Sequence[int]) -> str:
    """Return the reason for which a job has failed; empty if it starts other pods in place of those."""
    assert pod_of(job)["restartPolicy"] == "Never", "else a job may have no podFailurePolicy"
    counted = 0
    for code in codes:
        for rule in job["podFailurePolicy"]["rules"]:
            on = rule["onExitCodes"]
            assert on["containerName"] in {container["name"] for container in pod_of(job)["containers"]}
            if (code in on["values"]) == (on["operator"] == "In"):
                assert rule["action"] == "FailJob"
                return "PodFailurePolicy"
        counted += 1
    return "BackoffLimitExceeded" if counted > job["backoffLimit"] else ""
