from __future__ import annotations

import io
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from fullshard.contracts.evaluation import Findings
from fullshard.evaluate.command import _say
from fullshard.families.language.objectives.causal_lm import CausalLM
from fullshard.log.console import Console


class Clock:
    """A clock that moves only on request."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class File(io.StringIO):
    """A stream that is not a terminal."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def out() -> File:
    return File()


@pytest.fixture
def console(out: File, clock: Clock) -> Console:
    made = Console(stream=out, clock=clock)
    made.speeds = {"tokens": "tok"}
    return made


def lines(out: File) -> list[str]:
    return [line for line in out.getvalue().split("\n") if line]


def test_the_lines_of_an_epoch_are_exact(console: Console, out: File) -> None:
    console.epoch_begin(1, 100, 1e-4)
    console.epoch_end(1, seconds=169.234, train_loss=0.1234, val_loss=0.1145)
    console.new_best(0.1145)
    assert lines(out) == [
        "Started Training on: 1 / 100 epoch",
        "Current LR: 1.000000e-04",
        "Epoch 1 completed in 169.23 seconds",
        "Average Train Loss: 0.123400",
        "Average Val Loss: 0.114500",
        ">>>>>> New Best Val Loss: 0.114500",
    ]


def test_an_epoch_without_validation_claims_no_validation_loss(console: Console, out: File) -> None:
    console.epoch_end(2, seconds=1, train_loss=0.5)
    assert "Val" not in out.getvalue()


def test_a_perplexity_that_was_cut_off_is_not_printed_as_a_number(console: Console, out: File) -> None:
    objective = CausalLM()
    for loss in (80.0, 456_809.0):
        console.validated({"loss": loss, **objective.derived({"loss": loss})})
    console.validated({"loss": 2.0, **objective.derived({"loss": 2.0})})
    assert lines(out) == ["Validation: perplexity > 5e34"] * 2 + ["Validation: perplexity 7.3891"]


def test_no_line_prints_a_perplexity_that_was_cut_off_as_a_number(console: Console, out: File) -> None:
    cut = CausalLM().derived({"loss": 456_809.0})["perplexity"]
    console.first_value(cut, "perplexity")
    console.new_best(cut, "perplexity")
    _say(console, Findings({"perplexity": cut, "loss": 2.0}, []))
    assert lines(out) == [
        "First Val Perplexity: > 5e34 (the baseline)",
        ">>>>>> New Best Val Perplexity: > 5e34",
        "  perplexity  > 5e34",
        "  loss        2.000000",
    ]


def test_a_best_by_another_metric_names_it(console: Console, out: File) -> None:
    console.new_best(0.75, "token_accuracy")
    assert lines(out) == [">>>>>> New Best Val Token Accuracy: 0.750000"]


def test_the_parameter_summary_is_exact(console: Console, out: File) -> None:
    console.parameter_summary(total=8_192_000_000, trainable=8_192_000_000, frozen=0)
    assert lines(out) == [
        "FSDP parameter summary:",
        "  Total: 8,192,000,000 (8.19B)",
        "  Trainable: 8,192,000,000 (8.19B)",
        "  Frozen: 0",
    ]


def test_the_parameter_summary_says_what_share_an_adapter_trains(console: Console, out: File) -> None:
    console.parameter_summary(total=8_000_000_000, trainable=40_000_000, frozen=7_960_000_000)
    assert "  Trainable: 40,000,000 (40.00M), 0.50% of total" in lines(out)


def test_a_training_bar_ends_as_one_line(console: Console, out: File, clock: Clock) -> None:
    with console.training_bar(625) as bar:
        for _ in range(625):
            clock.now += 1 / 4.04
            bar.advance(0.1234)
    assert lines(out)[-1] == "Training: 100%|██████████| 625/625 [02:34<00:00, 4.04it/s, loss=0.1234]"


def test_a_validation_bar_ends_as_one_line(console: Console, out: File, clock: Clock) -> None:
    with console.validation_bar(100) as bar:
        for batch in range(100):
            clock.now = 100.0 + (batch + 1) * 15.004 / 100
            bar.advance(0.1145)
    assert lines(out) == ["Validation: 100%|██████████| 100/100 [00:15<00:00, 6.66it/s, val_loss=0.1145]"]


