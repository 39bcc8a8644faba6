"""The page in a real Chromium: it opens from a file without a message or a request, and shows the run's numbers."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fullshard.cli import app
from fullshard.report.folders import Run, find
from fullshard.report.page import page
from fullshard.report.serve import Server
from tests.report import browser as browsers
from tests.report.browser import Browser, address
from tests.report.run_folders import (
    FAMILIES,
    checkpoint,
    crashed,
    event,
    family_run,
    finished,
    train_record,
    validation,
    write_long,
    write_run,
)
from tests.unavailable import unavailable

CURVES = "() => report.plots.map(({chart, plot}) => [chart.title, plot.data])"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if browsers.CHROMIUM is None:
        unavailable("Chromium is not installed. Run `make chromium`, as root or with sudo.")
    with browsers.started() as opened:
        yield opened


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Two runs with different losses and lengths."""
    folder = tmp_path_factory.mktemp("runs")
    for name, steps, lr in (("first", 60, "1e-3"), ("second", 40, "5e-4")):
        records = [train_record(step, loss=steps / step) for step in range(1, steps + 1)]
        checks = [validation(step, loss=steps / step + 0.5) for step in range(10, steps + 1, 10)]
        marks = [event("saved", 10, stall_seconds=0.1), event("restart", 20, restart=1, of=2, why="rank 1 was lost")]
        every = [*records, *checks, *marks, event("texts", steps, texts=["Sample of 'a':\n  a b c"]), finished(steps)]
        run = write_run(folder / name, records=every, settings=[f"optimizer.lr={lr}"], said=["warning: slow disk"])
        checkpoint(run, 10)
    return find([str(folder / "first"), str(folder / "second")])


