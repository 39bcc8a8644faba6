"""What a run leaves when it dies: one folder for all ranks, an explanation, and never a second error."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fullshard.errors import NumericalError, RecipeError, SetupError
from fullshard.explain import crash
from fullshard.explain.ended import how
from fullshard.explain.error_file import handed_over
from fullshard.explain.match import explain
from fullshard.faults.end import End, Failure, explained

LAUNCHED = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "MASTER_ADDR", "MASTER_PORT", crash.REPORTED_BY_LAUNCHER)


@pytest.fixture(autouse=True)
def _not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "recipe.resolved.yaml").write_text("name: mine\n")
    steps = [json.dumps({"kind": "train", "step": step, "loss": 1.0}) for step in range(1, 201)]
    (folder / "metrics.jsonl").write_text("\n".join(steps) + "\n")
    (folder / "log.txt").write_text("".join(f"line {n}\n" for n in range(1000)))
    return folder


def test_the_crash_folder_has_traceback_recipe_environment_and_log(run: Path) -> None:
    folder = crash.write(raised(ValueError("what was it")), folder=run, rank=0, world=2)
    assert folder == run / "crash-1"
    said = (folder / "rank-0.txt").read_text()
    assert "ValueError: what was it" in said
    assert "Traceback" in said
    assert re.search(r"^step +200 \(the last logged\)$", said, re.MULTILINE)
    assert re.search(r"^rank +0 of 2$", said, re.MULTILINE)
    assert (folder / "recipe.resolved.yaml").read_text() == "name: mine\n"
    metrics = (folder / "metrics.jsonl").read_text().splitlines()
    assert (len(metrics), json.loads(metrics[-1])["step"]) == (50, 200)
    assert (folder / "log.txt").read_text().splitlines()[-1] == "line 999"
    facts = json.loads((folder / "environment.json").read_text())
    assert facts["python"] == sys.version.split()[0]
    assert facts["packages"]["torch"]


def test_no_secret_is_written_to_the_crash_folder(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "HF_HUB_TOKEN", "WANDB_API_KEY", "SLURM_JWT", "AWS_SECRET_ACCESS_KEY", "NCCL_AUTH_KEY"):
        monkeypatch.setenv(name, "geheim")
    monkeypatch.setenv("MASTER_URL", "http://me:geheim@host/")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    folder = crash.write(raised(ValueError("x")), folder=run, rank=0, world=1)
    assert folder is not None
    written = (folder / "environment.json").read_text()
    assert "geheim" not in "".join(path.read_text() for path in folder.iterdir())
    variables = json.loads(written)["variables"]
    assert variables["NCCL_DEBUG"] == "INFO"
    assert variables["TOKENIZERS_PARALLELISM"] == "false"
    assert variables["MASTER_URL"] == "http://host/"


def test_all_ranks_of_a_crash_share_a_folder_and_the_next_crash_has_its_own(run: Path) -> None:
    """Four processes at once, twice; nothing tells them of each other but the launcher's variable."""
    code = (
        "import sys; from pathlib import Path; from fullshard.explain import crash; "
        "print(crash.write(ValueError(sys.argv[2]), folder=Path(sys.argv[1]), rank=int(sys.argv[2]), world=4))"
    )
    for number in (1, 2):
        started = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(run), str(rank)],
                env={**os.environ, "TORCHELASTIC_RUN_ID": "same on both: several nodes meet under one name"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(4)
        ]
        written = {process.communicate()[0].strip() for process in started}
        assert written == {str(run / f"crash-{number}")}
        assert len(list((run / f"crash-{number}").glob("rank-*.txt"))) == 4
    assert sorted(path.name for path in run.glob("*crash*")) == ["crash-1", "crash-2"]