def test_a_bar_in_a_file_shows_itself_after_half_a_minute_of_silence(console: Console, out: File, clock: Clock) -> None:
    with console.training_bar(10) as bar:
        for step in range(1, 11):
            clock.now += 12
            bar.advance(1.0)
            if step == 5:
                bar.log(record(step))
    shown = [line.split("[")[0].split()[-1] if "[" in line else line[:11] for line in lines(out)]
    assert shown == ["3/10", "step      5", "8/10", "10/10"]


def test_an_interrupted_bar_keeps_its_last_state(console: Console, out: File, clock: Clock) -> None:
    def interrupted() -> None:
        with console.training_bar(4) as bar:
            clock.now += 1
            bar.advance(2.0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert lines(out) == ["Training:  25%|██▌       | 1/4 [00:01<?, ?it/s, loss=2.0000]"]


def record(step: int, **more: float) -> dict[str, float]:
    return {"step": step, "loss": 6.98, "lr": 3e-4, "grad_norm": 1.25, **more}


def test_step_lines_have_fixed_columns(console: Console, out: File, clock: Clock) -> None:
    console.run_begin(120)
    with console.training_bar(120) as bar:
        for step in range(1, 21):
            clock.now += 2.0
            bar.advance(6.98)
            if step == 10:
                bar.log(record(step, tokens_per_second=45_012.0, mfu=0.528, memory_gib=83.06, data_wait=0.004))
            if step == 20:
                bar.log(
                    {**record(step, tokens_per_second=9_512.0, mfu=0.085, memory_gib=3.06, data_wait=0.1), "loss": 11.5}
                )
    first, second = lines(out)[:2]
    assert first == (
        "step  10/120  loss  6.9800  lr 3.00e-04  norm   1.250  45.0k tok/s   83.1 GiB  MFU 52.8%  "
        "data wait  0.4%  run ends in 03:40"
    )
    for column in ("loss", "lr", "norm", "tok/s", "run ends"):
        assert first.index(column) == second.index(column)


def test_every_quantity_has_its_own_column(console: Console, out: File) -> None:
    console.speeds = {"tokens": "tok", "images": "img"}
    with console.training_bar(2) as bar:
        bar.log(record(1))
        bar.log(record(2, tokens_per_second=45_012.0, images_per_second=9.5))
    first, second = lines(out)[:2]
    assert "norm   1.250  45.0k tok/s   9.50 img/s  data wait" in second
    assert first.split()[-5:] == ["-", "-", "data", "wait", "-"]
    assert first.index("data") == second.index("data")


def test_host_memory_is_shown_beside_gpu_memory(console: Console, out: File) -> None:
    with console.training_bar(3) as bar:
        bar.log(record(1, memory_gib=61.04, host_memory_gib=22.31))
        bar.log(record(2, memory_gib=0.61, host_memory_gib=0.61))  # on a CPU they are one
    first, second = lines(out)[:2]
    assert "61.0 GiB   host 22.3 GiB" in first
    assert "host" not in second


def test_large_numbers_keep_the_columns(console: Console, out: File) -> None:
    with console.training_bar(2) as bar:
        bar.log(record(1))
        bar.log({**record(2), "loss": 1_316_765.0, "grad_norm": 123_456.7})
    first, second = lines(out)[:2]
    assert "loss 1.3e+06  lr 3.00e-04  norm 1.2e+05" in second
    assert first.index("lr") == second.index("lr")


def test_every_logged_step_is_a_line_however_fast_the_run_is(
    console: Console, out: File, clock: Clock, tmp_path: Path
) -> None:
    console.open_log(tmp_path / "log.txt")
    with console.training_bar(100) as bar:
        for step in range(1, 101):
            clock.now += 0.1
            bar.advance(1.0)
            bar.log(record(step))
    console.close()
    shown = [line for line in lines(out) if line.startswith("step")]
    assert [int(line.split()[1]) for line in shown] == list(range(1, 101))
    logged = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split("  ", 1)[1] for line in logged if "step " in line] == shown
    assert len(lines(out)) == 101, "no bar but its end"


