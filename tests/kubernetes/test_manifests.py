"""The manifests for Kubernetes fit the published schemas, and their pods run, end and start again on this machine."""

from __future__ import annotations

import copy
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import pytest
import yaml

from tests.e2e.jobs import DEADLINE_SECONDS, TINY, Job
from tests.forked import FORKED_RANKS
from tests.hosts import Hosts, network
from tests.kubernetes.pods import (
    EXAMPLES,
    Pod,
    SharedPod,
    command_of,
    end_of,
    environment_of,
    jobs_of,
    kill,
    manifests,
    pod_of,
)
from torchtitan_lite.config.manager import parse_config

_TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
_KNOWN = {"type", "enum", "required", "properties", "additionalProperties", "items", "pattern"}
_EITHER = "x-kubernetes-int-or-string"


def findings(manifest: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with `manifest`, a sentence each; empty if nothing is.

    The schemas are cut to the fields that the manifests use: a further one needs that field from the source which the
    file names.
    """
    return list(_findings(manifest, _schema(manifest["kind"]), manifest["kind"]))


@cache
def _schema(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "schemas" / f"{kind}.yaml").read_text())
    return found


def _findings(value: Any, schema: Mapping[str, Any], place: str) -> Iterator[str]:
    assert schema.keys() <= {*_KNOWN, _EITHER}, f"{place}: the schema has a rule that is not checked"
    wanted = (int, str) if schema.get(_EITHER) else _TYPES[schema["type"]]
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        yield f"{place}: expected {schema.get('type')}, found {value!r}"
        return
    if value not in schema.get("enum", [value]):
        yield f"{place}: expected one of {schema['enum']}, found {value!r}"
    if "pattern" in schema and not re.search(schema["pattern"], str(value)):
        yield f"{place}: {value!r} does not match {schema['pattern']}"
    if isinstance(value, dict):
        yield from (f"{place}.{name} is missing" for name in schema.get("required", ()) if name not in value)
        for name, each in value.items():
            inner = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            if inner is None:
                yield f"{place}.{name}: an unknown field"
            else:
                yield from _findings(each, inner, f"{place}.{name}")
    if isinstance(value, list):
        for number, each in enumerate(value):
            yield from _findings(each, schema["items"], f"{place}[{number}]")


ROOT = Path(__file__).parents[2]
FILES = sorted(path.name for path in EXAMPLES.glob("*.yaml"))


def jobset() -> dict[str, Any]:
    """Return the spec of the JobSet."""
    (found,) = manifests("jobset.yaml")
    spec: dict[str, Any] = found["spec"]
    return spec


def jobset_of_trainjob() -> dict[str, Any]:
    """Return the spec of the JobSet that Kubeflow Trainer makes of the TrainJob and its runtime."""
    (runtime,), (trainjob,) = manifests("runtime.yaml"), manifests("trainjob.yaml")
    assert trainjob["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    trainer, spec = trainjob["spec"]["trainer"], copy.deepcopy(runtime["spec"]["template"]["spec"])
    for job in spec["replicatedJobs"]:
        if job["template"].get("metadata", {}).get("labels") == {
            "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
        }:
            job["template"].pop("metadata")
            job["template"]["spec"] |= dict.fromkeys(("parallelism", "completions"), trainer["numNodes"])
            (container,) = [each for each in pod_of(job["template"]["spec"])["containers"] if each["name"] == "node"]
            container |= {"image": trainer["image"], "args": trainer["args"], "resources": trainer["resourcesPerNode"]}
            given = {each["name"]: each for each in trainer["env"]}
            container["env"] = [given.pop(each["name"], each) for each in container["env"]] + [*given.values()]
    return spec  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", FILES)
def test_a_manifest_has_only_fields_of_the_published_schema(name: str) -> None:
    for manifest in manifests(name):
        assert not findings(manifest)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("spec", "failurePolicy", "maxRestart"), 3),
        (("spec", "failurePolicy", "maxRestarts"), "3"),
        (("spec", "replicatedJobs", 1, "template", "spec", "backofflimit"), 0),
        (("spec", "replicatedJobs", 1, "dependsOn", 0, "status"), "ready"),
        (("spec", "replicatedJobs", 0, "name"), None),
    ],
)
def test_a_misspelt_field_a_wrong_value_and_a_missing_field_are_found(place: Sequence[Any], value: Any) -> None:
    (manifest,) = manifests("jobset.yaml")
    inner: Any = manifest
    for each in place[:-1]:
        inner = inner[each]
    if value is None:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    assert len(findings(manifest)) == 1


@pytest.mark.parametrize("spec", [jobset(), jobset_of_trainjob()], ids=["JobSet", "TrainJob"])
def test_the_ranks_torchrun_and_the_pod_wait_for_one_another_in_this_order(spec: Mapping[str, Any]) -> None:
    pod = pod_of(jobs_of(spec)["node"])
    (container,) = pod["containers"]
    config = parse_config(container["args"])
    torchrun = int(environment_of(container, "train")["SHUTDOWN_TIMEOUT"])
    assert config.checkpoint.preemption_grace_seconds < torchrun < pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("spec", [jobset(), jobset_of_trainjob()], ids=["JobSet", "TrainJob"])
def test_the_number_of_nodes_is_the_number_of_pods(spec: Mapping[str, Any]) -> None:
    job = jobs_of(spec)["node"]
    (container,) = pod_of(job)["containers"]
    assert {environment_of(container, "train")["NNODES"]} == {str(job["parallelism"]), str(job["completions"])}


def test_a_trainjob_runs_the_pods_of_the_jobset_with_its_own_arguments() -> None:
    own, theirs = jobset(), jobset_of_trainjob()
    (container,) = pod_of(jobs_of(theirs)["node"])["containers"]
    args = container["args"]
    container["env"] = [each for each in container["env"] if each["name"] != "AWS_REGION"]
    container["args"] = [each for each in args if not each.startswith("--checkpoint.folder=s3://")]
    assert theirs == own
    assert args != container["args"]


def test_the_folder_of_the_run_is_in_the_claim() -> None:
    pod = pod_of(jobs_of(jobset())["node"])
    (container,) = pod["containers"]
    (volume,) = [each["name"] for each in pod["volumes"] if "persistentVolumeClaim" in each]
    (mounted,) = [each["mountPath"] for each in container["volumeMounts"] if each["name"] == volume]
    assert Path(parse_config(container["args"]).job.dump_folder).is_relative_to(mounted)
    (claim,) = manifests("claim.yaml")
    assert {"name": volume, "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}} in pod["volumes"]


@pytest.mark.parametrize(
    ("codes", "end"),
    [
        ([0, 0], "completes"),
        ([1, 1], "restarts"),
        ([137], "restarts"),
        ([143], "restarts"),
        ([2, 2], "fails"),
        ([3], "fails"),
    ],
)
def test_wrong_usage_is_not_started_again_all_else_is(codes: Sequence[int], end: str) -> None:
    for spec in (jobset(), jobset_of_trainjob()):
        assert end_of(spec, "node", codes, restarts=0) == end


@pytest.mark.slow
def test_a_container_with_a_wrong_configuration_ends_with_a_code_that_is_not_started_again() -> None:
    (container,) = pod_of(jobs_of(jobset())["node"])["containers"]
    variables = {**os.environ, "PYTHON": sys.executable, **environment_of(container, "train")}
    command = [*container["command"], *container["args"], "--checkpoint.intervall=5"]
    ended = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "checkpoint.interval" in ended.stderr
    assert end_of(jobset(), "node", [ended.returncode], restarts=0) == "fails"


@pytest.mark.slow
def test_a_container_that_is_killed_is_started_again_in_its_pod_and_continues_from_memory(tmp_path: Path) -> None:
    (manifest,) = manifests("jobset_memory.yaml")
    pod = pod_of(jobs_of(manifest["spec"])["node"])
    assert (pod["shareProcessNamespace"], pod["restartPolicy"]) == (True, "OnFailure")
    (sidecar,), (container,) = pod["initContainers"], pod["containers"]
    (tmp_path / "mnt" / "runs").mkdir(parents=True)
    run, log = tmp_path / "mnt" / "runs" / "train", tmp_path / "log"
    command = [*command_of(container), *TINY, "--checkpoint.interval=1000"]
    # Not the folder of the test: the path of a socket holds 107 letters.
    with network() as hosts, TemporaryDirectory(prefix="pod-", dir="/tmp") as tmp:
        shared = SharedPod(hosts.add(), log, {Path("/mnt"): tmp_path / "mnt"}, Path(tmp))
        keeper = shared.start(*command_of(sidecar))
        job = Job([keeper], run, log)
        probe = [word.replace("/tmp/", f"{tmp}/") for word in sidecar["startupProbe"]["exec"]["command"]]
        job.wait_until(lambda _: not shared.start(*probe).wait())
        first = shared.start(*command, "--training.steps=4000")
        job = Job([first], run, log)
        job.wait_until(lambda job: 20 in job.losses())
        kill(first)
        reached = max(job.losses())
        assert not job.checkpoints or not any(name.startswith("step-") for name in job.checkpoints)

        again = shared.start(*command, f"--training.steps={reached + 5}")
        job = Job([again], run, log)
        assert job.wait() == [0], job.log
        (loaded,) = job.events("loaded")
        assert loaded["origin"] == "memory"
        assert reached - loaded["step"] <= 10
        assert keeper.wait(DEADLINE_SECONDS) == 0, "the run has finished, so nothing is kept"


class Cluster:
    """Two pods of the JobSet and that of its store, each on a host of its own, which a restart replaces."""

    name = "train"

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._hosts, self._folder, self.spec = hosts, folder, jobset()
        self._mounts = {Path("/mnt"): folder / "mnt", Path("/etc/hosts"): folder / "hosts"}
        (folder / "mnt" / "runs").mkdir(parents=True)
        self.run = folder / "mnt" / "runs" / "train"
        self.pods: list[Pod] = []

    def start(self, *arguments: str, environment: Mapping[str, str] = MappingProxyType({})) -> Job:
        """Start all pods; the nodes run with further `arguments` and variables."""
        while self._hosts.hosts:
            self._hosts.remove(self._hosts.hosts[0])
        jobs, log = jobs_of(self.spec), self._folder / "log"
        hosts = [self._hosts.add() for _ in range(1 + jobs["node"]["parallelism"])]
        lines = [f"{host.address} {host.name}" for host in hosts]
        # The names that JobSet's headless service gives to the pods.
        lines[0] += f" {self.name}-store-0-0.{self.name}"
        (self._folder / "hosts").write_text("127.0.0.1 localhost\n" + "\n".join(lines) + "\n")
        common: Any = {"jobset": self.name, "log": log, "mounts": self._mounts}
        log.write_text("")
        self.store = Pod.start(pod_of(jobs["store"]), hosts[0], **common)
        job = Job([self.store.process], self.run, log)
        job.wait_until(lambda job: "Nodes meet" in job.log)
        self.pods = [
            Pod.start(
                pod_of(jobs["node"]), host, arguments=arguments, environment={"NGPU": "1", **environment}, **common
            )
            for host in hosts[1:]
        ]
        return Job([pod.process for pod in self.pods], self.run, log)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with network() as hosts:
        yield Cluster(hosts, tmp_path)


@pytest.mark.slow
def test_a_pod_that_is_evicted_saves_with_all_others_and_the_next_pods_continue(cluster: Cluster) -> None:
    small = [*TINY, "--checkpoint.interval=1000"]
    job = cluster.start(*small, "--training.steps=4000")
    job.wait_until(lambda job: 5 in job.losses())
    codes = [cluster.pods[0].terminate(), cluster.pods[1].process.wait(DEADLINE_SECONDS)]
    assert codes == [1, 1], job.log
    assert end_of(cluster.spec, "node", codes, restarts=0) == "restarts"
    (preempted,) = job.events("preempted")
    assert (preempted["signal"], preempted["given_up_steps"]) == (signal.SIGTERM, 0)
    step = preempted["step"]
    assert f"step-{step}" in job.checkpoints
    assert cluster.store.process.poll() is None

    job = cluster.start(*small, f"--training.steps={step + 2}", environment=FORKED_RANKS)
    codes = job.wait()
    assert end_of(cluster.spec, "node", codes, restarts=1) == "completes", job.log
    assert f"Training starts at step {step + 1}," in job.log
    assert sorted(job.losses()) == list(range(1, step + 3)), "each step once"
