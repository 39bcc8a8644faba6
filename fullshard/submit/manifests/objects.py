"""The objects of a job: its recipe, and either a TrainJob of Kubeflow Trainer with its runtime, or a JobSet.

Each is checked by the typed models of `kubeflow-trainer-api` before it is written. Must not know recipes or options.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fullshard.errors import missing_package
from fullshard.submit.manifests.pods import CONTAINER, RECIPE, Pod, Values, failure_policy, pod_failure_policy

PORT = 29500
TRAINER, JOBSET = "trainer.kubeflow.org/v1alpha1", "jobset.x-k8s.io/v1alpha2"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


@dataclass(frozen=True)
class JobObjects:
    """A job on `nodes` nodes with `per_node` ranks each."""

    pod: Pod
    nodes: int
    per_node: int
    recipe: str
    labels: Values
    namespace: str | None = None
    queue: str | None = None
    """Of Kueue, for the job alone: pods with this label would wait each for itself."""
    max_restarts: int = 3

    def as_trainjob(self) -> list[Values]:
        """For Kubeflow Trainer: the runtime has the rules for exit codes, which a TrainJob cannot state."""
        runtime = {
            "apiVersion": TRAINER,
            "kind": "TrainingRuntime",
            "metadata": self._metadata(self.pod.name),
            "spec": {
                "mlPolicy": {"numNodes": self.nodes, "torch": {}},
                "template": {"spec": self._jobset(self.pod.spec({"image": self.pod.image}), counted=False)},
            },
        }
        trainer: Values = {
            "image": self.pod.image,
            "command": list(self.pod.command),
            "numNodes": self.nodes,
            "numProcPerNode": self.per_node,
            "resourcesPerNode": self.pod.resources,
            "env": self.pod.variables(),
        }
        job = {
            "apiVersion": TRAINER,
            "kind": "TrainJob",
            "metadata": self._of_the_job(),
            "spec": {
                "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": self.pod.name},
                "trainer": {key: value for key, value in trainer.items() if value},
            },
        }
        return [
            self._config_map(),
            _checked("TrainerV1alpha1TrainingRuntime", runtime),
            _checked("TrainerV1alpha1TrainJob", job),
        ]

    def as_jobset(self) -> list[Values]:
        """For a cluster with JobSet alone: the variables that Kubeflow Trainer would set are in the pod."""
        container: Values = {
            "image": self.pod.image,
            "command": list(self.pod.command),
            "env": [*self._nodes(), *self.pod.variables()],
            "ports": [{"containerPort": PORT, "protocol": "TCP"}],
        }
        if self.pod.resources:
            container["resources"] = self.pod.resources
        job = {
            "apiVersion": JOBSET,
            "kind": "JobSet",
            "metadata": self._of_the_job(),
            "spec": self._jobset(self.pod.spec(container), counted=True),
        }
        return [self._config_map(), _checked("JobsetV1alpha2JobSet", job)]

    def _metadata(self, name: str) -> Values:
        found = {"name": name, "namespace": self.namespace, "labels": self.labels}
        return {key: value for key, value in found.items() if value}

    def _of_the_job(self) -> Values:
        found = self._metadata(self.pod.name)
        return found | {"labels": {**self.labels, "kueue.x-k8s.io/queue-name": self.queue}} if self.queue else found

    def _config_map(self) -> Values:
        """The recipe, with every value in force."""
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": self._metadata(f"{self.pod.name}-recipe"),
            "data": {RECIPE: self.recipe},
        }

    def _jobset(self, pod: Values, *, counted: bool) -> Values:
        """One job whose pods are numbered, the nodes; `counted`: it says itself how many."""
        job: Values = {"completionMode": "Indexed"}
        if counted:
            job |= {"parallelism": self.nodes, "completions": self.nodes}
        job |= {
            # A failure that counts ends the job, and the JobSet starts all nodes again.
            "backoffLimit": 0,
            "podFailurePolicy": pod_failure_policy(),
            "template": {"metadata": {"labels": self.labels}, "spec": pod},
        }
        template: Values = {"spec": job}
        if not counted:
            template = {"metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}, **template}
        return {
            "failurePolicy": failure_policy(self.max_restarts),
            "replicatedJobs": [{"name": CONTAINER, "replicas": 1, "template": template}],
        }

    def _nodes(self) -> list[Values]:
        first = f"{self.pod.name}-{CONTAINER}-0-0.{self.pod.name}"
        said = {"PET_NNODES": self.nodes, "PET_NPROC_PER_NODE": self.per_node}
        meeting = {"PET_MASTER_ADDR": first, "PET_MASTER_PORT": PORT}
        return [
            *({"name": name, "value": str(value)} for name, value in said.items()),
            {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}},
            *({"name": name, "value": str(value)} for name, value in meeting.items()),
        ]


def _checked(model: str, values: Values) -> Values:
    """The same values, in the same order, after the typed model has taken all of them."""
    try:
        from kubeflow_trainer_api import models
    except ModuleNotFoundError:
        raise missing_package(
            "kubeflow-trainer-api", extra="kubernetes", needed_by="fullshard submit --on kubernetes"
        ) from None
    kept: Any = getattr(models, model).from_dict(values).to_dict()
    assert kept == values, f"{model} does not know all of {values}: it keeps {kept}"
    return values
