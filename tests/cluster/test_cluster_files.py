"""The YAML files for clusters: Ray's own validator where it has one, and what they must agree on with the rest."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.options import check_request, parse_request

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER_FILES = ("ray-cluster-aws.yaml", "ray-cluster-onprem.yaml")
KUBERAY_FILES = ("kuberay-rayjob.yaml", "kuberay-raycronjob.yaml")

# Of an idle worker, and of Ray's own processes on a machine; measured 150 MB and 600 MB.
IDLE_WORKER_BYTES = 256 << 20
RAY_BYTES = 1 << 30


def load(name: str) -> dict[str, Any]:
    found = yaml.safe_load((ROOT / "cluster" / name).read_text())
    assert isinstance(found, dict)
    return found


def job_of(found: dict[str, Any]) -> dict[str, Any]:
    """Return the specification of the job, which a RayCronJob holds as a template."""
    spec: dict[str, Any] = found["spec"]
    return spec["jobTemplate"] if found["kind"] == "RayCronJob" else spec


def pods(job: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Give (group, pod, container) of the head and of every group of workers."""
    cluster = job["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        yield group, pod, container


def quantity(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", text).groups()  # type: ignore[union-attr]
    return int(number) << {"Mi": 20, "Gi": 30}[unit]


def pinned(package: str) -> str:
    return re.search(rf"^{re.escape(package)}==(\S+)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)[1]  # type: ignore[index]


@pytest.mark.parametrize("name", LAUNCHER_FILES)
def test_ray_accepts_the_files_of_its_cluster_launcher(name: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(load(name))
    validate_config(prepared)
    # Where all machines are alike, their only kind is the head's too, and does not count it.
    kinds = prepared["available_node_types"]
    workers = [kinds[kind] for kind in kinds if kind != prepared["head_node_type"] or len(kinds) == 1]
    assert sum(each["min_workers"] for each in workers) == prepared["max_workers"] > 0, "all machines, from the start"
    for local in prepared["file_mounts"].values():
        assert local.startswith("~") or (ROOT / local).is_file()
    heads, others = prepared["head_start_ray_commands"], prepared["worker_start_ray_commands"]
    assert "--dashboard-host=127.0.0.1" in heads[-1], "whoever reaches the job server may run anything"
    assert "--address=$RAY_HEAD_IP:6379" in others[-1]
    assert "RAY_AUTH_MODE=token" in "".join(prepared["setup_commands"])


def test_no_launcher_file_runs_tasks_on_its_head() -> None:
    from ray.autoscaler._private.util import prepare_config

    aws, own = (prepare_config(load(name)) for name in LAUNCHER_FILES)
    assert aws["available_node_types"][aws["head_node_type"]]["resources"] == {"CPU": 0}
    assert "--num-cpus=0" in own["head_start_ray_commands"][-1]


@pytest.mark.parametrize("name", KUBERAY_FILES)
def test_kuberay_files_are_whole_and_their_pods_alike(name: str) -> None:
    found = load(name)
    assert found["apiVersion"] == "ray.io/v1"
    job = job_of(found)
    assert job["submissionMode"] == "K8sJobMode"
    assert job["submitterConfig"]["backoffLimit"] > 0
    assert job["shutdownAfterJobFinishes"] is True
    assert job["ttlSecondsAfterFinished"] > 0
    assert job["rayClusterSpec"]["rayVersion"] == pinned("ray[default]")
    assert job["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    sources = {
        str((container["image"], container["envFrom"], container.get("volumeMounts"), pod.get("volumes")))
        for _, pod, container in pods(job)
    }
    assert len(sources) == 1, "every machine reads and writes the same places under the same names"
    for group, pod, container in pods(job):
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert {each["name"] for each in container.get("volumeMounts", ())} == {
            each["name"] for each in pod.get("volumes", ())
        }
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    for group in job["rayClusterSpec"]["workerGroupSpecs"]:
        assert group["minReplicas"] == group["replicas"] == group["maxReplicas"], "no autoscaling"
    assert job["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


@pytest.mark.parametrize("name", KUBERAY_FILES)
def test_kuberay_entrypoints_are_command_lines_of_ours_and_their_memory_fits(name: str) -> None:
    job = job_of(load(name))
    python, module, *words = shlex.split(job["entrypoint"])
    assert (python, module, words[0]) == ("python", "-m", "pipeline.reshard")
    request = parse_request(words[1:])
    check_request(request)
    assert request.json
    for group, pod, container in pods(job):
        for url in (request.source, request.target):
            mounts = [each["mountPath"] for each in container.get("volumeMounts", ())]
            assert url.startswith("s3://") or any(url.startswith(f"{mount}/") for mount in mounts)
        if "groupName" not in group:
            continue
        assert pod.keys() <= {"containers", "volumes", "nodeSelector", "tolerations"}
        limits = container["resources"]["limits"]
        needed = int(limits["cpu"]) * (request.memory_bytes + IDLE_WORKER_BYTES)
        needed += int(group["rayStartParams"]["object-store-memory"]) + RAY_BYTES
        assert needed <= quantity(limits["memory"])


@pytest.mark.parametrize("name", KUBERAY_FILES)
def test_kuberay_images_are_the_dockerfile_at_this_version(name: str) -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    tag = re.search(r"docker build -t (\S+) ", dockerfile)[1]  # type: ignore[index]
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]  # type: ignore[index]
    for _, _, container in pods(job_of(load(name))):
        assert container["image"].rpartition("/")[2] == f"{tag}:{version}"
    # The entrypoint runs in no folder of its own: the image finds the code from everywhere.
    folder = re.search(r"^WORKDIR (\S+)$", dockerfile, re.MULTILINE)[1]  # type: ignore[index]
    assert f"PYTHONPATH={folder} " in dockerfile


def test_a_nightly_run_leaves_others_to_the_lease_and_is_not_tried_again() -> None:
    found = load("kuberay-raycronjob.yaml")
    assert len(found["spec"]["schedule"].split()) == 5
    assert found["spec"].keys() == {"schedule", "jobTemplate"}, "KubeRay knows no concurrencyPolicy"
    assert job_of(found)["backoffLimit"] == 0
    assert parse_request(shlex.split(job_of(found)["entrypoint"])[3:]).overwrite
    assert job_of(load("kuberay-rayjob.yaml"))["backoffLimit"] > 0


def test_no_file_holds_a_secret() -> None:
    for name in (*KUBERAY_FILES, *LAUNCHER_FILES):
        for line in (ROOT / "cluster" / name).read_text().splitlines():
            assert not re.search(
                r"(SECRET_ACCESS_KEY|ACCESS_KEY_ID|AUTH_TOKEN)\s*[:=]", line.partition("#")[0], re.IGNORECASE
            ), line
