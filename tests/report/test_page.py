"""What a report says, against what the files of a run hold; no browser."""

from __future__ import annotations

import json
import os
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import fullshard
from fullshard.config.part import plain
from fullshard.errors import SetupError
from fullshard.profile.recorder import FOLDER as PROFILE
from fullshard.report import settings, tables
from fullshard.report.charts import charts
from fullshard.report.curves import curves
from fullshard.report.folders import Run, find
from fullshard.report.page import page
from fullshard.report.samples import BUDGET, Room, samples
from fullshard.report.verdict import judge
from tests.report.run_folders import (
    checkpoint,
    crashed,
    event,
    finished,
    picture,
    train_record,
    validation,
    write_long,
    write_run,
)

OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def a_run(folder: Path, *records: dict[str, Any], **more: Any) -> Run:
    return Run(write_run(folder, records=records, **more), folder.name)


def test_a_finished_run(tmp_path: Path) -> None:
    checks = [validation(step, loss=loss) for step, loss in ((2, 5.0), (4, 4.6), (6, 4.5))]
    run = a_run(tmp_path / "run", *(train_record(step) for step in range(1, 7)), *checks, finished(6))
    found = judge(run)
    assert (found.state, found.sentence) == ("finished", "It finished 6 steps in 1 h 02 min.")
    assert found.notes[0] == "Compute limited it: 90% of the time, at a median MFU of 43.0%; 2.1% waiting for data."
    assert found.notes[1] == "The last validation was the best (loss): more steps may help."
    told = event("limit", 1, limit="data", because="31% of the time is spent waiting for data", setting="data.workers")
    assert judge(a_run(tmp_path / "told", train_record(1), told, finished(1))).notes == [
        "Limited by data: 31% of the time is spent waiting for data. Most likely to help: data.workers."
    ]
    tiles = {name: (value, remark) for name, value, remark in tables.tiles(run)}
    assert tiles["best validation loss"] == ("4.5", "at step 6")
    assert tiles["peak memory"] == ("61.2 GiB", "predicted 60 GiB")
    (run.folder / "model").mkdir()
    assert judge(run).sentence == "It finished 6 steps in 1 h 02 min. The trained model is in run/model."


def test_how_else_a_run_ends(tmp_path: Path) -> None:
    early = a_run(tmp_path / "early", train_record(1), finished(1, stopped="patience"))
    assert "early: validation did not improve" in judge(early).sentence
    stopped = a_run(tmp_path / "stopped", train_record(1), finished(1, stopped="signal"))
    assert (judge(stopped).state, judge(stopped).command) == ("stopped", "fullshard train quickstart")
    as_module = {"command": ["/site-packages/fullshard/__main__.py", "train", "my run.yaml"]}
    again = a_run(tmp_path / "again", train_record(1), finished(1, stopped="signal"), facts=as_module)
    assert judge(again).command == "python -m fullshard train 'my run.yaml'"
    silent = a_run(tmp_path / "silent", train_record(7), total=50)
    assert (judge(silent).state, "at step 7 of 50" in judge(silent).sentence) == ("died", True)
    resumed = a_run(tmp_path / "resumed", train_record(1), finished(1), train_record(2))
    assert judge(resumed).state == "died", "it went on after it had finished"
    restarted = a_run(tmp_path / "restarted", train_record(1), finished(1), event("restart", 1, restart=1))
    assert judge(restarted).state == "finished"


