"""Every open kind takes a user's own class by its dotted name: the test writes one small file, trains with it on real
ranks, and shows by the run's own numbers that the part did the work."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

import fullshard
from fullshard.errors import RecipeError
from tests.extension.with_parts import train_with
from tests.near import assert_near
from tests.ranks import RankPool
from tests.small import curve, model_folder, recipe, token_file

Train = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("extension")
    model_folder(path / "model")
    token_file(path / "train.jsonl", records=48)
    return path


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, on the path of this process."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def run(ranks: RankPool, folder: Path, parts: Path) -> Train:
    """Trains three steps; gives the records of metrics.jsonl. `model` replaces the small one."""

    def train(
        name: str, *, world: int = 2, model: dict[str, Any] | None = None, **sections: Any
    ) -> list[dict[str, Any]]:
        settings = recipe(folder, name=name, duration={"steps": 3}, **sections)
        settings["model"] = model or settings["model"]
        records: list[dict[str, Any]] = ranks.run(train_with, str(parts), settings, world=world)[0]
        return records

    return train


def rows(folder: Path) -> list[list[int]]:
    return [json.loads(line)["input_ids"] for line in (folder / "train.jsonl").read_text().splitlines()]


def padded(some: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and next-token targets."""
    longest = max(map(len, some))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in some])
    targets = torch.tensor([row[1:] + [-100] * (longest - len(row) + 1) for row in some])
    return ids, targets


def loss_of(logits: torch.Tensor, targets: torch.Tensor, **settings: Any) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, **settings)


OBJECTIVE = """
from typing import ClassVar
import torch
from torch.nn.functional import cross_entropy
from fullshard import Objective, Terms

class Smoothed(Objective):
    needs: ClassVar[tuple[str, ...]] = ("input_ids", "position_ids", "labels")
    smoothing: float = 0.1

    def count(self, batch):
        return int((batch["labels"] != -100).sum())

    def loss(self, model, batch, aux):
        # Positions start again at 0 with each document of a packed row; labels are shifted already.
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits.flatten(0, 1)
        targets = batch["labels"].flatten()
        loss = cross_entropy(logits, targets, ignore_index=-100, reduction="sum", label_smoothing=self.smoothing)
        real = targets != -100
        likeliest = logits.softmax(-1).amax(-1)[real].sum()
        return Terms(loss, {"confidence": (likeliest.detach(), real.sum())})
"""


def test_objective(run: Train, parts: Path, folder: Path) -> None:
    (parts / "my_objective.py").write_text(OBJECTIVE)
    records = run("objective", objective={"kind": "my_objective.Smoothed", "smoothing": 0.2})
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    ids, targets = padded(rows(folder)[:16])
    logits = model(input_ids=ids).logits.detach()
    confidence = logits.softmax(-1).amax(-1)[targets != -100].mean()
    expected = (loss_of(logits, targets, label_smoothing=0.2).item(), confidence.item())
    assert curve(records, "loss", "confidence")[0] == pytest.approx(expected, rel=1e-6)


def test_objective_on_packed_rows(run: Train, parts: Path, folder: Path) -> None:
    """Packed rows give what the documents give by themselves."""
    (parts / "packed_objective.py").write_text(OBJECTIVE)
    objective = {"kind": "packed_objective.Smoothed", "smoothing": 0.2}
    batch = {"per_device": 1, "global": 4}
    records = run("packed", objective=objective, data={"pack": True, "sequence_length": 64}, batch=batch)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    stream, wanted, taken = rows(folder), 4 * 64, []
    for row in stream:  # documents end to end; one that a row end cuts goes on in the next row, from position 0
        taken.append(row)
        if sum(map(len, taken)) >= wanted:
            break
    losses = []
    for piece, targets in pieces(taken, row_length=64, rows=4):
        logits = model(input_ids=torch.tensor([piece])).logits.detach()
        losses.append(loss_of(logits, torch.tensor([targets]), label_smoothing=0.2, reduction="none").flatten())
    every = torch.cat(losses)
    assert curve(records, "loss")[0][0] == pytest.approx(every[every != 0].mean().item(), rel=1e-6)


