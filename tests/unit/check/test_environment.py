"""Section 1 of a check: machines of many kinds described by hand, real folders and variables, two gloo ranks."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fullshard.check import capacity, environment, kernels, machine
from fullshard.check.agreement import among_ranks
from fullshard.check.capacity import ModelSize
from fullshard.check.findings import Finding
from fullshard.check.machine import Gpu, Machine
from fullshard.contracts.launcher import Ranks
from fullshard.contracts.world import World
from fullshard.dist.precision import resolve_for
from fullshard.errors import SetupError
from fullshard.explain.host_memory import memory_left
from fullshard.proofs.same_run import Subject
from fullshard.recipe import Batch, Duration, Recipe
from fullshard.recipes.read import read_recipe
from fullshard.setup.step_plan import plan_steps
from tests import small
from tests.ranks import RankPool

GIB = 2**30
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 80 * GIB)
A100 = Gpu("NVIDIA A100-SXM4-40GB", (8, 0), 40 * GIB)
T4 = Gpu("Tesla T4", (7, 5), 16 * GIB)
CPU = Machine(
    torch="2.13.0",
    cores=4,
    memory_bytes=16 * GIB,
    open_files=4096,
    shm_bytes=8 * GIB,
    packages=frozenset({"tensorboard", "torchao", "triton", "wandb"}),
    compiler="/usr/bin/g++",
)


def with_gpus(*gpus: Gpu, **changes: Any) -> Machine:
    facts = {"gpus": gpus, "cuda": "12.8", "nccl": "2.27.5", "driver": "570.86.15", **changes}
    return replace(CPU, **facts)


def recipe(folder: Path, **sections: Any) -> Recipe:
    """A recipe for whatever device the machine has."""
    topology = {"device": "auto"} | sections.pop("topology", {})
    precision = sections.pop("precision", "auto")
    model = {"path": None, "architecture": "qwen3", "size": "tiny"} | sections.pop("model", {})
    return read_recipe(small.recipe(folder, precision=precision, topology=topology, model=model, **sections))


def look(
    asked: Recipe, here: Machine, ranks: Ranks | None = None, environ: dict[str, str] | None = None
) -> dict[str, Finding]:
    """The findings by what was looked at; where there are several of one kind, the worst."""
    found: dict[str, Finding] = {}
    for finding in environment.look(asked, ranks, machine=here, environ=environ or {}):
        if finding.check not in found or finding.level != "ok":
            found[finding.check] = finding
        assert finding.level == "ok" or finding.remedy or finding.text.endswith((".", "]'"))
    return found


def problems(found: dict[str, Finding]) -> list[str]:
    return [finding.check for finding in found.values() if finding.level != "ok"]


def test_this_machine_is_read_and_healthy(tmp_path: Path) -> None:
    here = machine.inspect()
    assert here.cores >= 1
    assert here.memory_bytes > 2**20
    asked = read_recipe(small.recipe(tmp_path, model={"path": str(small.model_folder(tmp_path / "model"))}))
    findings = list(environment.look(asked, Ranks(1)))
    assert [f for f in findings if f.level != "ok"] == []
    assert {"Python", "torch", "devices", "precision", "attention", "packages", "output"} <= {f.check for f in findings}
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("gpus", "topology"),
    [
        ((), {"device": "cpu", "devices": 4}),
        ((H100,), {}),
        ((A100,) * 4, {"devices": 4}),
        ((T4, T4), {"devices": [1]}),
        ((H100,), {"devices": 2, "backend": "gloo"}),
    ],
)
def test_a_healthy_machine_gives_ticks_only(tmp_path: Path, gpus: tuple[Gpu, ...], topology: dict[str, Any]) -> None:
    found = look(recipe(tmp_path, topology=topology), with_gpus(*gpus) if gpus else CPU)
    assert problems(found) == []


def test_on_a_cpu_one_line_says_so(tmp_path: Path) -> None:
    found = look(recipe(tmp_path), CPU)
    assert found["devices"].text == "no GPU: training on CPU, gloo"
    assert found["cores"].text == "4 cores for 1 rank"
    assert "CUDA" not in found
    assert "GPUs" not in found
    idle = look(recipe(tmp_path, topology={"device": "cpu"}), with_gpus(H100, H100))
    assert idle["devices"].text.endswith("2 GPUs not used")


def test_on_gpus_versions_and_links_are_named(tmp_path: Path) -> None:
    links = {(0, 1): "NV18", (0, 2): "NV18", (1, 2): "SYS"}
    here = with_gpus(H100, H100, H100, links=links)
    found = look(recipe(tmp_path), here)
    assert found["CUDA"].text == "CUDA 12.8, driver 570.86.15, NCCL 2.27.5"
    assert found["GPUs"].text == "3 of 3: NVIDIA H100 80GB HBM3 (compute capability 9.0, 80.0 GiB)"
    assert found["GPU links"].text == "NVLink between 2 of 3 pairs, the others over PCIe (NV18, SYS)"
    assert "all GPUs (NV18)" in look(recipe(tmp_path, topology={"devices": [0, 2]}), here)["GPU links"].text
    assert "no NVLink" in look(recipe(tmp_path, topology={"devices": [1, 2]}), here)["GPU links"].text
    assert "unknown" in look(recipe(tmp_path), with_gpus(H100, H100))["GPU links"].text


def test_old_python_and_untested_torch(tmp_path: Path) -> None:
    assert look(recipe(tmp_path), replace(CPU, python=(3, 10)))["Python"].level == "error"
    assert [
        look(recipe(tmp_path), replace(CPU, torch=version))["torch"].level
        for version in ("2.10.1", "2.11.0", "2.15.2+cu130", "2.16.0.dev20260801")
    ] == ["warning", "ok", "ok", "warning"]


@pytest.mark.parametrize(
    ("topology", "said"),
    [
        ({"devices": 8}, "8 ranks on this node, but torch sees 2 GPUs"),
        ({"devices": [0, 5]}, "this node has no GPU 5"),
    ],
)
def test_more_gpus_than_there_are(tmp_path: Path, topology: dict[str, Any], said: str) -> None:
    found = look(recipe(tmp_path, topology=topology), with_gpus(H100, H100), environ={"CUDA_VISIBLE_DEVICES": "2,3"})
    assert problems(found) == ["devices"]
    assert said in found["devices"].text
    assert "CUDA_VISIBLE_DEVICES=2,3" in found["devices"].remedy


def test_a_running_rank_has_its_gpus_already(tmp_path: Path) -> None:
    """Alone, a rank sees one GPU and calls it 0; a task of SLURM sees one where the node has several ranks."""
    found = look(recipe(tmp_path, topology={"devices": [2]}), with_gpus(H100), Ranks(1), {"CUDA_VISIBLE_DEVICES": "2"})
    assert problems(found) == []
    assert problems(look(recipe(tmp_path), with_gpus(H100), Ranks(8))) == []


def test_a_gpu_is_requested_and_missing(tmp_path: Path) -> None:
    found = look(recipe(tmp_path, topology={"device": "cuda"}), CPU)
    assert problems(found) == ["devices"]
    assert "topology.device = cuda, but torch sees no GPU" in found["devices"].text
    assert "precision" not in found


@pytest.mark.parametrize(
    ("changes", "environ", "said"),
    [
        ({}, {}, "built without CUDA"),
        ({"cuda": "12.8"}, {}, "may be too old for CUDA 12.8"),
        ({"cuda": "12.8"}, {"CUDA_VISIBLE_DEVICES": ""}, "hidden"),
    ],
)
def test_a_driver_without_a_gpu(tmp_path: Path, changes: dict[str, Any], environ: dict[str, str], said: str) -> None:
    here = replace(CPU, driver="535.104.05", **changes)
    found = look(recipe(tmp_path), here, environ=environ)
    assert problems(found) == ["devices"]
    assert said in found["devices"].text
    assert problems(look(recipe(tmp_path, topology={"device": "cpu"}), here)) == []


def test_more_ranks_than_cores(tmp_path: Path) -> None:
    found = look(recipe(tmp_path, topology={"device": "cpu", "devices": 9}), CPU)
    assert problems(found) == ["cores"]
    assert found["cores"].text.startswith("9 ranks on 4 cores")


def test_mixed_gpus(tmp_path: Path) -> None:
    found = look(recipe(tmp_path, precision="fp16"), with_gpus(A100, T4))
    assert problems(found) == ["GPUs"]
    assert "NVIDIA A100" in found["GPUs"].text
    assert "Tesla T4" in found["GPUs"].text
    both = look(recipe(tmp_path), with_gpus(A100, T4))
    assert both["precision"].level == "error"
    assert "bf16 on NVIDIA A100-SXM4-40GB, fp16 on Tesla T4" in both["precision"].text
    assert problems(look(recipe(tmp_path, topology={"devices": [1]}), with_gpus(A100, T4))) == []


def test_precision_against_capability(tmp_path: Path) -> None:
    assert look(recipe(tmp_path), with_gpus(T4))["precision"].text.startswith("fp16")
    assert look(recipe(tmp_path), with_gpus(A100))["precision"].text.startswith("bf16")
    refused = look(recipe(tmp_path, precision="bf16"), with_gpus(T4))
    assert refused["precision"].level == "error"
    assert "Tesla T4 has compute capability 7.5" in refused["precision"].text
    assert look(recipe(tmp_path, precision="bf16-pure"), CPU)["precision"].level == "warning"


@pytest.mark.parametrize(
    ("kernel", "here", "precision", "said"),
    [
        ("varlen", with_gpus(T4), "fp16", "Tesla T4 (Turing) has compute capability 7.5"),
        ("varlen", with_gpus(T4), "fp16", "flash kernels need 8.0"),
        ("varlen", CPU, "bf16", "this run uses the CPU"),
        ("varlen", with_gpus(H100), "fp32", "compute in bf16 or fp16"),
        ("flex_attention", CPU, "fp32", "torch has no backward pass for it"),
    ],
)
def test_attention_that_cannot_run(tmp_path: Path, kernel: str, here: Machine, precision: str, said: str) -> None:
    found = look(recipe(tmp_path, model={"attention": kernel}, precision=precision), here)
    assert problems(found) == ["attention"]
    assert said in found["attention"].text
    assert "sdpa" in found["attention"].remedy


@pytest.mark.parametrize(
    ("here", "precision", "packed", "instead", "why"),
    [
        (with_gpus(T4), "fp16", True, "sdpa", "Tesla T4 (Turing) has compute capability 7.5"),
        (CPU, "bf16", True, "sdpa", "this run uses the CPU"),
        (with_gpus(H100), "fp32", True, "sdpa", "compute in bf16 or fp16"),
        (with_gpus(H100), "bf16", True, "varlen", "the package flash_attn is not installed"),
        (with_gpus(H100), "bf16", False, "sdpa", "the package flash_attn is not installed"),
    ],
)
def test_flash_attention_falls_back_with_a_warning(
    tmp_path: Path, here: Machine, precision: str, packed: bool, instead: str, why: str
) -> None:
    """Kernels differ in speed, not in numbers."""
    asked = recipe(tmp_path, model={"attention": "flash_attention_2"}, precision=precision, data={"pack": packed})
    found = look(asked, here)["attention"]
    assert found.level == "warning"
    assert found.text.startswith(f"model.attention = flash_attention_2 falls back to {instead}: ")
    assert why in found.text
    assert ("pip install flash-attn" in found.remedy) == ("not installed" in why)


def strategies(folder: Path, here: Machine, ranks: Ranks, size: ModelSize, **sections: Any) -> str:
    [found] = capacity.strategies(recipe(folder, **sections), ranks, size, machine=here)
    assert found.level == "ok"
    return found.text


def test_what_each_strategy_keeps_on_a_gpu_and_which_fit(tmp_path: Path) -> None:
    """8.2 billion parameters in fp32 with AdamW: 16 bytes each. On 8 GPUs of 80 GiB one copy does not fit."""
    billions = ModelSize(8_192_000_000, 8_192_000_000)
    text = strategies(tmp_path, with_gpus(*[H100] * 8), Ranks(8), billions, precision="bf16")
    assert text == (
        "a GPU with 80.0 GiB would keep: full 15.3 GiB, grad_op 30.5 GiB, hybrid 15.3 GiB, none 122.1 GiB (without "
        "activations); fits: full, grad_op, hybrid"
    )
    two = strategies(tmp_path, with_gpus(*[H100] * 8), Ranks(8, nodes=2), billions, precision="bf16")
    assert "full 7.6 GiB, grad_op 22.9 GiB, hybrid 15.3 GiB, none 122.1 GiB" in two


def test_a_small_model_is_told_that_it_may_be_replicated(tmp_path: Path) -> None:
    text = strategies(tmp_path, CPU, Ranks(2), ModelSize(1_000_000, 1_000_000))
    assert text.startswith(
        "a rank with 8.0 GiB would keep: full 7.6 MiB, grad_op 11.4 MiB, hybrid 7.6 MiB, none 15.3 MiB"
    )
    assert text.endswith(
        "fits: full, grad_op, hybrid, none; where memory is no concern, none (replicated) exchanges the least"
    )


def test_a_model_that_fits_nowhere_is_said_so(tmp_path: Path) -> None:
    assert strategies(tmp_path, with_gpus(T4, T4), Ranks(2), ModelSize(10**10, 10**10)).endswith("nothing fits")


def test_on_one_gpu_all_strategies_are_the_same(tmp_path: Path) -> None:
    text = strategies(tmp_path, with_gpus(T4), Ranks(1), ModelSize(10**8, 10**8))
    assert text == "one rank keeps 1.5 GiB of 16.0 GiB under every strategy, without activations"


@pytest.mark.parametrize(
    ("kernel", "packed", "here", "said"),
    [
        (
            "auto",
            True,
            with_gpus(H100),
            "varlen for packed rows if the model supports it; also available: sdpa, eager, flex",
        ),
        ("auto", False, with_gpus(H100), "sdpa if the model supports it"),
        ("auto", True, with_gpus(T4), "no flash kernels: Tesla T4 (Turing)"),
        ("eager", True, CPU, "eager, as requested; also available: sdpa"),
    ],
)
def test_the_kernel_that_will_be_used(tmp_path: Path, kernel: str, packed: bool, here: Machine, said: str) -> None:
    found = look(recipe(tmp_path, model={"attention": kernel}, data={"pack": packed}), here)
    assert problems(found) == []
    assert said in found["attention"].text


def test_the_flash_rule_is_the_familys_own() -> None:
    """What the check promises for flex attention is what torch says."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    query = torch.ones(1, 1, 128, 16, requires_grad=True)
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        flex_attention(query, query, query)
    finding = next(
        kernels.attention(
            "flex_attention", packed=False, gpus=[], precision=resolve_for("fp32", capability=None), machine=CPU
        )
    )
    assert finding.level == "error"