def test_the_time_left_of_the_run_counts_validation_and_saving(console: Console, out: File, clock: Clock) -> None:
    """Two epochs of 10 steps of 1 s, 20 s of pause after each: after 11 steps 9 are left at (9 + 20 + 1) s / 10."""
    console.run_begin(20)
    with console.training_bar(10) as bar:
        clock.now += 60  # warm-up
        bar.advance()
        for _ in range(9):
            clock.now += 1
            bar.advance()
    clock.now += 20
    with console.training_bar(10) as bar:
        clock.now += 1
        bar.advance()
        assert bar.status().startswith("run 11/20, ends in 00:27")
        assert bar.file_line().endswith("|  1/10 [00:01<?, ?it/s] run 11/20"), bar.file_line()
        assert len(bar.line(60)) <= 60


def test_only_a_terminal_gets_control_characters(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, out: File, tmp_path: Path
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    console = Console(stream=out, clock=clock)
    console.open_log(tmp_path / "log.txt")
    use_everything(console)
    console.close()
    for text in (out.getvalue(), (tmp_path / "log.txt").read_text()):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
        assert "a line with colours from a model" in text


def use_everything(console: Console) -> None:
    console.header("fullshard 0.1.0", [("world", "2 ranks"), ("precision", "bf16 " * 40)])
    console.parameter_summary(total=10, trainable=10, frozen=0)
    console.run_begin(4)
    console.epoch_begin(1, 1, 1e-4)
    with console.training_bar(4) as bar:
        for step in range(1, 5):
            bar.advance(1.0)
            bar.log(record(step))
            with console.validation_bar(1) as inner:
                inner.advance(1.0)
    console.epoch_end(1, seconds=1.0, train_loss=1.0, val_loss=1.0)
    console.new_best(1.0)
    console.say("a line \x1b[31mwith colours\x1b[0m from a model\r\x07")
    console.say("[bold]no markup[/bold] is read :smile:")
    console.note("a note")
    console.warn("take care")
    console.library("transformers", "something", shown=True)
    console.saved(Path("runs/a/checkpoint-4"), seconds=0.84, size_bytes=1288490189)
    console.finished(8.0, [("model", "runs/a/model")])
    console.next_steps(["fullshard train " + "x" * 120])


def test_texts_are_printed_without_interpreting_markup(console: Console, out: File) -> None:
    use_everything(console)
    shown = lines(out)
    assert "[bold]no markup[/bold] is read :smile:" in shown
    assert "warning: take care" in shown
    assert "Saved runs/a/checkpoint-4 (1.2 GiB) in 0.8 s" in shown
    assert "Training complete!" in shown
    assert "  1. fullshard train " + "x" * 120 in shown


def test_the_header_is_aligned_and_wraps(console: Console, out: File) -> None:
    console.header("fullshard", [("world", "2 ranks"), ("precision", "bf16 " * 40)])
    shown = lines(out)
    assert shown[1] == "  world      2 ranks"
    assert len(shown) > 4
    assert all(line.startswith(" " * 13 + "bf16") and len(line) <= 100 for line in shown[3:])


def test_log_txt_has_every_line_with_time_and_rank(console: Console, out: File, tmp_path: Path) -> None:
    console.say("before the folder was known")
    console.open_log(tmp_path / "run" / "log.txt", rank=0)
    use_everything(console)
    console.debug("not asked for")
    console.close()
    logged = (tmp_path / "run" / "log.txt").read_text().splitlines()
    stamp = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d rank 0(  |$)")
    assert all(stamp.match(line) for line in logged)
    said = [stamp.sub("", line) for line in logged]
    assert said[0] == "before the folder was known"
    assert [line for line in said if line] == lines(out)


def test_log_txt_continues_after_a_resume_and_has_debug_lines_on_request(tmp_path: Path, out: File) -> None:
    for life in ("first", "second"):
        console = Console(stream=out)
        console.open_log(tmp_path / "log.txt", debug=True)
        console.debug(f"{life} life")
        console.close()
    assert [line.split("  ")[1] for line in (tmp_path / "log.txt").read_text().splitlines()] == [
        "first life",
        "second life",
    ]
    assert out.getvalue() == ""


def test_a_silent_console_prints_nothing_but_logs_warnings(tmp_path: Path, out: File) -> None:
    console = Console(silent=True, stream=out)
    console.open_log(tmp_path / "log.txt", rank=3)
    use_everything(console)
    console.close()
    assert out.getvalue() == ""
    logged = [line[20:] for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert logged == ["rank 3  warning: take care", "rank 3  transformers: something"]


def test_a_character_that_the_stream_cannot_encode_does_not_stop_a_run() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    console = Console(stream=stream)
    console.say("für · alle")
    with console.training_bar(2) as bar:
        bar.advance(1.0)
    stream.flush()
    assert raw.getvalue().startswith(b"f?r ? alle\nTraining:  50%|#####     | 1/2 [")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, io.TextIOWrapper]]:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    master, slave = os.openpty()
    os.set_blocking(master, False)
    with os.fdopen(slave, "w", encoding="utf-8") as stream:
        yield master, stream
    os.close(master)


