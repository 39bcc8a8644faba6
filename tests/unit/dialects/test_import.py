"""Files of other trainers mean here what they mean there: imported, read directly, and planned by a dry run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.commands.dry_run import describe
from fullshard.config.part import flat, plain
from fullshard.contracts.launcher import Ranks
from fullshard.dialects.files import translated
from fullshard.errors import RecipeError
from fullshard.recipes.read import Reading, read
from tests.small import model_folder, token_file
from tests.unit.dialects import foreign_files
from tests.unit.dialects.foreign_files import ACCELERATE, AXOLOTL, DEEPSPEED, TRAINING_ARGUMENTS


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and data."""
    folder = tmp_path_factory.mktemp("foreign")
    model_folder(folder / "model")
    token_file(folder / "train.jsonl", records=60)
    return folder


def values_of(reading: Reading) -> dict[str, Any]:
    values = flat(plain(reading.recipe))
    return values | {key: None for key in ("model.lora", "sharding.wrap") if key not in values}


def means(reading: Reading, expected: dict[str, Any]) -> None:
    values = values_of(reading)
    found = {key: values.get(key, "nothing") for key in expected}
    assert found == expected


def small_recipe(place: Path) -> dict[str, Any]:
    data = {"train": str(place / "train.jsonl"), "sequence_length": 48, "cache": str(place / "cache")}
    return {"model": {"path": str(place / "model")}, "data": data}


def plan(reading: Reading) -> str:
    return describe(reading, ranks=Ranks(2))


def imported(folder: Path, *files: Path) -> Path:
    target = folder / f"{files[0].stem}.imported.yaml"
    target.unlink(missing_ok=True)
    before = {file: file.read_bytes() for file in files}
    result = CliRunner().invoke(app, ["import", *map(str, files), "-o", str(target)])
    assert result.exit_code == 0, result.output
    assert {file: file.read_bytes() for file in files} == before
    return target


@pytest.mark.parametrize("case", ACCELERATE)
def test_accelerate(case: str, place: Path) -> None:
    text, expected = ACCELERATE[case]
    file = place / "accelerate.yaml"
    file.write_text(text)
    base = small_recipe(place)
    direct = read(base, launch_file=str(file))
    means(direct, expected)
    again = read({**base, **yaml.safe_load(imported(place, file).read_text())})
    assert plain(again.recipe) == plain(direct.recipe)
    assert "steps" in plan(read(base, "topology.device=cpu", "precision=fp32", launch_file=str(file)))


@pytest.mark.parametrize("case", TRAINING_ARGUMENTS)
def test_training_arguments(case: str, place: Path) -> None:
    text, expected = TRAINING_ARGUMENTS[case]
    is_json = text.startswith("{")
    values = json.loads(text) if is_json else yaml.safe_load(text)
    values |= {"model_name_or_path": str(place / "model"), "train_file": str(place / "train.jsonl")}
    file = place / ("arguments.json" if is_json else "arguments.yaml")
    file.write_text(json.dumps(values) if is_json else yaml.safe_dump(values))
    check(place, file, expected)


def test_arguments_that_transformers_wrote_down_are_read_whole(place: Path) -> None:
    """Every field with its value: nothing is refused, and it is the same run as the few that were given."""
    from transformers import TrainingArguments

    given: dict[str, Any] = {"per_device_train_batch_size": 4, "learning_rate": 1e-4, "max_grad_norm": 0.5}
    names = {"model_name_or_path": str(place / "model"), "train_file": str(place / "train.jsonl")}
    whole = json.loads(TrainingArguments(output_dir="out/x", use_cpu=True, **given).to_json_string())
    long = read(str(write(place, "long.json", json.dumps(whole | names)))).recipe
    short = read(str(write(place, "short.json", json.dumps(given | names | {"output_dir": "out/x"})))).recipe
    for section in ("model", "data", "batch", "duration", "optimizer", "schedule", "seed", "name", "output"):
        changes = {"accumulate": 1} if section == "batch" else {}
        one, other = getattr(long, section), getattr(short, section)
        assert one == (other.model_copy(update=changes) if changes else other), section