@pytest.mark.parametrize(
    ("sections", "lacking", "said"),
    [
        ({"optimizer": {"kind": "adamw_8bit"}}, "torchao", "pip install 'fullshard[optim]'"),
        ({"log": {"sinks": ["wandb"]}}, "wandb", "pip install 'fullshard[wandb]'"),
        ({"log": {"sinks": ["tensorboard"]}}, "tensorboard", "pip install tensorboard"),
    ],
)
def test_a_package_that_is_missing(tmp_path: Path, sections: dict[str, Any], lacking: str, said: str) -> None:
    asked = recipe(tmp_path, **sections)
    found = look(asked, replace(CPU, packages=CPU.packages - {lacking}))
    assert problems(found) == ["packages"]
    assert said in f"{found['packages'].text} {found['packages'].remedy}"
    assert problems(look(asked, CPU)) == []


def test_float8_needs_its_hardware_and_its_package(tmp_path: Path) -> None:
    asked = recipe(tmp_path, precision="float8")
    assert problems(look(asked, with_gpus(H100))) == []
    assert "torchao for precision = float8" in look(asked, with_gpus(H100))["packages"].text
    lacking = look(asked, with_gpus(H100, packages=CPU.packages - {"torchao"}))["packages"]
    assert "pip install 'fullshard[float8]'" in lacking.remedy
    for here, name in ((with_gpus(A100), r"A100-SXM4-40GB has compute capability 8\.0"), (CPU, "CPU is no GPU")):
        found = look(asked, here)
        assert problems(found)[:1] == ["precision"]
        assert re.search(rf"precision = float8: .*{name}, and float8 needs 8\.9", found["precision"].text)