@pytest.fixture(scope="module")
def pair(two: list[Run], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("pages") / "pair.html"
    path.write_text(page(two))
    return address(path)


def saved(folder: Path, *runs: Path) -> str:
    path = folder / "page.html"
    path.write_text(page(find([str(run) for run in runs])))
    return address(path)


def drawn(shown: Any) -> dict[str, list[list[Any]]]:
    """The data of every curve as uPlot holds them, by the chart's title: x, then each line."""
    return dict(shown.evaluate(CURVES))


def background(shown: Any) -> str:
    return str(shown.evaluate("getComputedStyle(document.body).backgroundColor"))


def becomes(shown: Any, condition: str) -> None:
    """Waits for it. Playwright's own waiting needs `eval`, which the page forbids."""
    ends = time.monotonic() + 180
    while not shown.evaluate(condition):
        assert time.monotonic() < ends, condition
        time.sleep(0.05)


def fits(shown: Any) -> bool:
    """Nothing is wider than the window."""
    return bool(shown.evaluate("document.documentElement.scrollWidth <= innerWidth"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_of_every_family(browser: Browser, tmp_path: Path, family: str) -> None:
    run = family_run(tmp_path / family, family)
    shown = browser.open(saved(tmp_path, run))
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [each["loss"] for each in records if each["kind"] == "train"]
    assert drawn(shown)["Loss"][1][:8] == pytest.approx(losses, rel=1e-6)
    checked = next(each for each in records if each["kind"] == "validation")
    titles = " ".join(shown.locator("figcaption b").all_inner_texts())
    for name in checked.keys() - {"kind", "step", "epoch", "loss"}:
        variant = name.partition("/")[0].replace("_", " ")
        assert variant in titles or "loss" in name
    media = {"vision": "img", "diffusion": "img", "audio": "audio"}.get(family)
    if media:
        loaded = "naturalWidth" if media == "img" else "duration"
        becomes(shown, f"document.querySelector('.sample {media}').{loaded} > 0")
    if family == "vision":
        assert shown.locator(".sample td").all_inner_texts() == ["a | b?", "red", "blue", "no"]
    assert (browser.problems, browser.requests) == ([], [shown.url])


def test_the_quickstart(browser: Browser, tmp_path: Path) -> None:
    """A real run, whose page the command itself has written."""
    words = ["train", "quickstart", "--output", str(tmp_path), "--devices", "1", "--on-finish", "report"]
    short = ["duration.epochs=null", "duration.steps=4", "log.every_steps=1", "log.sinks=[]"]
    done = CliRunner().invoke(app, [*words, *short, f"data.cache={tmp_path}/cache"])
    assert done.exit_code == 0, done.output
    run = tmp_path / "quickstart"
    shown = browser.open(address(run / "report.html"))
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [each["loss"] for each in records if each["kind"] == "train"]
    checked = [each["loss"] for each in records if each["kind"] == "validation"]
    steps, train, validated = drawn(shown)["Loss"]
    assert (steps, len(losses), len(checked)) == ([1, 2, 3, 4], 4, 1)
    assert [*train, *validated[-1:]] == pytest.approx([*losses, *checked], rel=1e-6)
    assert shown.locator(".badge").inner_text() == "Finished"
    assert "The for statement" in shown.locator(".sample pre").inner_text()
    assert "positions do not see later tokens" in shown.locator(".proofs").inner_text()
    assert shown.locator("#checkpoints-0 .good").inner_text() == "complete"
    assert (browser.problems, browser.requests) == ([], [shown.url])


def test_curves_are_the_numbers_of_the_runs(browser: Browser, two: list[Run], pair: str) -> None:
    """Read from metrics.jsonl by itself; two runs are on top of each other, each with its own steps."""
    shown = browser.open(pair)
    found = drawn(shown)
    for number, run in enumerate(two):
        records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        for kind, line in (("train", 0), ("validation", 1)):
            wanted = {each["step"]: each["loss"] for each in records if each["kind"] == kind}
            steps, values = found["Loss"][0], found["Loss"][1 + 2 * number + line]
            got = {step: value for step, value in zip(steps, values, strict=True) if value is not None}
            assert got == pytest.approx(wanted, rel=1e-6)
    names = shown.locator(".chart").first.locator(".readout span").all_inner_texts()
    assert [re.sub(r" [\d.]+$", "", name).strip() for name in names] == [
        "first, train",
        "first, validation",
        "second, train",
        "second, validation",
    ]
    row = shown.locator("#differences tr", has_text="optimizer.lr")
    assert row.locator("td").all_inner_texts() == ["1e-3", "5e-4"]
    assert (browser.problems, browser.requests) == ([], [pair])


def test_zoom_smoothing_log_scale_and_axes(browser: Browser, pair: str) -> None:
    shown = browser.open(pair)
    scale = "() => report.plots.map(({plot}) => [plot.scales.x.min, plot.scales.x.max])"
    assert shown.evaluate(scale)[0] == [1, 60]
    plot = shown.locator(".chart .u-over").first
    plot.evaluate("each => each.scrollIntoView({block: 'center', behavior: 'instant'})")
    box = plot.bounding_box()
    shown.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 40)
    shown.mouse.down()
    shown.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60, steps=4)
    shown.mouse.up()
    ranges = shown.evaluate(scale)
    assert all(each == pytest.approx([15.75, 30.5], abs=1.0) for each in ranges), "every chart zooms"
    plot.dblclick()
    assert shown.evaluate(scale)[-1] == [1, 60]
    shown.get_by_role("button", name="Last half").click()
    assert shown.evaluate(scale)[0] == [30.5, 60]
    raw = drawn(shown)["Gradient norm"][1]
    shown.get_by_label("Smoothing").fill("0.9")
    smooth = drawn(shown)["Gradient norm"][2]
    sums, mass = 0.0, 0.0
    for value, found in zip(raw, smooth, strict=True):
        sums, mass = sums * 0.9 + value * 0.1, mass * 0.9 + 0.1
        assert found == pytest.approx(sums / mass, rel=1e-6)
    assert len(drawn(shown)["Learning rate"]) == 3, "a schedule is not smoothed"
    last = shown.locator(".chart", has_text="Gradient norm").locator(".readout b").first.inner_text()
    assert float(last) == pytest.approx(raw[-1], rel=1e-4), "values are read out as they were logged"
    shown.get_by_label("Log scale").check()
    assert shown.evaluate("report.plots[0].plot.scales.y.distr") == 3
    shown.get_by_label("Over").select_option("seconds")
    assert drawn(shown)["Loss"][0][0] == 0.05
    assert browser.problems == []


def test_the_x_axis_has_whole_steps_and_round_times(browser: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", records=[train_record(step, seconds=220.0 * step) for step in range(1, 6)])
    shown = browser.open(saved(tmp_path, run))
    labels = "report.plots[0].plot.axes[0]._values"
    assert shown.evaluate(labels) == ["1", "2", "3", "4", "5"]
    shown.get_by_label("Over").select_option("seconds")
    times = shown.evaluate(labels)
    assert len(times) >= 5
    assert all(re.fullmatch(r"\d+:00 min", each) for each in times), times


def test_the_keyboard_and_a_screen_reader(browser: Browser, pair: str) -> None:
    shown = browser.open(pair)
    shown.keyboard.press("Tab")
    assert shown.evaluate("document.activeElement.textContent") == "Skip to the curves"
    plot = shown.locator(".plot").first
    words = plot.get_attribute("aria-label")
    assert "first, train: from 60 at step 1 to 1 at step 60, lowest 1 at step 60" in words
    plot.focus()
    shown.keyboard.press("Home")
    shown.keyboard.press("ArrowRight")
    readout = shown.locator(".readout").first
    assert readout.inner_text().split("\n")[0].startswith("step 2")
    assert readout.get_attribute("aria-live") == "polite"
    shown.keyboard.press("+")
    assert shown.evaluate("report.state.range") == [1, 16.75]
    shown.keyboard.press("0")
    assert shown.evaluate("report.state.range") is None
    shown.locator(".numbers summary").first.click()
    shown.wait_for_selector(".numbers td")
    cells = shown.locator(".numbers tbody tr").first.locator("td").all_inner_texts()
    assert cells == ["1", "60", "", "40", ""]
    unnamed = """() => [...document.querySelectorAll("button, input, select, img, [role=region], [role=group], nav")]
        .filter(each => !(each.ariaLabel || each.labels?.length || each.textContent.trim() || each.alt)).length"""
    assert shown.evaluate(unnamed) == 0
    assert browser.problems == []


def test_dark_and_light(browser: Browser, pair: str) -> None:
    shown = browser.open(pair, dark=True)
    dark, axis = background(shown), shown.evaluate("report.plots[0].plot.axes[0].stroke()")
    shown.get_by_role("button", name="Change between light and dark").click()
    light = background(shown)
    assert (dark, light) == ("rgb(15, 19, 24)", "rgb(246, 247, 249)")
    assert shown.evaluate("report.plots[0].plot.axes[0].stroke()") != axis, "curves follow"
    assert background(browser.open(pair)) == light
    assert browser.problems == []


def test_on_a_phone(browser: Browser, pair: str) -> None:
    shown = browser.open(pair, width=360)
    assert fits(shown)
    assert shown.evaluate("report.plots.every(({plot}) => plot.width <= 360)")
    for part in ("settings", "checkpoints", "events", "phases"):
        whole = "each => [each.scrollWidth - each.clientWidth, each.scrollHeight - each.clientHeight]"
        assert shown.locator(f"#{part}-0 .scroll").evaluate(whole) == [0, 0], f"nothing of {part} is cut off"
    assert browser.problems == []


def test_printed(browser: Browser, pair: str, tmp_path: Path) -> None:
    """On paper the page is light, opens what is folded, and leaves out what only a screen can use."""
    shown = browser.open(pair, dark=True)
    closed = "[...document.querySelectorAll('details:not(.numbers)')].filter(each => !each.open).length"
    before = shown.evaluate(closed)
    assert before
    shown.emulate_media(media="print", color_scheme="dark")
    becomes(shown, f"{closed} == 0")
    assert background(shown) == "rgb(255, 255, 255)"
    assert not shown.locator(".tools").is_visible()
    assert shown.evaluate("report.plots.every(({plot}) => plot.width <= 720)")
    shown.emulate_media(media="screen", color_scheme="dark")
    becomes(shown, f"{closed} == {before}")
    pdf = shown.pdf(path=str(tmp_path / "page.pdf"), format="A4")
    assert pdf.startswith(b"%PDF")
    assert browser.problems == []


def test_a_run_of_100_000_steps(browser: Browser, tmp_path: Path) -> None:
    shown = browser.open(saved(tmp_path, write_long(tmp_path / "long", steps=100_000, spike_at=70_000)))
    assert (tmp_path / "page.html").stat().st_size < 2_000_000
    steps, high, low, mean = drawn(shown)["Loss"]
    assert (steps[-1], len(steps)) == (100_000, 800)
    assert max(high) == 1e6
    assert all(a <= b <= c for a, b, c in zip(low, mean, high, strict=True))
    assert "100,000 logged steps are drawn as 800 points" in shown.locator("#honest").inner_text()
    shown.get_by_label("Lowest to highest").uncheck()
    assert len(drawn(shown)["Loss"]) == 2
    assert (browser.problems, browser.requests) == ([], [shown.url])


def test_a_run_that_died(browser: Browser, tmp_path: Path) -> None:
    records = [train_record(step) for step in range(1, 6)]
    records[-1]["loss"] = float("nan")
    run = write_run(tmp_path / "run", records=records)
    crashed(run, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    shown = browser.open(saved(tmp_path, run), width=360)
    assert fits(shown)
    assert shown.locator(".badge").inner_text() == "Died"
    words = shown.locator("#verdict").inner_text()
    assert "Rank 1 failed at step 5 of 100. It has no checkpoint." in words
    assert "CUDA out of memory" in words
    assert shown.locator(".missing").first.inner_text() == "NaN or Inf at step 5"
    assert browser.problems == []


def test_hostile_strings_stay_text(browser: Browser, tmp_path: Path) -> None:
    evil = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>\"'>"
    records = [
        train_record(1, **{evil: 1.0}),
        validation(1, **{evil: 2.0}),
        event("texts", 1, texts=[evil]),
        event("restart", 1, restart=1, of=1, why=evil),
        event("picture", 1, name=evil, file=f"{evil}.png"),
    ]
    run = write_run(tmp_path / "run", records=records, said=[f"warning: {evil}"], facts={"command": ["x", evil]})
    crashed(run, evil)
    path = tmp_path / "page.html"
    path.write_text(page([Run(run, evil), Run(run, f"{evil} again")]))
    shown = browser.open(address(path))
    for summary in shown.locator(".numbers summary").all():
        summary.click()
    assert shown.evaluate("window.hacked") is None
    assert shown.locator("img, iframe, object").count() == 0
    assert evil in shown.locator("h2").first.inner_text()
    assert evil in shown.locator(".sample pre").first.inner_text()
    assert (browser.problems, browser.requests) == ([], [shown.url])


@contextmanager
def served(server: Server) -> Iterator[str]:
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    serving.start()
    try:
        yield server.address
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


def test_a_page_that_is_served_follows_the_run(browser: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", records=[train_record(step) for step in range(1, 6)])
    with served(Server(find([str(run)]), port=0)) as at:
        shown = browser.open(at)
        assert drawn(shown)["Loss"][0] == [1, 2, 3, 4, 5]
        shown.get_by_label("Smoothing").fill("0.5")
        shown.locator("#units-0 summary").click()
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(train_record(6)) + "\n" + json.dumps(finished(6)) + "\n")
        becomes(shown, "report.plots[0].plot.data[0].length == 6")
        assert shown.locator(".badge").inner_text() == "Finished"
        assert shown.evaluate("report.state.smooth") == 0.5
        assert shown.evaluate("document.getElementById('units-0').open"), "what was open stays open"
        assert browser.problems == []
        assert all(each.startswith(at) for each in browser.requests)
    becomes(shown, "document.getElementById('live').textContent.includes('ended')")


def test_a_record_that_comes_while_the_page_is_made_is_shown_too(browser: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", records=[train_record(step) for step in range(1, 6)])

    class Slow(Server):
        """A step is logged between the reading of the files and the arrival of the first page."""

        def page(self) -> str:
            made = super().page()
            if len((run / "metrics.jsonl").read_text().splitlines()) == 5:
                with (run / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(train_record(6)) + "\n")
            return made

    with served(Slow(find([str(run)]), port=0)) as at:
        shown = browser.open(at)
        becomes(shown, "report.plots[0].plot.data[0].length == 6")
        assert browser.problems == []