def test_each_start_of_a_run_has_its_own_crash_folder(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = []
    for start in ("one", "two"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", start)
        folders.append(crash.write(ValueError("x"), folder=run, rank=len(folders), world=2))
    assert folders == [run / "crash-1", run / "crash-2"]


def test_a_run_folder_that_does_not_exist_is_made(tmp_path: Path) -> None:
    folder = crash.write(ValueError("early"), folder=tmp_path / "a" / "b", rank=0, world=1)
    assert folder == tmp_path / "a" / "b" / "crash-1"
    assert sorted(path.name for path in folder.iterdir()) == ["environment.json", "rank-0.txt", "start.txt"]


def test_an_unwritable_folder_raises_no_second_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    error = raised(ValueError("the real one"))
    crash.report(error, folder=tmp_path / "file" / "run", rank=0, world=1)
    assert error.__notes__[0].endswith("A crash folder could not be written.")
    assert str(error) == "the real one"


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("even its name is an error")


def test_an_error_without_a_printable_text_is_still_reported(run: Path) -> None:
    crash.report(raised(Unspeakable()), folder=run, rank=0, world=1)
    assert "Unspeakable" in (run / "crash-1" / "rank-0.txt").read_text()


def test_a_full_disk_raises_no_second_error(run: Path) -> None:
    """No byte can be written: for this process the largest file has size 0."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    error = raised(ValueError("the real one"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        crash.report(error, folder=run, rank=0, world=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert error.__notes__[0].endswith("A crash folder could not be written.")
    assert not list(run.glob("*crash*")), "half a folder was left"


def test_the_last_lines_explain_the_error_or_say_that_it_is_unknown(run: Path) -> None:
    known = crash.last_words(raised(RuntimeError("CUDA out of memory. Tried")), run / "crash-1")
    assert "The GPU ran out of memory" in known
    assert known.endswith(f"Crash folder: {run / 'crash-1'}")
    unknown = crash.last_words(raised(RuntimeError("no idea")), run / "crash-1")
    assert "fullshard does not know this error" in unknown
    assert unknown.endswith(f"Crash folder: {run / 'crash-1'}")


def test_a_single_process_ends_with_the_explanation(run: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from fullshard.explain import crash\n"
        "try:\n    raise RuntimeError('CUDA out of memory. Tried to allocate 2 GiB')\n"
        "except BaseException as error:\n"
        "    crash.report(error, folder=Path(sys.argv[1]), rank=0, world=1)\n    raise"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.index("Traceback") < done.stderr.index("The GPU ran out of memory (cuda-out-of-memory)")
    assert done.stderr.splitlines()[-1] == f"Crash folder: {run / 'crash-1'}"


@pytest.mark.parametrize("error", [RecipeError("a typo"), KeyboardInterrupt(), SystemExit(0)])
def test_user_errors_and_exits_leave_no_crash_folder(error: BaseException, run: Path) -> None:
    crash.report(raised(error), folder=run, rank=0, world=1)
    assert crash.newest(run) is None


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_numerical_guard_and_a_failed_checkpoint_load_are_crashes(run: Path, tmp_path: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    guard = raised(NumericalError("At step 3 the loss is nan and the gradient norm 1.0; both must be finite."))
    crash.report(guard, folder=run, rank=0, world=1)
    assert "not-finite" in guard.__notes__[0]
    dcp.save({"a": torch.ones(1)}, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(BaseException, match="Missing key") as failed:
        dcp.load({"b": torch.ones(1)}, checkpoint_id=tmp_path / "c", no_dist=True)
    assert not isinstance(failed.value, Exception)  # DCP's error is a BaseException
    crash.report(failed.value, folder=run, rank=0, world=1)
    assert "state-dict-keys" in failed.value.__notes__[0]
    assert crash.newest(run) == run / "crash-2"


# Under a launcher


def launched(
    run: Path, tmp_path: Path, monkeypatch: Any, errors: dict[int, BaseException]
) -> dict[int, crash.LastWords]:
    """What torchrun's agent reads of ranks that report an error."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    monkeypatch.setenv(crash.REPORTED_BY_LAUNCHER, "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    said = {}
    for rank, error in errors.items():
        handover = tmp_path / f"error-{rank}.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(handover))
        crash.report(raised(error), folder=run, rank=rank, world=len(errors))
        assert not hasattr(error, "__notes__")
        failure = ProcessFailure(local_rank=rank, pid=1, exitcode=1, error_file=str(handover))
        said[rank] = handed_over(failure.error_file_data)
    return said


def test_the_launcher_finds_the_rank_that_is_the_cause(run: Path, tmp_path: Path, monkeypatch: Any) -> None:
    lost = "[pair.cc:537] Read error: Connection closed by peer [127.0.0.1]:1"
    errors = {0: RuntimeError(lost), 1: OSError(28, "No space left on device"), 2: RuntimeError(lost)}
    said = launched(run, tmp_path, monkeypatch, errors)
    assert crash.culprit(said, otherwise=0) == 1
    words = explained(said, rank=1, line="Rank 1 ended")
    assert "The disk is full (disk-full)" in words
    assert words.endswith(f"Crash folder: {run / 'crash-1'}")
    assert {path.name for path in (run / "crash-1").glob("rank-*")} == {"rank-0.txt", "rank-1.txt", "rank-2.txt"}
    assert crash.culprit({0: said[0], 2: said[2]}, otherwise=2) == 2  # only victims: what the launcher saw first


def test_of_two_causes_the_first_is_reported() -> None:
    said = {0: crash.LastWords("no idea"), 1: crash.LastWords("CUDA out of memory"), 2: crash.LastWords()}
    assert crash.culprit(said, otherwise=1) == 1
    assert crash.culprit(said, otherwise=0) == 0
    assert crash.culprit(said, otherwise=2) == 0


def test_the_launcher_reports_a_killed_rank(run: Path, tmp_path: Path, monkeypatch: Any) -> None:
    said = launched(run, tmp_path, monkeypatch, {0: RuntimeError("Connection closed by peer")})
    line = f"Rank 1 (process 7) {how(-signal.SIGKILL)}. The other ranks were stopped."
    words = explained({**said, 1: handed_over(None)}, rank=1, line=line)
    assert "A rank was killed by the system (rank-killed)" in words
    assert (run / "crash-1" / "rank-1.txt").read_text() == line + "\n"
    # Nobody left anything: the line alone is explained.
    alone = explained({1: crash.LastWords()}, rank=1, line=line)
    assert "(rank-killed)" in alone
    assert "rash folder" not in alone, "nobody was left who could have written one"
    assert explained({1: crash.LastWords()}, rank=1, line="Rank 1 ended.") == ""


@pytest.mark.parametrize(
    ("codes", "first"),
    [
        ({0: (1, 10), 1: (-9, 10)}, 1),  # lost its peer, and the peer
        ({0: (1, 10), 1: (-9, 45)}, 0),  # the agent lost patience with rank 1
        ({0: (1, 10), 1: (2, 10)}, 1),
        ({1: (1, 10), 0: (75, 10)}, 1),
        ({1: (7, 10), 0: (-15, 10)}, 1),
        ({1: (75, 10), 0: (75, 10)}, 1),
    ],
)
def test_which_rank_was_first(codes: dict[int, tuple[int, int]], first: int) -> None:
    assert End({rank: Failure(code, 1, when) for rank, (code, when) in codes.items()}).rank == first


def test_a_hang_is_the_fault_of_the_rank_that_the_others_wait_for() -> None:
    hang = "The run hangs at step 68: no rank has moved for 31 s.\n  Rank 0 keeps the others waiting.\n  The ranks end."
    end = End({1: Failure(1, 7, 10.0, crash.LastWords(hang, None, hang)), 0: Failure(-15, 6, 10.1)})
    assert end.cause == 0
    assert end.why() == "kept the others waiting (no rank has moved for 31 s)"
    assert next(end.report(killed="")) == hang


def test_a_message_without_a_traceback_says_all() -> None:
    words = "Rank 0 waited topology.timeout_s = 15 s at 127.0.0.1:46257 for rank 1 of 2."
    end = End({0: Failure(1, 7, 10.0, crash.LastWords(words, None, words)), 1: Failure(-15, 8, 10.1)})
    assert list(end.report(killed="")) == ["Rank 0 (process 7) ended with exit code 1. The other ranks were stopped."]


def test_a_worker_that_dies_while_it_hands_over_a_batch_is_no_lost_rank() -> None:
    text = (
        'Traceback (most recent call last):\n  File "site-packages/torch/utils/data/dataloader.py", line 1291, in '
        '_try_get_data\n    data = self._data_queue.get(timeout=timeout)\n  File "multiprocessing/connection.py", line '
        "395, in _recv\n    chunk = read(handle, remaining)\n"
        "ConnectionResetError: [Errno 104] Connection reset by peer\n"
    )
    assert not crash.is_victim(text)
    assert explain(text)[0].entry.title == "A data loader process died"
    assert crash.is_victim("ConnectionResetError: [Errno 104] Connection reset by peer")


def test_an_error_file_of_another_tool_is_ignored() -> None:
    for data in (None, {}, "text", {"message": "text"}, {"message": {"message": "a mistake", "extraInfo": {}}}):
        assert handed_over(data) == crash.LastWords()


def test_losing_another_rank_is_never_reported_as_a_user_error() -> None:
    def wrapped(cause: Exception) -> BaseException:
        try:
            raise SetupError("the ranks did not meet") from cause
        except SetupError as error:
            return raised(RecipeError(f"again: {error}"))  # with the first one as its context

    lost = RuntimeError("[pair.cc:537] Read error: Connection closed by peer [127.0.0.1]:1")
    assert crash.lost_a_rank(wrapped(lost))
    assert not crash.lost_a_rank(wrapped(ConnectionResetError(104, "Connection reset by peer"))), "a hub hung up"
    assert not crash.lost_a_rank(raised(SetupError("Connection closed by peer")))