def test_packages_in_other_versions() -> None:
    assert machine.unmet_requirements() == ()
    assert machine.unmet_requirements("no-such-distribution") == ()


def test_a_distribution_with_a_missing_requirement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "wanting-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: wanting\nVersion: 1.0\nRequires-Dist: numpy>=99\n"
        "Requires-Dist: no-such-thing>=2\n"
        "Requires-Dist: pydantic>=2\nRequires-Dist: nor-this; extra == 'more'\nRequires-Dist: torch>=99\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = machine.unmet_requirements("wanting")
    assert len(found) == 2
    assert "numpy" in found[0]
    assert ">=99 is required" in found[0]
    assert found[1] == "no-such-thing is not installed, >=2 is required"


def test_unmet_requirements_are_errors(tmp_path: Path) -> None:
    found = look(
        recipe(tmp_path), replace(CPU, unmet_requirements=("transformers 4.40 is installed, >=5.15 is needed",))
    )
    assert problems(found) == ["packages"]


def test_compiling_needs_a_compiler(tmp_path: Path) -> None:
    bare = replace(CPU, compiler=None)
    assert problems(look(recipe(tmp_path), bare)) == []
    assert problems(look(recipe(tmp_path, sharding={"compile": True}), bare)) == ["compiler"]
    assert problems(look(recipe(tmp_path), with_gpus(H100, compiler=None))) == ["compiler"]
    without_triton = with_gpus(H100, packages=CPU.packages - {"triton"})
    assert "triton" in look(recipe(tmp_path), without_triton)["compiler"].text
    assert problems(look(recipe(tmp_path, sharding={"compile": False}), without_triton)) == []


