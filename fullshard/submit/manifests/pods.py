"""The pod of a node: its container, volumes and resources, and which exit codes end the job or start the pod again.

Values are those of the Kubernetes API, under its own names. Must not know which object the pod is part of, nor recipes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fullshard.errors import EXIT_NUMERICAL, EXIT_PREEMPTED, EXIT_USER

Values = dict[str, Any]
CONTAINER = "node"
"""The name that Kubeflow Trainer expects of the job and of its container."""
RECIPE_FOLDER, RECIPE = "/etc/fullshard", "recipe.yaml"
SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class Mount:
    """A volume claim and where it appears in the container."""

    claim: str
    path: str


@dataclass(frozen=True)
class Pod:
    """What every node of a job is made of."""

    name: str
    """The name of the job."""
    image: str
    command: tuple[str, ...]
    resources: Values
    mounts: tuple[Mount, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    secrets: tuple[str, ...] = ()
    """Secrets whose keys become variables."""
    pull_secrets: tuple[str, ...] = ()
    service_account: str | None = None
    node_selector: tuple[tuple[str, str], ...] = ()
    shared_memory: str | None = None
    grace_s: int = 300

    def spec(self, container: Values) -> Values:
        """The pod; `container` has what the object around it does not say itself."""
        found: Values = {
            # Replaced by the job, never restarted in place: only then do the rules for exit codes apply.
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": self.grace_s,
            "serviceAccountName": self.service_account,
            "nodeSelector": dict(self.node_selector),
            "imagePullSecrets": [{"name": name} for name in self.pull_secrets],
            "containers": [{"name": CONTAINER, **container, **self._inside()}],
            "volumes": self._volumes(),
        }
        return {key: value for key, value in found.items() if value not in (None, [], {})}

    def variables(self) -> list[Values]:
        return [{"name": name, "value": value} for name, value in self.env]

    def _inside(self) -> Values:
        mounts = [
            {"name": "recipe", "mountPath": RECIPE_FOLDER, "readOnly": True},
            {"name": "shared-memory", "mountPath": SHARED_MEMORY},
            *({"name": f"volume-{n}", "mountPath": mount.path} for n, mount in enumerate(self.mounts)),
        ]
        found: Values = {"volumeMounts": mounts}
        if self.mounts:
            found["workingDir"] = self.mounts[0].path
        if self.secrets:
            found["envFrom"] = [{"secretRef": {"name": name}} for name in self.secrets]
        return found

    def _volumes(self) -> list[Values]:
        memory: Values = {"medium": "Memory"}
        if self.shared_memory:
            memory["sizeLimit"] = self.shared_memory
        return [
            {"name": "recipe", "configMap": {"name": f"{self.name}-recipe"}},
            # Data loaders and NCCL need more than the 64 MiB that a container has by default.
            {"name": "shared-memory", "emptyDir": memory},
            *(
                {"name": f"volume-{n}", "persistentVolumeClaim": {"claimName": mount.claim}}
                for n, mount in enumerate(self.mounts)
            ),
        ]


def pod_failure_policy() -> Values:
    """A mistake and a numerical guard are final; a pod that saved and stopped, or that the cluster took away, is
    replaced and not counted."""
    return {
        "rules": [
            {"action": "FailJob", "onExitCodes": _exits(EXIT_USER, EXIT_NUMERICAL)},
            {"action": "Ignore", "onExitCodes": _exits(EXIT_PREEMPTED)},
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        ]
    }


def _exits(*codes: int) -> Values:
    return {"containerName": CONTAINER, "operator": "In", "values": list(codes)}


def failure_policy(max_restarts: int) -> Values:
    """Any other failure starts all nodes again, when the old ones are gone, at most `max_restarts` times."""
    return {
        "maxRestarts": max_restarts,
        "restartStrategy": "BlockingRecreate",
        "rules": [{"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
    }