def test_a_token_in_a_file_stays_secret(place: Path) -> None:
    file = write(place, "secret.yaml", "num_train_epochs: 1\nhub_token: hf_secret\n")
    out = place / "secret.imported.yaml"
    out.unlink(missing_ok=True)
    shown = CliRunner().invoke(app, ["import", str(file), "-o", str(out)]).output
    assert "hub_token" in shown
    assert "hf_secret" not in shown + out.read_text()
    base = ("model.path=m", "data.train=d")
    assert not [line for line in read(str(file), *base).overridden if "hf_secret" in line]


def test_machines_meet_where_accelerates_file_says(place: Path) -> None:
    from fullshard.commands.recipe_arguments import RecipeArguments
    from fullshard.dist.env import Launch

    text = foreign_files.fsdp1(machines=2, processes=4).replace("machine_rank: 0", "machine_rank: 1")
    file = write(place, "nodes.yaml", text + "main_process_ip: 10.0.0.1\nmain_process_port: 29501\n")
    asked = RecipeArguments("quickstart", config_file=str(file))
    topology = read("quickstart", launch_file=str(file)).recipe.topology
    ranks = asked.ranks(topology, Launch("none"))
    assert (ranks.nodes, ranks.per_node, ranks.node_rank, ranks.master) == (2, 2, 1, "10.0.0.1:29501")
    other = RecipeArguments("quickstart", config_file=str(file), node_rank=0, master="10.0.0.2:1234")
    found = other.ranks(topology, Launch("none"))
    assert (found.node_rank, found.master) == (0, "10.0.0.2:1234")


@pytest.mark.parametrize("case", AXOLOTL)
def test_axolotl(case: str, place: Path) -> None:
    text, expected = AXOLOTL[case]
    datasets = [{"path": str(place / "train.jsonl"), "type": "completion"}]
    file = place / "axolotl.yaml"
    file.write_text(yaml.safe_dump({"base_model": str(place / "model"), "datasets": datasets}) + text)
    check(place, file, expected, "data.encode=null")


@pytest.mark.parametrize("case", DEEPSPEED)
def test_deepspeed(case: str, place: Path) -> None:
    text, expected = DEEPSPEED[case]
    file = place / "ds_config.json"
    file.write_text(text)
    base = small_recipe(place)
    reading = read(base, launch_file=str(file))
    means(reading, expected)
    again = read({**base, **yaml.safe_load(imported(place, file).read_text())})
    assert plain(again.recipe) == plain(reading.recipe)
    assert "steps" in plan(read(base, "topology.device=cpu", "precision=fp32", launch_file=str(file)))


def check(place: Path, file: Path, expected: dict[str, Any], *changes: str) -> None:
    """A training file read directly and its import are the same recipe, which means what is expected and can be run."""
    direct, again = read(str(file)), read(str(imported(place, file)))
    means(direct, expected)
    assert plain(again.recipe) == plain(direct.recipe)
    small = (f"data.cache={place / 'cache'}", "data.sequence_length=48", "topology.device=cpu", "precision=fp32")
    text = plan(read(str(file), *small, *changes))
    assert f"# {file} is read as a file of" in text


def test_enough_of_each_is_tried() -> None:
    assert (len(ACCELERATE) >= 12, len(TRAINING_ARGUMENTS) >= 6, len(AXOLOTL) >= 4, len(DEEPSPEED) >= 4) == (True,) * 4
    for table in (ACCELERATE, TRAINING_ARGUMENTS, AXOLOTL, DEEPSPEED):
        assert len({text for text, _ in table.values()}) == len(table)


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_torchtune(place: Path) -> None:
    file = write(place, "tune.yaml", foreign_files.TORCHTUNE.replace("MODEL", str(place / "model")))
    file.write_text(file.read_text().replace("DATA", str(place / "train.jsonl")))
    expected = {
        "model.lora.r": 8,
        "model.lora.targets": ["q_proj", "v_proj"],
        "batch.per_device": 2,
        "batch.accumulate": 32,
        "optimizer.lr": 3e-4,
        "optimizer.weight_decay": 0.01,
        "optimizer.betas": [0.9, 0.999],
        "optimizer.clip": None,
        "schedule.kind": "cosine",
        "schedule.warmup": 100,
        "precision": "bf16",
        "data.holdout": 0,
        "data.pack": False,
        "data.sequence_length": 2048,
    }
    check(place, file, expected)