def test_a_run_that_died_names_the_rank_to_blame_and_what_to_do(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", train_record(3))
    checkpoint(run.folder, 2)
    crashed(run.folder, OUT_OF_MEMORY)
    found = judge(run)
    assert found.state == "died"
    assert found.sentence == "Rank 1 failed at step 3 of 100. The same command continues it from checkpoint-2."
    assert found.last_words.endswith(OUT_OF_MEMORY)
    assert found.known
    assert "per_device" in " ".join(found.known.remedy)
    guarded = a_run(tmp_path / "guarded", train_record(3))
    crashed(guarded.folder, "fullshard.errors.NumericalError: At step 4 the loss is nan")
    assert judge(guarded).word == "Stopped by the guard"
    os.utime(run.folder / "crash-1", (1e9, 1e9))  # it was continued, and ended once more
    assert "without a word" in judge(run).sentence


def test_a_run_whose_ranks_are_alive_is_running(tmp_path: Path) -> None:
    from fullshard.faults.beat import FOLDER, Beat

    run = a_run(tmp_path / "run", train_record(3))
    (run.folder / FOLDER).mkdir()
    beat = Beat(run.folder / FOLDER, rank=0, world=1, timeout_s=60.0)
    assert judge(run).state == "running"
    beat.close("failed")
    assert judge(run).state == "died"


def test_few_records_are_drawn_as_they_are(tmp_path: Path) -> None:
    records = [train_record(step) for step in range(1, 30)]
    found = curves(a_run(tmp_path / "run", *records), most=29)
    assert found["train"]["per_point"] == 1
    assert found["train"]["step"] == [record["step"] for record in records]
    for name in ("loss", "lr", "grad_norm", "mfu"):
        assert found["series"][f"train/{name}"] == {"mean": [float(f"{each[name]:.7g}") for each in records]}


def test_on_a_cpu_memory_is_one_curve(tmp_path: Path) -> None:
    """There the memory of the device is that of the host."""
    same = curves(a_run(tmp_path / "cpu", train_record(1, memory_gib=8.5)), most=9)["series"]
    assert [name for name in same if name.endswith("memory_gib")] == ["train/memory_gib", "train/predicted_memory_gib"]
    assert "train/host_memory_gib" in curves(a_run(tmp_path / "gpu", train_record(1)), most=9)["series"]


def test_buckets_keep_the_mean_and_the_extremes(tmp_path: Path) -> None:
    """Against plain Python; the last bucket is short, and some records have no value."""
    draw = random.Random(0)
    records = [train_record(step, loss=draw.random()) for step in range(1, 104)]
    records[50]["loss"] = 1e6
    for at in (3, *range(70, 80)):
        records[at]["loss"] = float("nan")
    found = curves(a_run(tmp_path / "run", *records), most=11)
    rows = [records[at : at + 10] for at in range(0, 103, 10)]
    assert found["train"]["step"] == [row[-1]["step"] for row in rows]
    kept = found["series"]["train/loss"]
    for at, row in enumerate(rows):
        values = [each["loss"] for each in row if each["loss"] == each["loss"]]
        got = [kept[name][at] for name in ("mean", "low", "high")]
        if values:
            assert got == pytest.approx([sum(values) / len(values), min(values), max(values)], rel=1e-6)
        else:
            assert got == [None, None, None]
    assert kept["high"][5] == 1e6
    assert found["not_finite"]["train/loss"] == {"count": 11, "steps": [4, *range(71, 81)]}


def test_charts() -> None:
    names = ["train/loss", "train/lr", "train/own_number", "train/images_per_second", "train/memory_gib"]
    names += ["train/predicted_memory_gib", "validation/loss", "validation/ema_loss", "validation/recall@1"]
    names += ["validation/recall@1/64", "train/padding"]
    found = {chart["title"]: list(chart["series"]) for chart in charts(names)}
    assert found == {
        "Loss": ["train/loss", "validation/loss", "validation/ema_loss"],
        "Validation recall@1": ["validation/recall@1", "validation/recall@1/64"],
        "Learning rate": ["train/lr"],
        "Images per second": ["train/images_per_second"],
        "Memory": ["train/memory_gib", "train/predicted_memory_gib"],
        "Data wait and padding": ["train/padding"],
        "Own number": ["train/own_number"],
    }


def test_settings_are_compared_with_the_defaults() -> None:
    recipe = plain(fullshard.read({"model": "a/model", "data": {"train": "a.jsonl"}}, "optimizer.lr=3e-5", "seed=7"))
    rows = {key: (value, default) for key, value, default in settings.from_defaults(recipe)}
    assert rows["optimizer.lr"] == ("3e-5", "3e-4")
    assert rows["seed"] == ("7", "0")
    assert rows["model.path"] == ("a/model", "null")
    assert {key.partition(".")[0] for key in rows} == {"model", "data", "optimizer", "seed"}
    own = {**recipe, "objective": {"kind": "no_such_module.Mine", "strength": 2}}
    mine = {key: value for key, value, _ in settings.from_defaults(own)}
    assert (mine["objective.kind"], mine["objective.strength"]) == ("no_such_module.Mine", "2")


def test_settings_of_runs_are_compared(tmp_path: Path) -> None:
    one = a_run(tmp_path / "one", settings=["optimizer.lr=1e-3"])
    two = a_run(
        tmp_path / "two", settings=["optimizer.lr=1e-4"], facts={"versions": {"python": "3.11.7", "torch": "2.14"}}
    )
    assert settings.between([one, two]) == [("optimizer.lr", ["1e-3", "1e-4"]), ("version.torch", ["2.13.0", "2.14"])]


def test_a_run_of_100_000_steps_makes_a_small_page(tmp_path: Path) -> None:
    run = write_long(tmp_path / "long", steps=100_000, spike_at=60_000)
    picture(run / "pictures" / "samples-1.png", side=700)
    shown = [event("picture", 1, name="samples", file="pictures/samples-1.png")] * 3
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in shown)
    text = page(find([str(run)]))
    assert len(text.encode()) < 2_000_000
    assert "100,000 logged steps are drawn as 800 points" in text
    assert "1000000.0" in text, "the one spike is on the page"