def read_all(master: int) -> str:
    data = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except BlockingIOError:
            return data.decode()
        data += piece


def test_on_a_terminal_bars_move_in_place_and_the_cursor_comes_back(
    terminal: tuple[int, io.TextIOWrapper], clock: Clock
) -> None:
    master, stream = terminal
    console = Console(stream=stream, clock=clock)
    console.speeds = {"tokens": "tok"}
    console.run_begin(10)
    with console.training_bar(10) as bar:
        for step in range(1, 6):
            clock.now += 1
            bar.advance(2.0)
            bar.log(record(step, tokens_per_second=1000.0))
            if step == 4:
                with console.validation_bar(2) as inner:
                    inner.advance(3.0)
                    inner.advance(3.0)
        assert console._live is not None
        console._live.refresh()
        moving = read_all(master)
        console.warn("in between")
    text = moving + read_all(master)
    assert text.count("\x1b[?25l") == 1
    assert text.count("\x1b[?25h") == 1
    assert "run 5/10, ends in 00:05 · lr 3.00e-04 · 1.00k tok/s" in moving
    visible = re.sub(r"\x1b\[[0-?]*[ -/]*[@-~]", "", text).replace("\r", "\n").split("\n")
    assert "warning: in between" in visible
    steps = [line for line in visible if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["1/10", "2/10", "3/10", "4/10", "5/10"], "each once, in order"
    assert all("norm   1.250" in line and len(line.rstrip()) <= 80 for line in steps)
    done = [line for line in visible if line.startswith("Validation: 100%")][-1]
    assert len(done) == 80
    final = [line for line in visible if line.startswith("Training:")][-1]
    assert final.endswith("|  5/10 [00:05<00:05, 1.00it/s, loss=2.0000]")
    assert len(final) == 80


def test_prose_breaks_between_words_on_a_terminal_and_commands_do_not(terminal: tuple[int, io.TextIOWrapper]) -> None:
    master, stream = terminal
    console = Console(stream=stream)
    console.say("word " * 30)
    console.next_steps(["fullshard train " + "a.b=c " * 20 + "end"])
    shown = re.sub(r"\x1b\[[0-?]*[ -/]*[@-~]", "", read_all(master)).split("\r\n")
    assert all(set(line.split()) <= {"word"} for line in shown[:2])
    assert any(line.startswith("  1. fullshard") and line.endswith("end") for line in shown)


def test_a_dumb_terminal_gets_plain_lines(
    terminal: tuple[int, io.TextIOWrapper], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    master, stream = terminal
    use_everything(Console(stream=stream, clock=clock))
    assert "\x1b" not in read_all(master)


def test_a_forked_data_worker_does_not_touch_the_screen(
    terminal: tuple[int, io.TextIOWrapper], clock: Clock, tmp_path: Path
) -> None:
    master, stream = terminal
    console = Console(stream=stream, clock=clock)
    console.open_log(tmp_path / "log.txt")
    with console.training_bar(2) as bar, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of any fork beside a thread
        child = os.fork()
        if child == 0:
            console.say("said in a worker")
            console.warn("warned in a worker")
            os._exit(0 if type(sys.stdout).__name__ != "FileProxy" else 1)
        assert os.waitpid(child, 0)[1] == 0
        bar.advance(1.0)
    console.close()
    assert "in a worker" not in read_all(master)
    logged = (tmp_path / "log.txt").read_text()
    assert "warned in a worker" in logged
    assert "said in a worker" not in logged


def test_an_unwritable_log_is_reported_once(tmp_path: Path) -> None:
    """/dev/full refuses every byte, as a full disk does."""
    stream = io.StringIO()
    console = Console(stream=stream)
    console.open_log(Path("/dev/full"))
    console.say("first")
    console.say("second")
    console.close()
    assert stream.getvalue().count("log.txt cannot be written (No space left on device)") == 1
    assert "second" in stream.getvalue()