def test_torchtune_without_adapters_keeps_its_weights_in_bf16(place: Path) -> None:
    text = foreign_files.TORCHTUNE.replace("lora_llama3_1_8b", "llama3_1_8b")
    lines = [line for line in text.splitlines() if "lora_" not in line or "_component_" in line]
    reading = read(str(write(place, "full.yaml", "\n".join(lines))))
    means(reading, {"precision": "bf16-pure", "model.lora": None})


def test_llama_factory(place: Path) -> None:
    (place / "data").mkdir(exist_ok=True)
    (place / "data" / "dataset_info.json").write_text('{"identity": {"file_name": "../train.jsonl"}}')
    file = write(place, "factory.yaml", foreign_files.LLAMA_FACTORY.replace("MODEL", str(place / "model")))
    file.write_text(file.read_text().replace("DATA", str(place / "data")))
    expected = {
        "model.lora.r": 8,
        "model.lora.alpha": 16,
        "model.lora.targets": "all-linear",
        "data.sequence_length": 2048,
        "batch.accumulate": 8,
        "optimizer.lr": 1e-4,
        "duration.epochs": 3.0,
        "schedule.warmup": 0.1,
        "sharding.strategy": "full",
        "checkpoint.every_steps": 500,
        "name": "sft",
    }
    check(place, file, expected)
    limited = write(place, "limited.yaml", f"{file.read_text()}\nmax_samples: 5\n")
    means(read(str(limited)), {"data.train.limit": 5})


def test_torchtitan(place: Path) -> None:
    file = write(place, "titan.toml", foreign_files.TORCHTITAN.replace("DATA", str(place / "train.jsonl")))
    expected = {
        "model.architecture": "llama",
        "model.size": "tiny",
        "optimizer.lr": 8e-4,
        "schedule.kind": "linear",
        "schedule.warmup": 2,
        "duration.steps": 10,
        "batch.per_device": 2,
        "sharding.strategy": "full",
        "sharding.activation_checkpointing": "selective",
        "precision": "bf16",
        "checkpoint.every_steps": 5,
        "log.every_steps": 3,
    }
    check(place, file, expected, "model.overrides={vocab_size: 97}")


def test_lightning(place: Path) -> None:
    file = write(place, "cli.yaml", foreign_files.LIGHTNING)
    base = (f"model.path={place / 'model'}", f"data.train={place / 'train.jsonl'}")
    expected = {
        "topology.devices": 4,
        "topology.device": "cuda",
        "sharding.strategy": "grad_op",
        "sharding.cpu_offload": True,
        "precision": "bf16",
        "duration.epochs": 3,
        "batch.accumulate": 2,
        "optimizer.clip": None,
        "seed": 7,
    }
    means(read(str(file), *base), expected)
    written = yaml.safe_load(imported(place, file).read_text())
    assert written["topology"] == {"devices": 4, "device": "cuda", "nodes": 1}