def test_checkpoints_are_looked_at(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", train_record(1))
    for step in (1, 2, 3):
        checkpoint(run.folder, step)
    (run.folder / "checkpoint-1" / "__0_0.distcp").write_bytes(b"short")
    (run.folder / "checkpoint-2" / "__0_0.distcp").write_bytes(b"WEIGHTS")
    quick = {row["name"]: row for row in tables.checkpoint_rows(run, verify=False)}
    assert "5 bytes long" in quick["checkpoint-1"]["problem"]
    assert (quick["checkpoint-2"]["problem"], quick["checkpoint-3"]["marks"]) == ("", ["last"])
    whole = {row["name"]: row for row in tables.checkpoint_rows(run, verify=True)}
    assert "was changed" in whole["checkpoint-2"]["problem"]


def test_events_are_told_in_words(tmp_path: Path) -> None:
    saves = [event("saved", step, stall_seconds=0.25) for step in range(10, 60, 10)]
    restart = event("restart", 50, restart=1, of=3, why="rank 1 was killed in step 51", start="an id")
    skipped = event("skipped", 60, cause="spike", loss=9.5)
    back = event("rollback", 50, bad_step=61, cause="At step 61 the loss is nan.", sample_ids=[4, 7])
    slow = event("straggler", 70, rank=3, place="Rank 3 (host a)", phase="data", slower=0.25)
    quiet, split = event("samples", 70, sample_ids=[1]), event("out_of_memory", 71, rank=1, per_device=2, before=4)
    run = a_run(tmp_path / "run", *saves, restart, skipped, back, slow, quiet, split, saves[0])
    assert tables.event_rows(run) == [
        ("10 to 50", "saved 5 times", "the last time, training waited 0.25 s"),
        ("50", "restart", "restart 1 of 3: rank 1 was killed in step 51"),
        ("60", "skipped", "cause spike, loss 9.5"),
        ("50", "rollback", "At step 61 the loss is nan. 2 samples left out"),
        ("70", "straggler", "Rank 3 (host a) is 25% slower than others (data)"),
        ("71", "out_of_memory", "rank 1: micro-batches of 2 rows, not 4"),
        ("10", "saved", "training waited 0.25 s"),
    ]


def test_samples_come_from_the_run_folder_only(tmp_path: Path) -> None:
    picture(tmp_path / "secret.png")
    run = a_run(
        tmp_path / "run",
        event("picture", 1, name="outside", file="../secret.png"),
        event("picture", 2, name="whole", file="pictures/whole.png"),
        event("picture", 3, name="gone", file="pictures/gone.png"),
        event("picture", 4, name="page", file="log.txt"),
        event(
            "texts",
            5,
            texts=[
                "Answers to 1 sample: run/pictures/whole.png\n  the same as beside it",
                "Title:\n    \x1b[31mred\x1b[0m\n      indented",
                "x" * 5000,
            ],
        ),
    )
    picture(run.folder / "pictures" / "whole.png")
    found = {sample.name: sample for sample in samples(run, Room())}
    assert [name for name, sample in found.items() if sample.media] == ["whole"]
    assert (found["Title"].text, found[""].remark) == ("red\n  indented", "1,000 more characters are in log.txt")
    assert "not shown" in found["outside"].remark
    assert "FileNotFoundError" in found["gone"].remark


def test_large_pictures_are_made_smaller_and_too_many_are_left_out(tmp_path: Path) -> None:
    names = [f"pictures/{number}.png" for number in range(8)]
    run = a_run(tmp_path / "run", *(event("picture", 1, name="noise", file=name) for name in names))
    noise = random.Random(0).randbytes(400 * 400 * 3)
    from PIL import Image

    (run.folder / "pictures").mkdir()
    for name in names:
        Image.frombytes("RGB", (400, 400), noise).save(run.folder / name)
    found = samples(run, Room())
    assert sum(len(sample.media) for sample in found) <= BUDGET
    assert found[0].remark.endswith("made smaller")
    left_out = [sample for sample in found if not sample.media]
    assert all("too large" in sample.remark for sample in left_out)
    assert left_out


class Tags(HTMLParser):
    """Every tag and attribute of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found |= {tag, *(f"{tag} {name}" for name, _ in attrs)}


def test_hostile_strings_add_no_markup(tmp_path: Path) -> None:
    """The tags and attributes of the page are those of a run with harmless strings in the same places."""

    def text(evil: str, folder: str) -> str:
        records = [
            train_record(1, **{f"own{evil}": 1.0}),
            validation(1, **{evil: 2.0}),
            event("texts", 1, texts=[evil]),
            event("restart", 1, restart=1, of=2, why=evil),
            event(evil, 1, cause=evil),
            event("picture", 1, name=evil, file=f"{evil}.png"),
        ]
        said = [f"warning: {evil}", f"First update proven: {evil}"]
        facts = {"command": ["fullshard", evil], "overridden": [evil], "versions": {evil: evil}}
        run = write_run(tmp_path / folder, records=records, said=said, facts=facts)
        resolved = run / "recipe.resolved.yaml"
        resolved.write_text(resolved.read_text() + json.dumps(evil) + ": " + json.dumps(evil) + "\n")
        (run / "profile").mkdir()
        (run / "profile" / "table.txt").write_text(evil)
        crashed(run, evil)
        return page([Run(run, evil)])

    good, bad = text("harmless", "good"), text("</script><img src=x onerror=alert(1)>'\"><svg/onload=alert(2)>", "bad")
    assert Tags(bad).found == Tags(good).found
    assert bad.count("</script>") == good.count("</script>")
    assert bad.count("onerror") >= 10, "the strings themselves are there"


def test_options_are_not_broken_in_two(tmp_path: Path) -> None:
    told = event("limit", 1, limit="<b>", because="it is", setting="--profile, which measures both")
    text = page([a_run(tmp_path / "run", train_record(1), told)])
    assert "Limited by &lt;b&gt;: it is." in text
    assert 'help: <span class="option">--profile</span>, which' in text


def test_the_table_of_a_profile_is_shown(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", train_record(1))
    assert "<h3>Profile</h3>" not in page([run])
    (run.folder / PROFILE).mkdir()
    (run.folder / PROFILE / "table.txt").write_text("matrix products  61%")
    assert "matrix products  61%" in page([run])


def test_the_policy_allows_the_scripts_of_the_page_only(tmp_path: Path) -> None:
    text = page([a_run(tmp_path / "run", train_record(1))])
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]+)"', text)
    assert "default-src &#39;none&#39;" in policy
    assert policy.count("sha256-") == 3
    assert "unsafe" not in policy
    assert not re.findall(r"(?:src|href)=\"(?!data:|#)", text)


def test_what_is_no_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SetupError, match="nor runs/nothing here"):
        find(["nothing"])
    with pytest.raises(SetupError, match="reads local files"):
        find(["s3://bucket/run"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(SetupError, match="is not a run folder"):
        find(["empty"])
    write_run(tmp_path / "runs" / "named", records=[])
    assert [run.label for run in find(["named"])] == ["named"]


def test_a_run_with_stages_is_its_stages_in_order(tmp_path: Path) -> None:
    for number, name in ((2, "answers"), (1, "texts")):
        write_run(tmp_path / "staged" / name, records=[], facts={"stage": {"number": number}})
    (tmp_path / "staged" / "other").mkdir()
    assert [run.label for run in find([str(tmp_path / "staged")])] == ["texts", "answers"]


def test_runs_with_the_same_name_have_labels_of_their_own(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        write_run(tmp_path / parent / "run", records=[])
    assert [run.label for run in find([str(tmp_path / "a" / "run"), str(tmp_path / "b" / "run")])] == ["a/run", "b/run"]


def test_half_of_a_run_makes_a_page(tmp_path: Path) -> None:
    """A run that died early, and files that somebody has damaged."""
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "log.txt").write_text("no line of ours\n\x00")
    damaged = write_run(tmp_path / "damaged", records=[])
    (damaged / "metrics.jsonl").write_text('{"kind": "train", "step": "x"}\n[1]\n{"kind": "train", "step": 1, "lo')
    (damaged / "recipe.resolved.yaml").write_text("a: [")
    (damaged / "units.json").write_text('{"units": 3}')
    text = page(find([str(tmp_path / "log"), str(damaged)]))
    assert text.count("Not finished") == 2
    assert "No step is logged yet" in text