@pytest.mark.parametrize(
    ("name", "value", "here", "is_found"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", with_gpus(H100), True),
        ("CUDA_LAUNCH_BLOCKING", "0", with_gpus(H100), False),
        ("CUDA_LAUNCH_BLOCKING", "1", CPU, False),
        ("NCCL_P2P_DISABLE", "1", with_gpus(H100, H100), True),
        ("NCCL_P2P_DISABLE", "1", with_gpus(H100), False),
        ("TORCH_DISTRIBUTED_DEBUG", "detail", CPU, True),
        ("OMP_NUM_THREADS", "1", CPU, False),
    ],
)
def test_variables_that_slow_a_run(tmp_path: Path, name: str, value: str, here: Machine, is_found: bool) -> None:
    found = look(recipe(tmp_path), here, environ={name: value})
    assert problems(found) == (["variables"] if is_found else [])
    assert (name in found["variables"].text) == is_found


def test_a_hub_name_without_network(tmp_path: Path) -> None:
    asked = recipe(tmp_path, model={"path": "nobody/no-such-model", "architecture": None, "size": None})
    assert "hub" not in look(asked, CPU)
    found = look(asked, CPU, environ={"HF_HUB_OFFLINE": "1"})
    assert problems(found) == ["hub"]
    assert "HF_HUB_OFFLINE is set, and model.path = 'nobody/no-such-model'" in found["hub"].text


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    found = look(recipe(tmp_path, output=str(tmp_path / "file" / "runs")), CPU)
    assert problems(found) == ["output"]
    assert "Not a directory" in found["output"].text
    proc = look(recipe(tmp_path, data={"cache": "/proc/nothing"}), CPU)
    assert problems(proc) == ["data cache"]
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_shared_memory_and_open_files(tmp_path: Path) -> None:
    asked = recipe(tmp_path, data={"workers": 4, "sequence_length": 8192}, batch={"per_device": 64, "global": 64})
    assert problems(look(asked, CPU)) == []
    assert problems(look(asked, replace(CPU, shm_bytes=64 * 2**20))) == ["shared memory"]
    assert problems(look(recipe(tmp_path), replace(CPU, shm_bytes=1))) == []
    assert problems(look(recipe(tmp_path), replace(CPU, open_files=256))) == ["open files"]


