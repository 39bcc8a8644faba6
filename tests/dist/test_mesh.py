"""Groups of a mesh obey the timeout of the recipe, as the group of all ranks does; the watchdog comes first."""

from __future__ import annotations

from fullshard.faults.watchdog import GRACE_S
from tests.ranks import RankPool

TIMEOUT_S = 77.0


def timeouts() -> list[float]:
    import torch

    from fullshard.dist.mesh import Layout, make_mesh
    from fullshard.dist.world import join

    mesh = make_mesh(Layout("hybrid", 2, 1, ""), join(device="cpu", backend="auto", timeout_s=TIMEOUT_S))
    groups = [mesh.get_group(name) for name in ("dp_replicate", "dp_shard")]
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def test_replicas_wait_as_long_as_the_recipe_says(ranks: RankPool) -> None:
    assert ranks.run(timeouts, world=2) == [[TIMEOUT_S + GRACE_S] * 2] * 2
