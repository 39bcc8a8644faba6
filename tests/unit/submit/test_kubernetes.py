"""`fullshard submit --on kubernetes`: its objects fit the published schemas, and say what the options ask for."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.submit.manifests.names import LONGEST, job_name, label_value
from tests.small import recipe
from tests.unit.submit.published import validate

SCHEMAS = {"TrainJob": "trainjob", "TrainingRuntime": "trainingruntime", "JobSet": "jobset"}
FULL = [
    *("--namespace", "team", "--volume", "runs:/workspace", "--volume", "data:/data", "--secret", "s3-keys"),
    *("--secret", "hub", "--env", "HF_HOME=/data/hf", "--env", "LEVEL=a=b", "--cpus", "32", "--memory", "512Gi"),
    *("--shared-memory", "64Gi", "--node-selector", "gpu=h100", "--service-account", "trainer"),
    *("--pull-secret", "registry", "--queue", "research", "--job-restarts", "7", "--grace-s", "900"),
]


def submit(folder: Path, *words: str, environ: dict[str, str] | None = None, **sections: Any) -> tuple[int, str, str]:
    """The exit code of a submission, what it printed, and what it said beside that."""
    usual = {"name": "My_Run.v2", "output": "runs", "topology": {"device": "auto"}, "batch": {"global": None}}
    values = recipe(folder, **usual | sections)
    (folder / "recipe.yaml").write_text(json.dumps(values))
    command = ["submit", str(folder / "recipe.yaml"), "--on", "kubernetes", *words]
    done = CliRunner().invoke(app, command, env=environ)
    return done.exit_code, done.stdout, " ".join(done.stderr.split())


def objects(folder: Path, *words: str, **sections: Any) -> dict[str, Any]:
    """The objects of a job by kind, each fitting its schema."""
    code, text, errors = submit(folder, "--image", "repo/train:1", "--dry-run", *words, **sections)
    assert code == 0, errors
    found = {each["kind"]: each for each in yaml.safe_load_all(text)}
    for kind, values in found.items():
        if kind in SCHEMAS:
            validate(values, SCHEMAS[kind])
    return found


def job_of(found: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The JobSet's specification, and that of its job."""
    spec = found["JobSet"]["spec"] if "JobSet" in found else found["TrainingRuntime"]["spec"]["template"]["spec"]
    (job,) = spec["replicatedJobs"]
    return spec, job["template"]["spec"]


@pytest.mark.parametrize("api", ["trainjob", "jobset"])
@pytest.mark.parametrize("options", [["--volume", "runs:/workspace"], FULL], ids=["short", "full"])
def test_objects_fit_the_published_schemas(tmp_path: Path, api: str, options: list[str]) -> None:
    found = objects(tmp_path, "--api", api, "--nodes", "2", "--devices", "8", *options)
    assert list(found) == ["ConfigMap", "TrainingRuntime", "TrainJob"] if api == "trainjob" else ["ConfigMap", "JobSet"]
    names = {each["metadata"]["name"] for each in found.values()}
    assert names == {"my-run-v2-1", "my-run-v2-1-recipe"}
    assert {each["metadata"].get("namespace") for each in found.values()} == {"team" if options is FULL else None}


def test_the_schemas_refuse_what_a_cluster_would() -> None:
    good = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "a"}, "spec": {}}
    validate(good, "jobset")
    for spec in ({"failurePolicy": {"maxRestart": 3}}, {"replicatedJobs": [{"replicas": 1}]}, {"suspend": "no"}):
        with pytest.raises(jsonschema.ValidationError):
            validate({**good, "spec": spec}, "jobset")


