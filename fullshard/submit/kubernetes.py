"""Kubernetes: a TrainJob of Kubeflow Trainer, or a JobSet, as one YAML file, and kubectl.

The recipe travels in a ConfigMap; code, model and data are in the image, on volumes or in a store. Must not know how
the objects are built.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Literal

import yaml
from pydantic import Field

from fullshard.errors import SetupError
from fullshard.submit.engine import Engine, Job, Request, Submitted, call
from fullshard.submit.manifests import allowed
from fullshard.submit.manifests.names import job_name, label_value
from fullshard.submit.manifests.objects import JobObjects
from fullshard.submit.manifests.pods import RECIPE, RECIPE_FOLDER, Mount, Pod

FILE = "job.yaml"
_LARGEST = 900_000
"""Bytes of a recipe: Kubernetes refuses a ConfigMap above 1 MiB."""


class Kubernetes(Engine):
    """A job on a Kubernetes cluster."""

    sees_our_files: ClassVar[bool] = False
    short: ClassVar[Mapping[str, str]] = {"n": "namespace"}

    image: str
    """The container image, with fullshard and your own code."""
    api: Literal["trainjob", "jobset"] = "trainjob"
    """trainjob: for clusters with Kubeflow Trainer; jobset: for those with JobSet alone."""
    namespace: str | None = None
    """The namespace; null: that of the current context."""
    volume: list[str] = []
    """A volume claim and where it is mounted, CLAIM:PATH; can be repeated. The first is the working directory."""
    secret: list[str] = []
    """A secret whose keys become variables, such as those of s3; can be repeated."""
    env: list[str] = []
    """A variable, NAME=VALUE; can be repeated. It is written to the files of the run: keys belong in a secret."""
    cpus: str | None = None
    """CPUs of a node: 32."""
    memory: str | None = None
    """Memory of a node: 512Gi."""
    shared_memory: str | None = None
    """The most that /dev/shm may hold: 64Gi; null: half of the machine's memory."""
    gpu_resource: str = "nvidia.com/gpu"
    """What the cluster calls a GPU."""
    node_selector: list[str] = []
    """A label that machines must have, KEY=VALUE; can be repeated."""
    service_account: str | None = None
    """The account that the pods run under."""
    pull_secret: list[str] = []
    """A secret for the registry of the image; can be repeated."""
    queue: str | None = None
    """The queue of Kueue that the job waits in, until all its nodes are free."""
    job_restarts: int = Field(3, ge=0)
    """How often a failed job starts again by itself; preemptions do not count."""
    grace_s: int = Field(300, ge=1)
    """Seconds between the signal to stop and the kill: one step and one save must fit in."""

    def job(self, request: Request) -> Job:
        recipe = request.reading.recipe
        self._check_values()
        mounts = allowed.mounts(self.volume)
        _check_place(recipe, mounts)
        if len(request.recipe_text.encode()) > _LARGEST:
            raise SetupError("The recipe is too long for a ConfigMap, which holds 1 MiB. Move its lists to files.")
        gpus, per_node = _ranks(recipe)
        more = ["--stage", request.stage] if request.stage else []
        # A pod with GPUs whose torch sees none must not train on its CPUs.
        more += ["topology.device=cuda"] if gpus else []
        pod = Pod(
            name=job_name(recipe.name, number=request.folder.name.rpartition("-")[2]),
            image=self.image,
            command=("fullshard", "train", f"{RECIPE_FOLDER}/{RECIPE}", *more),
            resources=self._resources(gpus),
            mounts=mounts,
            env=tuple(_pair(text, option="--env") for text in self.env),
            secrets=tuple(self.secret),
            pull_secrets=tuple(self.pull_secret),
            service_account=self.service_account,
            node_selector=tuple(_pair(text, option="--node-selector") for text in self.node_selector),
            shared_memory=self.shared_memory,
            grace_s=self.grace_s,
        )
        objects = JobObjects(
            pod,
            nodes=recipe.topology.nodes,
            per_node=per_node,
            recipe=request.recipe_text,
            labels={"app.kubernetes.io/managed-by": "fullshard", "fullshard/run": label_value(recipe.name)},
            queue=self.queue,
            namespace=self.namespace,
            max_restarts=self.job_restarts,
        )
        made = objects.as_trainjob() if self.api == "trainjob" else objects.as_jobset()
        return Job({FILE: _yaml(made)}, ["kubectl", "apply", "-f", str(request.folder / FILE)])

    def submit(self, job: Job, folder: Path) -> Submitted:
        if shutil.which("kubectl") is None:
            raise SetupError(
                "kubectl is not installed here, so the job is written and not submitted. Where it is, run: "
                f"kubectl apply -f {folder / FILE}."
            )
        try:
            call(job.submit, needs="")
        except SetupError as error:
            without = self.api == "trainjob" and "no matches for kind" in str(error)
            hint = " The cluster has no Kubeflow Trainer: use --api jobset, or install it." if without else ""
            raise SetupError(f"{error}{hint}") from None
        name = next(yaml.safe_load_all((folder / FILE).read_text()))["metadata"]["name"].removesuffix("-recipe")
        kubectl = f"kubectl -n {self.namespace}" if self.namespace else "kubectl"
        node_0 = f"jobset.sigs.k8s.io/jobset-name={name},batch.kubernetes.io/job-completion-index=0"
        commands = {
            "state": f"{kubectl} get {self.api} {name}",
            "log": f"{kubectl} logs -f -l {node_0}",
            "cancel": f"kubectl delete -f {folder / FILE}",
        }
        return Submitted(name, commands)

    def _check_values(self) -> None:
        """Raises for what a cluster would refuse, or what would leave pods waiting for ever."""
        allowed.IMAGE.check("--image", [self.image])
        allowed.NAMESPACE.check("--namespace", [self.namespace])
        allowed.NAMESPACE.check("--queue", [self.queue])
        allowed.CPUS.check("--cpus", [self.cpus])
        allowed.MEMORY.check("--memory", [self.memory])
        allowed.MEMORY.check("--shared-memory", [self.shared_memory])
        allowed.NAME.check("--secret", self.secret)
        allowed.NAME.check("--pull-secret", self.pull_secret)
        allowed.NAME.check("--service-account", [self.service_account])
        allowed.KEY.check("--gpu-resource", [self.gpu_resource])
        for text in self.env:
            allowed.VARIABLE.check(f"--env {text}:", [_pair(text, option="--env")[0]])
        for text in self.node_selector:
            key, value = _pair(text, option="--node-selector")
            allowed.KEY.check(f"--node-selector {text}:", [key])
            allowed.LABEL_VALUE.check(f"--node-selector {text}:", [value])

    def _resources(self, gpus: int) -> dict[str, Any]:
        """The same as requests and limits: a node that is promised less than it uses is the first to be evicted."""
        asked = {"cpu": self.cpus, "memory": self.memory, self.gpu_resource: str(gpus) if gpus else None}
        found = {name: value for name, value in asked.items() if value}
        return {"requests": found, "limits": found} if found else {}