def test_the_links_of_nvidia_smi() -> None:
    table = (
        "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
        "GPU0\t X \tNV4\tSYS\tPHB\t0-31\t0\t\tN/A\nGPU1\tNV4\t X \tPIX\tSYS\t0-31\t0\t\tN/A\n"
        "GPU2\tSYS\tPIX\t X \tSYS\t32-63\t1\t\tN/A\nNIC0\tPHB\tSYS\tSYS\t X\n\nLegend:\n\n  X    = Self\n"
    )
    links = machine.read_links(table)
    assert (links[0, 1], links[1, 0], links[0, 2], links[2, 1]) == ("NV4", "NV4", "SYS", "PIX")
    assert len(links) == 6
    assert machine.read_links("") == {}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = "MemTotal:       32000 kB\nMemAvailable:   10000 kB\n"


def test_memory_of_the_machine_and_of_control_groups(tmp_path: Path) -> None:
    assert memory_left(write(tmp_path / "bare", {"proc/meminfo": MEMINFO})) == 10_000 * 1024
    second = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/job/step\n",
        "sys/fs/cgroup/job/step/memory.max": "max\n",
        "sys/fs/cgroup/job/step/memory.current": "1000\n",
        "sys/fs/cgroup/job/step/memory.stat": "anon 600\ninactive_file 300\n",
        "sys/fs/cgroup/job/memory.max": "5000\n",
        "sys/fs/cgroup/job/memory.current": "2000\n",
        "sys/fs/cgroup/job/memory.stat": "anon 600\ninactive_file 400\n",
    }
    assert memory_left(write(tmp_path / "v2", second)) == 5000 - 2000 + 400
    first = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "4:memory:/docker/of-the-host\n1:cpu:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "7000\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "3000\n",
        "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 500\n",
    }
    assert memory_left(write(tmp_path / "v1", first)) == 7000 - 3000 + 500
    first["sys/fs/cgroup/memory/memory.limit_in_bytes"] = "9223372036854771712\n"
    assert memory_left(write(tmp_path / "free", first)) == 10_000 * 1024


