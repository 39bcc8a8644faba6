"""`fullshard submit` before anything reaches an engine: options, mistakes, and what is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.config.part import kinds
from fullshard.recipes.read import read
from fullshard.submit import slurm
from fullshard.submit.engine import Engine, Job, Request, Submitted

RECIPE = """\
name: my-model
model: {architecture: qwen3, size: tiny, tokenizer: {train: {vocab_size: 300}}}
data: {train: train.txt, sequence_length: 64}
batch: {per_device: 2, global: 8}
duration: {steps: 3}
topology: {device: cpu}
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "train.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 40)


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for sbatch; tests/submit has a real one."""
    program = tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text("#!/bin/bash\necho '42;cluster'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return program


def submit(*words: str, on: str = "slurm", check: bool = False) -> Any:
    options = ["--on", on, *([] if check else ["--no-check"]), *words]
    return CliRunner().invoke(app, ["submit", "recipe.yaml", *options], catch_exceptions=False)


def directives(*words: str) -> list[str]:
    done = submit("--dry-run", *words)
    assert done.exit_code == 0, done.output
    return [line.removeprefix("#SBATCH ") for line in done.stdout.splitlines() if line.startswith("#SBATCH ")]


def refused(*words: str, **how: Any) -> str:
    done = submit(*words, **how)
    assert done.exit_code == 2, done.output
    assert not Path("runs").exists(), "something was written"
    return str(done.stderr)


def test_it_writes_submits_and_says_what_to_do_next(sbatch: Path, tmp_path: Path) -> None:
    done = submit("--nodes", "2", "optimizer.lr=1e-3", check=True)
    assert done.exit_code == 0, done.output
    folder = tmp_path / "runs" / "my-model" / "submit-1"
    assert [line.strip() for line in done.stdout.splitlines()] == [
        "fullshard: my-model on slurm",
        "wrote       runs/my-model/submit-1/recipe.yaml",
        "runs/my-model/submit-1/job.sbatch",
        f"submitted   job 42, with sbatch {folder}/job.sbatch",
        "look        squeue --jobs 42",
        f"output      tail -F {folder}/log-42.txt",
        "save, stop  scontrol update jobid=42 requeue=0 && scancel --signal=USR1 42",
        "cancel      scancel 42",
    ]
    assert f"fullshard train {folder}/recipe.yaml" in (folder / "job.sbatch").read_text()
    saved = read(folder / "recipe.yaml")
    assert (saved.recipe.optimizer.lr, saved.recipe.topology.nodes) == (1e-3, 2)
    assert saved.typed
    assert saved.typed.again() == "fullshard train recipe.yaml --nodes 2 optimizer.lr=1e-3"
    assert "submit-2" in submit().stdout, "a job that still waits keeps its files"


def test_a_log_of_another_name(sbatch: Path) -> None:
    assert "--output=/logs/%x-%j.txt" in directives("--log-file", "/logs/%x-%j.txt")
    assert "tail -F /logs/42.txt" in submit("--log-file", "/logs/%j.txt").stdout


def test_tasks_of_an_array_may_continue_a_run_in_turn() -> None:
    assert "--array=1-4%1" in directives("--array", "1-4%1")


def test_a_dry_run_prints_the_file_and_writes_nothing() -> None:
    done = submit("--dry-run", check=True)
    assert done.exit_code == 0
    assert done.stdout.startswith("#!/bin/bash\n")
    assert "Nothing is written or submitted. Without --dry-run: sbatch /" in done.stderr
    assert not Path("runs").exists()


def test_options_of_sbatch_go_on_as_they_are() -> None:
    found = directives("--partition", "gpu", "--gres=gpu:8", "--exclusive", "--cpus_per_task", "4", "--gpus", "16")
    assert found[2:7] == ["--partition=gpu", "--gres=gpu:8", "--exclusive", "--cpus-per-task=4", "--gpus=16"]
    assert directives("--sbatch=--x11", "--sbatch", "#SBATCH --array=1-4%1")[2:4] == ["--x11", "--array=1-4%1"]
    assert '--comment="a b"' in directives('--sbatch=#SBATCH --comment="a b"')
    assert "--job-name=mine" in (named := directives("--job-name", "mine"))
    assert "--job-name=my-model" not in named


def test_options_beside_settings_of_the_recipe() -> None:
    ours = ("--nodes", "4", "--devices", "8", "optimizer.lr=3e-4", "--optimizer.clip", "2", "batch.global=192")
    found = directives(*ours, "--time", "2-12", "--tasks=rank", "--min-nodes", "2")
    assert found[:4] == ["--job-name=my-model", "--nodes=2-4", "--ntasks-per-node=8", "--time=2-12"]


@pytest.mark.parametrize(
    ("words", "lead"),
    [
        ((), 300),
        (("--time", "4:00:00"), 300),
        (("--time", "8"), 240),
        (("--time", "8", "--lead", "100"), 100),
        (("--time", "UNLIMITED"), 300),
        (("--time", "0"), 300),
    ],
)
def test_the_signal_comes_early_enough(words: tuple[str, ...], lead: int) -> None:
    assert f"--signal=USR1@{lead}" in directives(*words)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 5400), ("1:30", 90), ("4:00:00", 14400), ("2-12", 216000), ("1-0:30", 88200), ("1-1:1:1", 90061)],
)
def test_times_in_the_forms_of_slurm(text: str, expected: int) -> None:
    assert slurm.seconds(text) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--time", "soon"), "Error: --time soon is not a Slurm time. Write 4:00:00"),
        (("--time",), "--time needs a value."),
        (("--time", "1", "--time", "2"), "--time is given twice"),
        (("--lead", "soon"), "--lead 'soon': it must be a whole number"),
        (("--time", "5", "--lead", "300"), "--lead 300 is not shorter than --time 5"),
        (("--tasks", "gpu"), "--tasks 'gpu': it must be one of node, rank"),
        (("--tasks", "rank"), "Give --devices N, the number of GPUs of one node."),
        (("--ntasks-per-node", "8"), "--ntasks-per-node cannot be given here. Use --tasks node"),
        (("--requeue=yes",), "--requeue takes no value"),
        (("--min-nodes", "2"), "--min-nodes 2 is more than --nodes 1"),
        (("--nodes", "4", "--min-nodes", "1", "batch.global=null"), "Set batch.global"),
        (("--tasks", "rank", "--devices", "2", "--restarts", "2"), "topology.restarts = 2 needs --tasks node"),
        (("--sbatch", "gres"), "--sbatch 'gres' is not an option"),
        (("--partiton", "gpu"), "neither an option nor a key of the recipe. Did you mean --partition? Options: --dev"),
        (("--ntaks", "8"), "Did you mean --ntasks?"),
        (("-N", "4"), "-N: options have long names here. Write --nodes."),
        (("-pgpu",), "-pgpu: options have long names here. Write --partition."),
        (("-n", "4"), "-n: options have long names here. Use --tasks node"),
        (("-o", "x.txt"), "Write --log-file."),
        (("--array", "1-4"), "write --array 1-4%1. For several runs, submit each with a name of its own"),
        (("--array", "1-4%2"), "--array 1-4%2 starts tasks that would train in the run folder of my-model"),
        (("--sbatch=-a 1,3",), "--array 1,3 starts tasks"),
        (("--output", "/x/%j.txt"), "The log of the job is named by --log-file /x/%j.txt."),
        (("optimizer.lrr=1",), "optimizer.lrr is not a known key (did you mean 'lr'?)"),
        (("--stage", "sft"), "recipe.yaml has no stages"),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(sbatch: Path, words: tuple[str, ...], message: str) -> None:
    assert message in refused(*words)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--nodes", "3"), "batch.global = 8 cannot be split evenly: 3 ranks x batch.per_device = 2 makes 6"),
        (("--nodes", "2", "--devices", "3", "--tasks", "rank"), "evenly: 6 ranks"),
        (("--nodes", "4", "--min-nodes", "2"), "The job may start with 3 ranks. batch.global = 8 cannot be split"),
        (("--nodes", "3", "topology.device=cuda"), "3 nodes with one rank each, or more. batch.global = 8 cannot"),
        (("topology.device=cuda", "--gpus-per-node", "h100:8"), "evenly: 8 ranks"),
        (("topology.device=cuda", "--gres", "gpu:8"), "evenly: 8 ranks"),
    ],
)
@pytest.mark.parametrize("check", [False, True])
def test_a_batch_that_cannot_be_split_never_waits_in_a_queue(
    sbatch: Path, words: tuple[str, ...], problem: str, check: bool
) -> None:
    assert problem in refused(*words, check=check)


def test_the_batch_of_every_stage_is_looked_at() -> None:
    words = ["submit", "staged", "--on", "slurm", "--no-check", "--dry-run", "--devices", "7"]
    done = CliRunner().invoke(app, [*words, "--stage", "reasoning", "batch.global=7", "batch.per_device=1"])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(app, [*words, "batch.global=8"])
    assert done.exit_code == 2
    assert "batch.global = 8 cannot be split evenly: 7 ranks" in done.stderr


class Greedy(Engine):
    """An engine of a user with a field that the command itself takes."""

    restarts: int = 3

    def job(self, request: Request) -> Job:
        raise AssertionError

    def submit(self, job: Job, folder: Path) -> Submitted:
        raise AssertionError


def test_no_option_of_an_engine_is_taken_by_the_command_before_it() -> None:
    for name in kinds(Engine):
        said = refused("--no-such-option", on=name)
        listed = said.partition("Options: ")[2].partition(". ")[0].split(", ")
        assert sorted(listed) == sorted(set(listed)), name
    said = refused(on=f"{__name__}.Greedy")
    assert "--restarts is an option of fullshard submit itself" in said


def test_data_and_model_are_looked_at_before_a_job_waits_for_hours(sbatch: Path) -> None:
    Path("train.txt").unlink()
    assert "train.txt" in refused(check=True)


def test_an_engine_that_does_not_exist() -> None:
    said = refused(on="slrum")
    assert "--on slrum is not known. Known: " in said
    assert "did you mean 'slurm'?" in said


def test_without_slurm_it_says_so_and_where_the_files_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = submit()
    assert done.exit_code == 2
    assert "sbatch is not installed here. Submit from a machine of the cluster" in done.stderr
    assert done.stderr.endswith(f"\nThe job files are in {tmp_path}/runs/my-model/submit-1.\n")


def test_sbatch_says_why_it_refuses(sbatch: Path) -> None:
    sbatch.write_text("#!/bin/bash\necho 'sbatch: error: invalid partition specified: gpu' >&2\nexit 1\n")
    done = submit("--partition", "gpu")
    assert done.exit_code == 2
    assert "sbatch refused the job: sbatch: error: invalid partition specified: gpu." in done.stderr


def test_one_job_trains_all_stages_or_one() -> None:
    for words in ((), ("--stage", "reasoning")):
        words = ("submit", "staged", "--on", "slurm", "--no-check", "--dry-run", *words)
        done = CliRunner().invoke(app, list(words), catch_exceptions=False)
        assert done.exit_code == 0, done.output
        assert done.stdout.count("#!/bin/bash") == 1
        assert ("--stage reasoning" in done.stdout) == ("--stage" in words)


@pytest.mark.parametrize(
    ("words", "nodes"),
    [
        (("llm", "--fsdp-config", "single_node_fsdp", "--devices", "8"), 1),
        (("llm", "--fsdp-config", "multi_node_fsdp", "--num-nodes", "4", "--devices", "8"), 4),
        (("llm", "--fsdp-config", "large_scale_fsdp", "--num-nodes", "8", "--devices", "8"), 8),
        (("staged", "--stage", "stage2", "--fsdp-config", "multi_node_fsdp", "--devices", "8"), 4),
    ],
)
def test_presets_and_stages_by_the_flags_of_other_scripts(words: tuple[str, ...], nodes: int) -> None:
    options = ("--on", "slurm", "--tasks", "rank", "--no-check", "--dry-run", "batch.global=null")
    done = CliRunner().invoke(app, ["submit", *words, *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert f"#SBATCH --nodes={nodes}\n#SBATCH --ntasks-per-node=8\n" in done.stdout


def test_help_lists_every_option_of_the_engine() -> None:
    said = CliRunner().invoke(app, ["submit", "--help-on", "slurm"]).stdout
    for name in (*slurm.Slurm.model_fields, *slurm.Slurm.own_options):
        assert name == "passed" or f"--{name.replace('_', '-')}" in said