@pytest.mark.parametrize("api", ["trainjob", "jobset"])
def test_exit_codes_decide_what_becomes_of_a_pod(tmp_path: Path, api: str) -> None:
    spec, job = job_of(objects(tmp_path, "--api", api, "--devices", "8", "--volume", "runs:/workspace"))
    rules = [(rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in job["podFailurePolicy"]["rules"]]
    assert rules == [("FailJob", [2, 3]), ("Ignore", [75]), ("Ignore", None)]
    assert job["podFailurePolicy"]["rules"][2]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    # Other failures end the job, and the JobSet starts it again; what the pods' policy ended stays ended.
    assert (job["backoffLimit"], spec["failurePolicy"]["maxRestarts"]) == (0, 3)
    (final,) = spec["failurePolicy"]["rules"]
    assert (final["action"], final["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # podFailurePolicy needs it
    assert job["completionMode"] == "Indexed"


@pytest.mark.parametrize("api", ["trainjob", "jobset"])
def test_every_option_arrives(tmp_path: Path, api: str) -> None:
    found = objects(tmp_path, "--api", api, "--nodes", "2", "--devices", "8", *FULL)
    spec, job = job_of(found)
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    trainer = found["TrainJob"]["spec"]["trainer"] if api == "trainjob" else container
    resources = trainer["resourcesPerNode" if api == "trainjob" else "resources"]
    assert resources == dict.fromkeys(("requests", "limits"), {"cpu": "32", "memory": "512Gi", "nvidia.com/gpu": "8"})
    assert trainer["command"] == ["fullshard", "train", "/etc/fullshard/recipe.yaml", "topology.device=cuda"]
    assert trainer["image"] == "repo/train:1"
    assert trainer["env"][-2:] == [{"name": "HF_HOME", "value": "/data/hf"}, {"name": "LEVEL", "value": "a=b"}]
    assert container["envFrom"] == [{"secretRef": {"name": "s3-keys"}}, {"secretRef": {"name": "hub"}}]
    assert container["workingDir"] == "/workspace"
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {mounted[volume.pop("name")]: volume for volume in pod["volumes"]}
    assert volumes == {
        "/etc/fullshard": {"configMap": {"name": "my-run-v2-1-recipe"}},
        "/dev/shm": {"emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}},
        "/workspace": {"persistentVolumeClaim": {"claimName": "runs"}},
        "/data": {"persistentVolumeClaim": {"claimName": "data"}},
    }
    assert pod["terminationGracePeriodSeconds"] == 900
    assert (pod["serviceAccountName"], pod["nodeSelector"]) == ("trainer", {"gpu": "h100"})
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["failurePolicy"]["maxRestarts"] == 7
    # The queue holds the job; pods that named it would wait one by one.
    main = found["TrainJob" if api == "trainjob" else "JobSet"]
    assert main["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert "kueue.x-k8s.io/queue-name" not in job["template"]["metadata"]["labels"]


def test_a_trainjob_names_its_runtime_and_its_size(tmp_path: Path) -> None:
    found = objects(tmp_path, "--nodes", "3", "--devices", "4", "--volume", "runs:/workspace")
    spec = found["TrainJob"]["spec"]
    assert spec["runtimeRef"]["kind"] == "TrainingRuntime"
    assert spec["runtimeRef"]["name"] == found["TrainingRuntime"]["metadata"]["name"]
    assert (spec["trainer"]["numNodes"], spec["trainer"]["numProcPerNode"]) == (3, 4)
    # What the controller looks for in a runtime.
    (job,) = found["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    assert job["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert [each["name"] for each in job["template"]["spec"]["template"]["spec"]["containers"]] == ["node"]


def test_a_jobset_has_the_variables_that_train_reads(tmp_path: Path) -> None:
    from fullshard.dialects.engine_nodes import nodes_of

    found = objects(tmp_path, "--api", "jobset", "--nodes", "3", "--devices", "4", "--volume", "runs:/workspace")
    _, job = job_of(found)
    assert (job["parallelism"], job["completions"]) == (3, 3)
    (container,) = job["template"]["spec"]["containers"]
    rank = next(each for each in container["env"] if each["name"] == "PET_NODE_RANK")
    assert "job-completion-index" in rank["valueFrom"]["fieldRef"]["fieldPath"]
    environ = {each["name"]: each.get("value", "2") for each in container["env"]}
    nodes = nodes_of(environ)
    assert nodes is not None
    assert (nodes.nodes, nodes.node_rank, nodes.settings["topology.devices"]) == (3, 2, 4)
    assert nodes.master == "my-run-v2-1-node-0-0.my-run-v2-1:29500"


def test_the_recipe_in_the_config_map_trains_as_it_is(tmp_path: Path) -> None:
    from fullshard.recipes.read import read

    found = objects(tmp_path, "--nodes", "2", "--devices", "8", "--volume", "runs:/workspace", "optimizer.lr=0.5")
    path = tmp_path / "from-map.yaml"
    path.write_text(found["ConfigMap"]["data"]["recipe.yaml"])
    reading = read(path, "topology.device=cuda")
    assert (reading.recipe.optimizer.lr, reading.recipe.topology.nodes) == (0.5, 2)  # type: ignore[attr-defined]
    assert reading.recipe.topology.device == "cuda"


def test_cpu_jobs_ask_for_no_gpu(tmp_path: Path) -> None:
    found = objects(tmp_path, "--volume", "runs:/workspace", topology={"device": "cpu"})
    trainer = found["TrainJob"]["spec"]["trainer"]
    assert trainer["numProcPerNode"] == 1
    assert "resourcesPerNode" not in trainer
    assert trainer["command"] == ["fullshard", "train", "/etc/fullshard/recipe.yaml"]


def test_a_store_needs_no_volume(tmp_path: Path) -> None:
    found = objects(tmp_path, "--devices", "8", checkpoint={"store": "s3://bucket/runs"})
    _, job = job_of(found)
    assert [volume["name"] for volume in job["template"]["spec"]["volumes"]] == ["recipe", "shared-memory"]
    objects(tmp_path, "--devices", "8", output="s3://bucket/runs")


@pytest.mark.parametrize(
    ("words", "sections", "problem"),
    [
        (["--devices", "8"], {}, "output = runs would be inside the container, and is lost with the pod."),
        (
            ["--devices", "8", "--volume", "a:/data"],
            {"output": "/scratch/runs"},
            "output = /scratch/runs is on no volume, and is lost with the pod.",
        ),
        (["--volume", "a:/data"], {}, "--on kubernetes needs the number of GPUs of a node: --devices 8."),
        (["--volume", "a:/data", "--devices", "0,2"], {}, "names GPUs, but Kubernetes chooses them."),
        (["--volume", "a", "--devices", "1"], {}, "--volume a is not CLAIM:PATH."),
        (["--volume", "a:/b", "--devices", "1", "--env", "A"], {}, "--env A is not NAME=VALUE."),
        (["--volume", "a:/b", "--devices", "1", "--api", "pod"], {}, "--api"),
        (["--volume", "a:/b", "--devices", "1", "--grace-s", "0"], {}, "--grace-s"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, words: list[str], sections: dict[str, Any], problem: str) -> None:
    code, _, errors = submit(tmp_path, "--image", "a", "--dry-run", *words, **sections)
    assert code == 2
    assert problem in errors
    assert not (tmp_path / "runs").exists()


def test_the_image_is_needed(tmp_path: Path) -> None:
    code, _, errors = submit(tmp_path, "--devices", "8", "--volume", "a:/b")
    assert code == 2
    assert "--image" in errors


def test_a_missing_package_is_named_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kubeflow_trainer_api", None)
    code, _, errors = submit(tmp_path, "--image", "a", "--devices", "8", "--volume", "a:/b", "--dry-run")
    assert code == 2
    assert "pip install 'fullshard[kubernetes]'" in errors


def kubectl(folder: Path, script: str) -> dict[str, str]:
    """A PATH whose kubectl is this shell script."""
    tool = folder / "bin" / "kubectl"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    return {"PATH": f"{tool.parent}:{os.environ['PATH']}"}


def test_the_job_is_written_and_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environ = kubectl(tmp_path, f'echo "$@" > {tmp_path}/asked; cp "$3" {tmp_path}/applied.yaml')
    words = ["--image", "repo/train:1", "--devices", "8", "--volume", "claim:/workspace", "--namespace", "team"]
    code, text, errors = submit(tmp_path, *words, environ=environ)
    assert code == 0, errors
    file = tmp_path / "runs" / "My_Run.v2" / "submit-1" / "job.yaml"
    assert (tmp_path / "asked").read_text() == f"apply -f {file}\n"
    assert (tmp_path / "applied.yaml").read_text() == file.read_text()
    assert "job my-run-v2-1" in text
    assert "kubectl -n team get trainjob my-run-v2-1" in text
    assert "kubectl -n team logs -f -l jobset.sigs.k8s.io/jobset-name=my-run-v2-1" in text
    assert f"kubectl delete -f {file}" in text
    _, text, _ = submit(tmp_path, *words, environ=environ)
    assert "job my-run-v2-2" in text  # the first may still be there


def test_a_cluster_that_refuses_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environ = kubectl(tmp_path, "echo 'error: no matches for kind TrainJob' >&2; exit 1")
    words = ["--image", "a", "--devices", "8", "--volume", "a:/b"]
    code, _, errors = submit(tmp_path, *words, environ=environ)
    assert code == 2
    assert "kubectl refused the job: error: no matches for kind TrainJob." in errors
    assert "--api jobset" in errors


def test_without_kubectl_the_command_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--image", "a", "--devices", "8", "--volume", "a:/b"]
    code, _, errors = submit(tmp_path, *words, environ={"PATH": str(tmp_path)})
    file = tmp_path / "runs" / "My_Run.v2" / "submit-1" / "job.yaml"
    assert code == 2
    assert file.exists()
    assert "kubectl is not installed here, so the job is written and not submitted." in errors
    assert f"Where it is, run: kubectl apply -f {file}" in errors


@pytest.mark.parametrize("run", ["My_Run.v2", "7b", "x" * 200, "a.-_b", "Ä", "...", "run-" + "y" * 60 + "-1"])
def test_names_are_dns_labels(run: str) -> None:
    name = job_name(run, number="12")
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert len(name) <= LONGEST
    assert re.fullmatch(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?", label_value(run))
    assert len(label_value(run)) <= 63


def test_long_names_stay_apart() -> None:
    assert job_name("x" * 80 + "a", number="1") != job_name("x" * 80 + "b", number="1")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--memory", "lots"), "--memory 'lots' is not an amount of memory that Kubernetes knows. Write 512Gi or"),
        (("--memory", "12GB"), "--memory '12GB' is not an amount of memory"),
        (("--memory", "0"), "--memory '0' is not an amount of memory"),
        (("--shared-memory", "64GB"), "--shared-memory '64GB' is not an amount of memory"),
        (("--cpus", "two"), "--cpus 'two' is not a number of CPUs that Kubernetes knows. Write 32, 1.5 or 500m."),
        (("--cpus", "-1"), "--cpus '-1' is not a number of CPUs"),
        (("--image", "x 1"), "--image 'x 1' is not the name of an image. Write NAME:TAG"),
        (("--image", "Train:1"), "--image 'Train:1' is not the name of an image"),
        (("--namespace", "My NS"), "--namespace 'My NS' is not a name that Kubernetes accepts"),
        (("--namespace", "a" * 64), "at most 63"),
        (("--queue", "Q_1"), "--queue 'Q_1' is not a name"),
        (("--secret", "S3_KEYS"), "--secret 'S3_KEYS' is not a name"),
        (("--pull-secret", "a b"), "--pull-secret 'a b' is not a name"),
        (("--service-account", "Me"), "--service-account 'Me' is not a name"),
        (("--gpu-resource", "a gpu"), "--gpu-resource 'a gpu' is not a key that Kubernetes accepts"),
        (("--env", "1A=b"), "--env 1A=b: '1A' is not a name of a variable"),
        (("--node-selector", "gpu=an h100"), "--node-selector gpu=an h100: 'an h100' is not a value of a label"),
        (("--volume", "Runs_1:/w"), "--volume Runs_1:/w: the claim 'Runs_1' is not a name"),
        (("--volume", "runs:/workspace"), "--volume runs:/workspace: volume runs is mounted at /workspace. Choose"),
        (("--volume", "data:/workspace/"), "volume runs is mounted at /workspace"),
        (("--volume", "runs:/dev/shm"), "--volume runs:/dev/shm: the shared memory is mounted at /dev/shm"),
        (("--volume", "runs:/etc"), "the recipe is mounted at /etc/fullshard"),
        (("--volume", "runs:/w:ro"), "--volume runs:/w:ro is not CLAIM:PATH"),
        (("-n", "team"), "-n: options have long names here. Write --namespace."),
    ],
)
def test_values_that_a_cluster_would_refuse_are_refused_here(
    tmp_path: Path, words: tuple[str, ...], problem: str
) -> None:
    image = () if "--image" in words else ("--image", "repo/train:1")
    usual = ("--dry-run", "--devices", "8", "--volume", "runs:/workspace")
    code, _, errors = submit(tmp_path, *image, *usual, *words)
    assert code == 2
    assert problem in errors


@pytest.mark.parametrize(
    "words",
    [
        ("--memory", "1.5Ti"),
        ("--memory", "64e9"),
        ("--cpus", "500m"),
        ("--image", "localhost:5000/team/train__x:v1.2-rc"),
        ("--image", f"ghcr.io/a/b@sha256:{'0' * 64}"),
        ("--node-selector", "node.kubernetes.io/instance-type=p5.48xlarge"),
        ("--volume", "runs:/data/runs"),
    ],
)
def test_what_a_cluster_accepts_is_accepted(tmp_path: Path, words: tuple[str, ...]) -> None:
    image = () if "--image" in words else ("--image", "repo/train:1")
    usual = ("--dry-run", "--devices", "8", "--volume", "runs:/workspace")
    code, _, errors = submit(tmp_path, *image, *usual, *words)
    assert code == 0, errors


def test_an_option_that_must_be_given(tmp_path: Path) -> None:
    code, _, errors = submit(tmp_path, "--devices", "8")
    assert code == 2
    assert "--on kubernetes needs --image. fullshard submit --help-on kubernetes explains it." in errors