def plan(*, steps: int, per_epoch: int = 10) -> Any:
    return plan_steps(Batch(per_device=1), Duration(steps=steps), num_rows=per_epoch, world=1)


def test_what_checkpoints_take(tmp_path: Path) -> None:
    asked = recipe(tmp_path, checkpoint={"every_steps": 2, "keep": 3, "best": {"metric": "loss"}})
    # fp32 weights and two fp32 moments; three kept, the best, one being written; and an fp32 export.
    assert capacity.budget(asked, ModelSize(1000, 1000)) == (12_000, 5, 4000)
    assert capacity.budget(asked, ModelSize(1000, 1000), plan(steps=4))[1] == 2
    assert capacity.budget(asked, ModelSize(1000, 10, 2000))[0] == 2000 + 80
    assert capacity.budget(recipe(tmp_path, precision="bf16-pure"), ModelSize(1000, 1000))[0] == 6000
    lora = recipe(tmp_path, model={"lora": True}, checkpoint={"keep": 1, "best": None, "every_epochs": 1})
    assert capacity.budget(lora, ModelSize(1000, 10, adapters=True)) == (4080, 2, 40)
    none = recipe(tmp_path, checkpoint={"at_end": False, "every_epochs": None, "best": None})
    assert capacity.budget(none, ModelSize(1000, 10), plan(steps=100))[1:] == (0, 0)
    every = recipe(tmp_path, checkpoint={"keep": None, "every_steps": 5, "best": None})
    assert capacity.budget(every, ModelSize(1, 1), plan(steps=100))[1] == 20
    assert next(capacity.disk(every, ModelSize(1, 1))).level == "warning"