def test_a_flat_embedding_file_beside_accelerate(place: Path) -> None:
    train = write(place, "embedding.yaml", foreign_files.EMBEDDING)
    launcher = write(place, "launch.yaml", ACCELERATE["version 1, offloaded, whole checkpoints"][0])
    expected = {
        "model.kind": "sentence_transformer",
        "model.path": "Qwen/Qwen3-VL-Embedding-8B",
        "model.lora.r": 16,
        "model.lora.dropout": 0.05,
        "objective.kind": "contrastive",
        "data.train.path": "data/train.jsonl",
        "data.validation.path": "data/val.jsonl",
        "output": ".",
        "name": "output",
        "batch.per_device": 16,
        "duration.epochs": 3,
        "optimizer.lr": 2e-5,
        "sharding.strategy": "full",
        "sharding.cpu_offload": True,
        "sharding.activation_checkpointing": "full",
        "topology.devices": 2,
        "precision": "bf16",
        "checkpoint.format": "full",
    }
    direct = read(str(train), launch_file=str(launcher))
    means(direct, expected)
    assert plain(read(str(imported(place, train, launcher))).recipe) == plain(direct.recipe)
    more = write(
        place,
        "more.yaml",
        foreign_files.EMBEDDING + "use_mrl: true\nmrl_dims: [1024, 512]\nuse_gradient_cache: true\nsave_steps: 100\n"
        "optim: adamw_8bit\nattn_implementation: sdpa\ntorch_dtype: bfloat16\n",
    )
    means(
        read(str(more)),
        {
            "objective.matryoshka.dims": [1024, 512],
            "objective.cache.chunk": 8,
            "checkpoint.every_steps": 100,
            "optimizer.kind": "adamw_8bit",
            "model.attention": "sdpa",
            "precision": "bf16",
        },
    )


def test_a_staged_config_becomes_stages(place: Path) -> None:
    file = write(place, "config.yaml", foreign_files.STAGED)
    before = file.read_bytes()
    reading = read(str(file))
    stages = reading.recipe.stages
    assert stages is not None
    assert [stage.name for stage in stages] == ["stage1", "stage2"]
    first, second = (flat(plain(stage)) for stage in stages)
    wanted = {
        "sharding.strategy": ("full", "grad_op"),
        "sharding.cpu_offload": (False, True),
        "sharding.activation_checkpointing": ("full", "none"),
        "topology.devices": (8, 4),
        "batch.per_device": (8, 2),
        "batch.accumulate": (4, None),
        "optimizer.lr": (1e-6, 5e-6),
        "duration.epochs": (1, 2),
        "model.size": ("1.7B", "1.7B"),
        "precision": ("bf16", "bf16"),
    }
    assert {key: (first[key], second[key]) for key in wanted} == wanted
    assert reading.recipe.log.debug
    assert first["log.sinks"][0]["tags"] == ["fsdp", "multi-node"]
    assert plain(read(str(imported(place, file))).recipe) == plain(reading.recipe)
    assert file.read_bytes() == before


def test_one_stage_alone_is_the_recipe(place: Path) -> None:
    values = yaml.safe_load(foreign_files.STAGED)
    del values["training_stages"]["stage2"]
    file = write(place, "one.yaml", yaml.safe_dump(values))
    means(
        read(str(file)), {"topology.devices": 8, "sharding.strategy": "full", "duration.epochs": 1, "log.debug": True}
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fsdp: {cpu_offload: true}", {"sharding.cpu_offload": True}),
        ("fsdp: {activation_checkpointing: true}", {"sharding.activation_checkpointing": "full"}),
        ("training: {batch_size: 2}", {"batch.per_device": 2}),
        ("training: {gradient_accumulation_steps: 4}", {"batch.accumulate": 4}),
        ("distributed_examples: {mine: {strategy: fsdp, num_nodes: 4, devices: 8}}", {"topology.nodes": 4}),
        ("fsdp_offload_params: true\nfsdp_cpu_ram_efficient_loading: true", {"sharding.cpu_offload": True}),
    ],
)
def test_a_piece_of_a_file_is_recognised_too(place: Path, text: str, expected: dict[str, Any]) -> None:
    done = translated(write(place, "piece.yaml", text))
    assert done is not None
    assert not done.refused
    assert {key: done.settings[key] for key in expected} == expected


# What is printed and refused