def _ranks(recipe: Any) -> tuple[int, int]:
    """GPUs and ranks of a node."""
    device, devices = recipe.topology.device, recipe.topology.devices
    if isinstance(devices, list):
        raise SetupError(
            f"topology.devices = {devices} names GPUs, but Kubernetes chooses them. Say how many a node has: --devices "
            f"{len(devices)}."
        )
    if device == "cpu":
        return 0, devices if isinstance(devices, int) else 1
    if devices == "auto":
        raise SetupError(
            "--on kubernetes needs the number of GPUs of a node: --devices 8. Without GPUs, use topology.device=cpu."
        )
    return devices, devices


def _pair(text: str, *, option: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise SetupError(f"{option} {text} is not NAME=VALUE.")
    return name, value


def _check_place(recipe: Any, mounts: tuple[Mount, ...]) -> None:
    """A pod that is replaced must find the checkpoints of the one before."""
    if "://" in (recipe.checkpoint.store or ""):
        return
    output = PurePosixPath(recipe.output)
    if not mounts or (output.is_absolute() and not any(output.is_relative_to(mount.path) for mount in mounts)):
        where = f"output = {output} is on no volume" if mounts else f"output = {output} would be inside the container"
        raise SetupError(
            f"{where}, and is lost with the pod. Mount a volume, --volume CLAIM:/workspace, that holds it (relative "
            "paths of the recipe start there); or send checkpoints to a store: checkpoint.store=s3://BUCKET/runs."
        )


class _Dumper(yaml.SafeDumper):
    """Text of several lines stays readable, and nothing is an anchor."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _yaml(objects: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    text.write("# Exit code 75, saved and stopped: the pod is replaced. 2 and 3, a mistake or a guard: the job ends.\n")
    yaml.dump_all(objects, text, Dumper=_Dumper, sort_keys=False, width=1_000, explicit_start=True)
    return text.getvalue()


__all__ = ["Kubernetes"]