def pieces(documents: list[list[int]], *, row_length: int, rows: int) -> list[tuple[list[int], list[int]]]:
    """The documents and parts of documents in packed rows, with their targets."""
    found, at = [], 0
    for document in documents:
        targets, start = [*document[1:], -100], 0
        while start < len(document) and at < rows * row_length:
            stop = min(len(document), start + row_length - at % row_length)
            found.append((document[start:stop], targets[start:stop]))
            at, start = at + stop - start, stop
    return found


WRONG = {
    "leaking": ("model(input_ids=batch['input_ids']).logits", "labels", True, "a document in a packed row changes"),
    "shifted": (
        "model(input_ids=batch['input_ids'], position_ids=batch['position_ids']).logits[:, :-1]",
        "labels[:, 1:]",
        False,
        "Labels are shifted already",
    ),
    "ahead": (
        "model(input_ids=batch['input_ids'], position_ids=batch['position_ids']).logits.roll(-1, dims=1)",
        "labels",
        False,
        "sees later tokens",
    ),
    "counting_padding": (
        "model(input_ids=batch['input_ids'], position_ids=batch['position_ids']).logits",
        "labels.clamp(min=0)",
        False,
        "loss of a row without any label",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_objective_that_is_wrong_is_refused_before_step_1(run: Train, parts: Path, folder: Path, name: str) -> None:
    """What comes of code that was written for Transformers' Trainer: the loss goes down, and the model is wrong."""
    call, labels, pack, said = WRONG[name]
    text = OBJECTIVE[: OBJECTIVE.index("        # Positions")] + (
        f"        logits = {call}\n"
        f"        targets = batch['labels']{labels.removeprefix('labels')}\n"
        "        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction='sum')\n"
        "        return Terms(loss)\n"
    )
    (parts / f"{name}_objective.py").write_text(text)
    with pytest.raises(AssertionError, match=said):
        run(name, objective={"kind": f"{name}_objective.Smoothed"}, data={"pack": pack})
    if name == "leaking":  # without packing it is right
        assert len(curve(run("alone", objective={"kind": f"{name}_objective.Smoothed"}), "loss")) == 3


FAMILY = """
import json
import torch
from torch import nn
from safetensors.torch import save_file
from fullshard import Family

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)

    def forward(self, x):
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return x + torch.tanh(self.mix(self.norm(past)))

class Averager(nn.Module):
    def __init__(self, vocabulary, width, layers):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids, position_ids=None):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

class Averagers(Family):
    vocabulary: int
    width: int = 24
    layers: int = 3

    def build(self, *, processor):
        with torch.device("meta"):
            return Averager(self.vocabulary, self.width, self.layers)

    def initialise(self, unit, *, root):
        for module in unit.modules():
            if hasattr(module, "reset_parameters") and not any(p.is_meta for p in module.parameters()):
                module.reset_parameters()

    def export(self, module, tensors, folder, *, processor):
        folder.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in tensors}, folder / "averager.safetensors")
        (folder / "averager.json").write_text(json.dumps(self.model_dump()))
"""


def test_model_family(run: Train, parts: Path, folder: Path) -> None:
    (parts / "my_family.py").write_text(FAMILY)
    settings: dict[str, Any] = {
        "model": {"kind": "my_family.Averagers", "vocabulary": 97},
        "data": {"validation": str(folder / "train.jsonl")},
        "evaluate": {"parts": ["loss"]},
    }
    one, two = run("family-1", world=1, **settings), run("family-2", world=2, **settings)
    for found, expected in zip(curve(two, "loss", "grad_norm"), curve(one, "loss", "grad_norm"), strict=True):
        assert found == pytest.approx(expected, rel=2e-6)
    units = json.loads((folder / "runs" / "family-2" / "units.json").read_text())["units"]
    assert [(unit["name"], unit["class_name"]) for unit in units] == [
        ("blocks.0", "Block"),
        ("blocks.1", "Block"),
        ("blocks.2", "Block"),
        ("(root)", "Averager"),
    ]
    # The exported weights in the user's own module, without fullshard, have the validation loss that the run logged.
    import my_family  # type: ignore[import-not-found]

    model = my_family.Averager(97, 24, 3)
    model.load_state_dict(load_file(folder / "runs" / "family-2" / "model" / "averager.safetensors"))
    ids, targets = padded(rows(folder))
    logged = [record for record in two if record["kind"] == "validation"][-1]
    assert loss_of(model(ids), targets).item() == pytest.approx(logged["loss"], rel=1e-6)


SOURCE = """
from fullshard import Source

class Opened:
    def __init__(self, first, count, broken):
        self.first, self.count, self.broken = first, count, broken

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index == self.broken:
            return {"nothing": 0}
        return {"input_ids": [(self.first + index * k) % 97 for k in range(3 + index % 5)]}

    def where(self, index):
        return f"sequence number {index}"

    def fingerprint(self):
        return f"sequences {self.first} {self.count} {self.broken}"

class Sequences(Source):
    first: int = 1
    count: int
    broken: int | None = None

    def open(self):
        return Opened(self.first, self.count, self.broken)
"""


def test_data_source(run: Train, parts: Path, folder: Path) -> None:
    (parts / "my_source.py").write_text(SOURCE)
    found = run("source", data={"train": {"kind": "my_source.Sequences", "first": 5, "count": 40}})
    import my_source  # type: ignore[import-not-found]

    file = parts / "same.jsonl"
    file.write_text(
        "".join(json.dumps(row) + "\n" for row in map(my_source.Opened(5, 40, None).__getitem__, range(40)))
    )
    expected = run("same-from-a-file", data={"train": str(file)})
    assert curve(found, "loss", "grad_norm", "tokens") == curve(expected, "loss", "grad_norm", "tokens")


def test_a_data_source_says_where_a_bad_record_is(parts: Path, folder: Path) -> None:
    (parts / "my_broken_source.py").write_text(SOURCE)
    settings = recipe(
        folder, name="broken", data={"train": {"kind": "my_broken_source.Sequences", "count": 40, "broken": 7}}
    )
    with pytest.raises(fullshard.DataError, match="sequence number 7: no 'text' or 'input_ids' in the record"):
        fullshard.train(fullshard.read(settings))


COUNTED = SOURCE.replace(
    "    def open(self):\n",
    """    diary: str

    def open(self):
        import os
        with open(self.diary, "a") as file:
            file.write(f"{os.getpid()}\\n")
""",
)


@pytest.mark.parametrize("world", [1, 2])
def test_each_rank_opens_a_source_once(run: Train, parts: Path, world: int) -> None:
    """Tokenizer, encoding, fingerprint and list of files all use the same open source."""
    (parts / f"counted_{world}.py").write_text(COUNTED)
    sources = {
        name: {"kind": f"counted_{world}.Sequences", "first": first, "count": 40, "diary": str(parts / name)}
        for name, first in (("train", 5), ("validation", 6))
    }
    run(f"counted-{world}", world=world, data=sources)
    for name in sources:
        opened = (parts / name).read_text().split()
        assert len(opened) == len(set(opened)) == world, name


ENCODER = """
import numpy as np
from fullshard import Encoder
from fullshard.text.tokens import collate_tokens

class Digits(Encoder):
    base: int = 10

    def encode(self, record, processor, *, length):
        digits, number = [], record["number"]
        while number:
            digits.append(number % self.base)
            number //= self.base
        ids = np.array(digits, dtype=np.int32)
        return [{"input_ids": ids, "labels": np.append(ids[1:], -100).astype(np.int32)}]

    def collate(self, samples, *, length):
        return collate_tokens(samples, length=length)
"""

STATEFUL = """
import numpy as np
from fullshard import Collator, Encoder, OpenEncoder, token_samples
from fullshard.text.tokens import collate_tokens

class Mirrored(Encoder):
    def open(self, processor, *, length):
        return OpenMirrored(self, processor, length=length)

class OpenMirrored(OpenEncoder):
    def encode(self, record):
        ids = 96 - np.array(record["input_ids"], dtype=np.int32)
        labels = np.append(ids[1:], -100).astype(np.int32)
        return token_samples([{"input_ids": ids, "labels": labels}], length=self.length)

    def collator(self, store):
        return MirroredCollator(self.settings, most=int(store.flat("input_ids").max()))

class MirroredCollator(Collator):
    def __init__(self, settings, most):
        super().__init__(settings)
        self.most = most

    def collate(self, samples, *, length):
        back = [
            {**s, "input_ids": self.most - s["input_ids"],
             "labels": np.where(s["labels"] == -100, -100, self.most - s["labels"])}
            for s in samples
        ]
        return collate_tokens(back, length=length)
"""


def test_encoder_with_a_collator_that_measures_the_data(run: Train, parts: Path, folder: Path) -> None:
    (parts / "my_stateful.py").write_text(STATEFUL)
    found = run("stateful", data={"encode": "my_stateful.Mirrored"})
    assert min(map(min, rows(folder))) == 0, "so that the measured number undoes the reflection"
    expected = run("plain", data={})
    assert curve(found, "loss", "grad_norm", "tokens") == curve(expected, "loss", "grad_norm", "tokens")


def test_encoder(run: Train, parts: Path) -> None:
    (parts / "my_encoder.py").write_text(ENCODER)
    numbers = [7**k for k in range(4, 52)]
    (parts / "numbers.jsonl").write_text("".join(json.dumps({"number": number}) + "\n" for number in numbers))
    (parts / "digits.jsonl").write_text(
        "".join(json.dumps({"input_ids": digits(number, base=16)}) + "\n" for number in numbers)
    )
    train = {"train": str(parts / "numbers.jsonl"), "encode": {"kind": "my_encoder.Digits", "base": 16}}
    found = run("encoder", data=train)
    expected = run("encoded-before", data={"train": str(parts / "digits.jsonl")})
    assert curve(found, "loss", "grad_norm", "tokens") == curve(expected, "loss", "grad_norm", "tokens")


def digits(number: int, *, base: int) -> list[int]:
    return [] if number == 0 else [number % base, *digits(number // base, base=base)]


def test_an_objective_that_needs_what_the_encoder_does_not_give(parts: Path, folder: Path) -> None:
    (parts / "my_needy.py").write_text(OBJECTIVE.replace('"labels")', '"labels", "weights")'))
    settings = recipe(folder, name="needy", objective={"kind": "my_needy.Smoothed"})
    with pytest.raises(
        fullshard.DataError, match=r"my_needy.Smoothed needs weights in a batch, and the encoder text gives "
    ):
        fullshard.train(fullshard.read(settings))


SINK = """
import json
from fullshard import OpenSink, Sink

class Opened(OpenSink):
    def __init__(self, file, header):
        self.file = file
        self.write(header)

    def write(self, record):
        self.file.write(json.dumps(record) + "\\n")

    def close(self):
        self.file.write("closed")
        self.file.close()

class Lines(Sink):
    path: str

    def open(self, folder, *, name, recipe):
        return Opened(open(self.path, "x"), {"name": name, "lr": recipe["optimizer"]["lr"]})
"""


def test_sink(run: Train, parts: Path) -> None:
    (parts / "my_sink.py").write_text(SINK)
    # Opened with "x": a second rank that opened it too would fail.
    records = run("sink", log={"sinks": [{"kind": "my_sink.Lines", "path": str(parts / "lines.jsonl")}]})
    header, *lines, end = (parts / "lines.jsonl").read_text().splitlines()
    assert json.loads(header) == {"name": "sink", "lr": 1e-2}
    assert [json.loads(line) for line in lines] == records
    assert len(curve(records, "loss")) == 3
    assert end == "closed"


LAUNCHER = """
import json, os, socket, subprocess
from fullshard import Launcher

class OneByOne(Launcher):
    note: str

    def start(self, command, ranks):
        with socket.create_server(("localhost", 0)) as server:
            port = server.getsockname()[1]
        world = ranks.per_node * ranks.nodes
        started = []
        for rank in range(world):
            variables = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
            variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
            environment = os.environ | {key: str(value) for key, value in variables.items()}
            started.append(subprocess.Popen(command, env=environment))
        codes = [process.wait() for process in started]
        with open(self.note, "w") as file:
            json.dump({"command": list(command), "codes": codes}, file)
        return max(codes)
"""


def test_launcher(parts: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (parts / "my_launcher.py").write_text(LAUNCHER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(parts), os.environ.get("PYTHONPATH", "")]))
    launcher = {"kind": "my_launcher.OneByOne", "note": str(parts / "note.json")}
    topology = {"devices": 2, "launcher": launcher}
    recipe_of_ours = fullshard.read(recipe(folder, name="launcher", duration={"steps": 2}, topology=topology))
    result = fullshard.train(recipe_of_ours)
    note = json.loads((parts / "note.json").read_text())
    assert note["codes"] == [0, 0]
    assert note["command"][1:4] == ["-m", "fullshard", "train"]
    assert (result.step, result.stopped) == (2, "done")
    state = json.loads((folder / "runs" / "launcher" / "last" / "state.json").read_text())
    assert state["world_size"] == 2


OPTIMIZER = """
import torch
from fullshard import Optimizer

class Descent(Optimizer):
    momentum: float = 0.0

    def open(self, named_parameters):
        return torch.optim.SGD(self.groups(named_parameters), lr=self.lr, momentum=self.momentum)
"""


def test_optimizer(run: Train, parts: Path, folder: Path) -> None:
    (parts / "my_optimizer.py").write_text(OPTIMIZER)
    settings = {"kind": "my_optimizer.Descent", "momentum": 0.5, "lr": 0.1, "weight_decay": 0.0, "clip": None}
    records = run("optimizer", optimizer=settings, schedule={"kind": "constant"})
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for step, (found,) in enumerate(curve(records, "loss")):
        ids, targets = padded(rows(folder)[16 * step : 16 * step + 16])
        loss = loss_of(model(input_ids=ids).logits, targets)
        assert found == pytest.approx(loss.item(), rel=1e-6)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    exported = load_file(folder / "runs" / "optimizer" / "model" / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert_near(exported[name], parameter.detach())


SCHEDULE = """
from fullshard import Schedule

class Listed(Schedule):
    factors: list[float]

    def after_warmup(self, step, total):
        return self.factors[step]
"""


def test_schedule(run: Train, parts: Path) -> None:
    (parts / "my_schedule.py").write_text(SCHEDULE)
    records = run("schedule", schedule={"kind": "my_schedule.Listed", "factors": [1.0, 0.25, 0.5]})
    assert curve(records, "lr") == [pytest.approx((rate,)) for rate in (1e-2, 2.5e-3, 5e-3)]


EVALUATION = """
import torch
from fullshard import Evaluation, Findings
from tests.near import assert_near

class Length(Evaluation):
    name: str = "length"

    def gives(self, objective, model):
        return {self.name: "min"}

    def run(self, inputs):
        slices = [p.to_local().detach().double() for p in inputs.model.parameters()]
        total = inputs.sum_over_ranks(torch.stack([s.square().sum() for s in slices]).sum())
        return Findings({self.name: float(total.sqrt())}, [f"the weights are {float(total.sqrt()):.3f} long"])
"""


def test_evaluation(run: Train, parts: Path, folder: Path) -> None:
    (parts / "my_evaluation.py").write_text(EVALUATION)
    records = run(
        "evaluation",
        evaluate={"parts": [{"kind": "my_evaluation.Length", "name": "long"}], "every_steps": 1},
        checkpoint={"best": "long"},
    )
    found = [record["long"] for record in records if record["kind"] == "validation"]
    end = records[-1]
    assert len(found) == 3
    assert (end["best"], end["best_step"]) == (min(found), found.index(min(found)) + 1)
    out = folder / "runs" / "evaluation"
    assert (out / "best").resolve().name == f"checkpoint-{end['best_step']}"
    assert f"the weights are {found[-1]:.3f} long" in (out / "log.txt").read_text()
    exported = load_file(out / "model" / "model.safetensors")
    whole = sum(float(tensor.double().square().sum()) for tensor in exported.values()) ** 0.5
    assert found[-1] == pytest.approx(whole, rel=1e-9)


FRAGILE = """
from pathlib import Path
from fullshard import Evaluation, Findings

class Fragile(Evaluation):
    broken: str

    def gives(self, objective, model):
        return {"answer": "min"}

    def run(self, inputs):
        if Path(self.broken).exists():
            raise ZeroDivisionError("an error of the user's own")
        return Findings({"answer": 42.0})
"""


def test_an_evaluation_that_raises_when_it_first_runs_loses_no_step(run: Train, parts: Path, folder: Path) -> None:
    (parts / "my_fragile.py").write_text(FRAGILE)
    evaluate = {"parts": [{"kind": "my_fragile.Fragile", "broken": str(parts / "broken")}], "every_steps": 2}
    straight = run("not-fragile", evaluate=evaluate)
    (parts / "broken").touch()
    with pytest.raises(AssertionError, match="an error of the user's own"):
        run("fragile", evaluate=evaluate)
    assert [path.name for path in (folder / "runs" / "fragile").glob("checkpoint-*")] == ["checkpoint-2"]
    (parts / "broken").unlink()
    resumed = run("fragile", evaluate=evaluate)
    assert curve(resumed, "step", "loss", "grad_norm") == curve(straight, "step", "loss", "grad_norm")
    validated = [[(r["step"], r["answer"]) for r in each if r["kind"] == "validation"] for each in (resumed, straight)]
    assert validated[0] == validated[1] == [(2, 42.0), (3, 42.0)]
    models = [load_file(folder / "runs" / name / "model" / "model.safetensors") for name in ("fragile", "not-fragile")]
    assert all(torch.equal(tensor, models[1][name]) for name, tensor in models[0].items())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "my_nowhere.Thing",
            "schedule.kind = 'my_nowhere.Thing': the module 'my_nowhere' cannot be imported. "
            "Install it, or put its folder on PYTHONPATH.",
        ),
        (
            "my_wrong.Lsted",
            "schedule.kind = 'my_wrong.Lsted': the module my_wrong has no 'Lsted' (did you mean 'Listed'?).",
        ),
        (
            "my_wrong.Descent",
            "schedule.kind = 'my_wrong.Descent' is not a Schedule. Let the class inherit from fullshard.Schedule.",
        ),
        (
            "my_wrong.torch",
            "schedule.kind = 'my_wrong.torch' is not a Schedule. Let the class inherit from fullshard.Schedule.",
        ),
        (
            "my_needs_more.Thing",
            "schedule.kind = 'my_needs_more.Thing': the module 'not_installed_here' cannot be imported. "
            "Install it, or put its folder on PYTHONPATH.",
        ),
    ],
)
def test_a_kind_that_cannot_be_used(parts: Path, folder: Path, kind: str, message: str) -> None:
    (parts / "my_wrong.py").write_text(SCHEDULE + OPTIMIZER)
    (parts / "my_needs_more.py").write_text("import not_installed_here\n" + SCHEDULE)
    with pytest.raises(RecipeError) as caught:
        fullshard.read(recipe(folder, schedule={"kind": kind}))
    assert str(caught.value) == f"a mapping: {message}"


def test_a_wrong_key_of_a_users_part_is_named(parts: Path, folder: Path) -> None:
    (parts / "my_keys.py").write_text(SCHEDULE)
    with pytest.raises(RecipeError, match=r"schedule\.factor is not a known key \(did you mean 'factors'\?\)"):
        fullshard.read(recipe(folder, schedule={"kind": "my_keys.Listed", "factor": [1.0]}))