def test_every_key_is_shown_with_its_verdict(place: Path) -> None:
    text = (
        "base_model: m\ndatasets: [{path: d.jsonl}]\ntf32: true\nlearning_rate: 1e-4\nseed: 3\nrl: dpo\n"
        "gradient_checkpointing_kwargs: {use_reentrant: true}\nsome_new_key: 1\n"
    )
    file = write(place, "axolotl.yml", text)
    out = place / "shown.yaml"
    out.unlink(missing_ok=True)
    shown = CliRunner().invoke(app, ["import", str(file), "-o", str(out)])
    assert shown.exit_code == 0, shown.output
    for line in (
        "renamed    base_model: m ",
        "kept       seed: 3 ",
        "default    micro_batch_size (left out: 1) ",
        "no effect  gradient_checkpointing_kwargs: {use_reentrant: true} ",
        "refused    rl: dpo ",
        "refused    some_new_key: 1 ",
    ):
        assert line in shown.output
    written = out.read_text()
    assert "# refused: rl: dpo: preference training is not available." in written
    assert "path: m  # base_model" in written
    with pytest.raises(RecipeError, match=r"some_new_key: no key of axolotl that fullshard knows") as caught:
        read(str(file))
    assert "rl: preference training is not available" in str(caught.value)
    assert "fullshard import" in str(caught.value)


def test_an_existing_recipe_is_not_overwritten(place: Path) -> None:
    file = write(place, "args.yaml", "num_train_epochs: 1\n")
    out = write(place, "mine.yaml", "mine")
    result = CliRunner().invoke(app, ["import", str(file), "-o", str(out)])
    assert isinstance(result.exception, SystemExit)
    assert out.read_text() == "mine"
    assert "exists and will not be overwritten" in result.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_train_epochs: 1\nbf16: true\nfp16: true\n", "bf16: true and fp16: true both set precision"),
        ("num_train_epochs: 1\noptim: adafactor\n", "optim: adafactor is not here. Known: adamw, adamw_8bit, muon"),
        ("num_train_epochs: 1\nlearning_rte: 1\n", "Did you mean learning_rate?"),
        ("base_model: m\nadapter: qlora\nlearning_rate: 1e-4\n", "adapter: qlora is not available"),
        ("base_model: m\nload_in_4bit: true\nlearning_rate: 1e-4\n", "quantised weights are not trained"),
        ("training_stages: {a: {distributed: {strategy: deepspeed}}}\n", "say the ZeRO stage"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_reason(place: Path, text: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read(str(write(place, "bad.yaml", text)))
    assert message in str(caught.value)


def test_what_is_no_file_of_a_trainer_is_said(place: Path) -> None:
    result = CliRunner().invoke(app, ["import", str(write(place, "x.yaml", "a: 1\n"))])
    assert "is not a file of a trainer that fullshard knows" in result.output
    with pytest.raises(RecipeError, match="which says what is trained: give it as the recipe"):
        read("quickstart", launch_file=str(write(place, "y.yaml", "num_train_epochs: 1\nbf16: true\n")))
    with pytest.raises(RecipeError, match="is not a file of accelerate or DeepSpeed"):
        read("quickstart", launch_file=str(write(place, "z.yaml", "model: m\ndata: {train: d}\n")))


def test_a_launchers_file_alone_is_explained(place: Path) -> None:
    file = write(place, "alone.yaml", foreign_files.fsdp1())
    with pytest.raises(RecipeError, match=f"fullshard train RECIPE --config-file {file}"):
        read(str(file))
    result = CliRunner().invoke(app, ["train", "quickstart", str(file), "--dry-run"])
    assert f"A launcher's file is given as --config-file {file}." in result.output


def test_two_training_files_that_disagree_are_an_error(place: Path) -> None:
    one = write(place, "one_of.yaml", "num_train_epochs: 1\n")
    two = write(place, "two_of.yaml", "num_train_epochs: 2\n")
    result = CliRunner().invoke(app, ["import", str(one), str(two)])
    assert "both set duration.epochs: 1 and 2" in result.output


def test_a_recipe_of_ours_is_not_taken_for_another_trainers(place: Path) -> None:
    file = write(place, "ours.yaml", "model: m\ndata: {train: d}\nlearning_rate: 1e-4\n")
    with pytest.raises(RecipeError, match=r"learning_rate is not a known key. Here it is optimizer.lr"):
        read(str(file))