def test_the_budget_is_what_a_run_writes(tmp_path: Path) -> None:
    small.model_folder(tmp_path / "model")
    small.token_file(tmp_path / "train.jsonl", records=16)
    settings = small.recipe(tmp_path, duration={"steps": 2}, topology={"device": "cpu", "devices": 1})
    small.train(settings)
    saved = tmp_path / "runs/run/checkpoint-2"
    written = sum(file.stat().st_size for file in saved.iterdir())
    tensors = json.loads((saved / "manifest.json").read_text())["tensors"]
    weights = [t["shape"] for name, t in tensors.items() if name.startswith("model/")]
    number = sum(_product(shape) for shape in weights)
    each, count, export = capacity.budget(read_recipe(settings), ModelSize(number, number))
    assert each <= written <= each + 3000 * len(tensors)  # DCP frames every tensor, and the manifest names it
    exported = sum(file.stat().st_size for file in (tmp_path / "runs/run/model").iterdir())
    assert export <= exported <= export + 50_000
    assert count == 4


def test_frozen_weights_keep_half_precision(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = small.model_folder(tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    asked = read_recipe(small.recipe(tmp_path, model={"path": str(folder), "lora": True}))
    module = asked.model.build(processor=None)
    trainable = sum(p.numel() for p in module.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in module.parameters()) - trainable
    assert capacity.size_of(asked, module).weight_bytes == 2 * frozen + 4 * trainable
    # The folder holds the frozen ones: a checkpoint has adapters and their moments alone.
    assert capacity.budget(asked, ModelSize(frozen + trainable, trainable))[0] == 12 * trainable


def _product(shape: list[int]) -> int:
    number = 1
    for extent in shape:
        number *= extent
    return number


def test_disk_space(tmp_path: Path) -> None:
    asked = recipe(tmp_path)
    fine = next(capacity.disk(asked, ModelSize(1000, 1000)))
    assert fine.level == "ok"
    assert "for 4 checkpoints of 11.7 KiB and the export" in fine.text
    full = next(capacity.disk(asked, ModelSize(10**15, 10**15)))
    assert full.level == "error"
    assert "checkpoint.keep" in full.remedy


def test_host_memory(tmp_path: Path) -> None:
    number = 700_000_000  # 10.4 GiB of state on any number of ranks, and 2.6 GiB while it is exported

    def level(asked: Recipe, ranks: Ranks, here: Machine) -> list[tuple[str, str]]:
        found = capacity.memory(asked, ranks, ModelSize(number, number), machine=here)
        return [(finding.check, finding.level) for finding in found]

    asked = recipe(tmp_path, topology={"device": "cpu", "devices": 2})
    assert level(asked, Ranks(2), CPU) == [("host memory", "warning")]
    assert level(asked, Ranks(2), replace(CPU, memory_bytes=32 * GIB)) == [("host memory", "ok")]
    assert level(asked, Ranks(2), replace(CPU, memory_bytes=8 * GIB)) == [("host memory", "error")]
    assert level(asked, Ranks(2, nodes=4, node_rank=1), replace(CPU, memory_bytes=8 * GIB)) == [("host memory", "ok")]
    copies = recipe(tmp_path, topology={"device": "cpu", "devices": 2}, sharding="none")
    assert level(copies, Ranks(2), CPU) == [("host memory", "error")]


def test_memory_with_gpus(tmp_path: Path) -> None:
    number = 2_000_000_000  # 30 GiB of state

    def level(here: Machine, ranks: Ranks, **sections: Any) -> dict[str, str]:
        asked = recipe(tmp_path, **sections)
        found = capacity.memory(asked, ranks, ModelSize(number, number), machine=here)
        return {finding.check: finding.level for finding in found}

    assert level(with_gpus(T4), Ranks(1)) == {"GPU memory": "error", "host memory": "ok"}
    assert level(with_gpus(T4, T4, T4, T4), Ranks(4)) == {"GPU memory": "ok", "host memory": "ok"}
    assert level(with_gpus(T4, T4, T4, T4), Ranks(4), sharding="none")["GPU memory"] == "error"
    assert level(with_gpus(A100), Ranks(8), sharding="none", topology={"backend": "gloo"})["GPU memory"] == "error"
    assert level(with_gpus(A100), Ranks(1)) == {"GPU memory": "ok", "host memory": "ok"}
    assert level(with_gpus(A100), Ranks(1), sharding={"cpu_offload": True}) == {"host memory": "error"}


def agree(
    settings: dict[str, Any], *, apart: bool = False, late_s: float = 0.0, other: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """One rank of `among_ranks`; rank 1 may see another folder, have another clock, or another recipe."""
    import torch

    rank = int(os.environ["RANK"])
    asked = read_recipe(other if other and rank == 1 else settings)
    world = World(rank, 2, rank, 2, torch.device("cpu"), "gloo")
    folder = asked.output / str(rank) if apart else None
    clock = (lambda: time.time() + late_s) if rank == 1 else time.time
    recipe_alone = Subject("recipe", {"optimizer.lr": str(asked.optimizer.lr)}, "the same recipe", "", "the same")
    found = among_ranks(asked, world, [recipe_alone], clock=clock, folder=folder, patience_s=0.0)
    return [finding.as_dict() for finding in found]


def together(ranks: RankPool, *args: Any, **kwargs: Any) -> dict[str, dict[str, Any]]:
    one, other = ranks.run(agree, *args, world=2, **kwargs)
    assert one == other
    return {finding["check"]: finding for finding in one}


def test_ranks_that_agree(tmp_path: Path, ranks: RankPool) -> None:
    found = together(ranks, small.recipe(tmp_path, output=str(tmp_path / "deep" / "runs")))
    assert {finding["level"] for finding in found.values()} == {"ok"}
    assert found["hosts"]["text"].startswith("2 ranks on 1 host: ")
    assert {"hosts", "recipe", "clocks", "shared files"} == set(found)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_shared(tmp_path: Path, ranks: RankPool) -> None:
    settings = small.recipe(tmp_path)
    absent = together(ranks, settings, apart=True)["shared files"]
    assert absent["level"] == "error"
    assert "rank 1 (" in absent["text"]
    assert "no such folder" in absent["text"]
    assert list(tmp_path.iterdir()) == []
    for rank in "01":
        (tmp_path / "runs" / rank).mkdir(parents=True)
    blind = together(ranks, settings, apart=True)["shared files"]
    assert blind["level"] == "error"
    assert "do not see each other's files" in blind["text"]
    assert "output=/shared/runs" in blind["remedy"]
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_folder_that_no_rank_can_write(tmp_path: Path, ranks: RankPool) -> None:
    (tmp_path / "runs").write_text("a file")
    found = together(ranks, small.recipe(tmp_path))["shared files"]
    assert found["level"] == "error"
    assert "ranks 0, 1 (" in found["text"]


@pytest.mark.parametrize(("late_s", "level"), [(0.3, "ok"), (-30.0, "warning"), (4000.0, "error")])
def test_clocks(tmp_path: Path, ranks: RankPool, late_s: float, level: str) -> None:
    found = together(ranks, small.recipe(tmp_path), late_s=late_s)["clocks"]
    assert found["level"] == level
    if level != "ok":
        seconds = re.search(r"is ([\d,.]+) s", found["text"])
        assert seconds
        # A busy machine lets a rank read its clock late.
        assert float(seconds[1].replace(",", "")) == pytest.approx(abs(late_s), abs=2)
        assert ("behind" if late_s < 0 else "ahead") in found["text"]


def test_ranks_with_different_recipes(tmp_path: Path, ranks: RankPool) -> None:
    other = small.recipe(tmp_path, optimizer={"lr": 0.5})
    found = together(ranks, small.recipe(tmp_path), other=other)["recipe"]
    assert found["level"] == "error"
    assert "optimizer.lr is 0.01 on rank 0" in found["text"]


def test_the_finding_for_ids_is_the_launchers_own_refusal(tmp_path: Path) -> None:
    """What the check calls an error is refused by whoever starts the ranks."""
    from fullshard.setup.on_ranks import ranks_of

    asked = recipe(tmp_path, topology={"device": "cpu", "devices": [0, 1]})
    with pytest.raises(SetupError) as refused:
        ranks_of(asked.topology)
    assert look(asked, CPU)["devices"].text == str(refused.value)
