from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import HashStore

from fullshard.contracts.launcher import Ranks
from fullshard.errors import AbsentError, SetupError
from fullshard.faults.run_before import awaited_its_end
from fullshard.launch.local import Local, variables
from fullshard.launch.rendezvous import Meeting, facts

TELL = """
import json, os, pathlib
pathlib.Path("{folder}", os.environ["RANK"] + ".json").write_text(json.dumps(dict(os.environ)))
"""


@pytest.fixture(autouse=True)
def _leaves_the_process_as_it_was() -> Iterator[None]:
    environ, handlers = dict(os.environ), [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    elastic = logging.getLogger("torch.distributed.elastic.agent.server.api").disabled
    yield
    assert {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"} == {
        k: v for k, v in environ.items() if k != "PYTEST_CURRENT_TEST"
    }
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert logging.getLogger("torch.distributed.elastic.agent.server.api").disabled == elastic


TWO = Ranks(per_node=2, timeout_s=30)


def start(code: str, ranks: Ranks = TWO) -> int:
    return Local().start([sys.executable, "-S", "-c", code], ranks)


def environments_of(folder: Path) -> list[dict[str, str]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def test_each_rank_gets_torchruns_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)
        assert start(TELL.format(folder=tmp_path)) == 0
    first, second = environments_of(tmp_path)
    assert (first["RANK"], second["RANK"], second["LOCAL_RANK"]) == ("0", "1", "1")
    for environ in (first, second):
        assert (environ["WORLD_SIZE"], environ["LOCAL_WORLD_SIZE"], environ["GROUP_WORLD_SIZE"]) == ("2", "2", "1")
        assert int(environ["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)
        assert environ["MASTER_ADDR"] == "127.0.0.1"
        assert environ["MASTER_PORT"] == first["MASTER_PORT"]


def test_ranks_get_their_share_of_threads_and_their_gpus() -> None:
    assert "OMP_NUM_THREADS" not in variables(Ranks(2), {"OMP_NUM_THREADS": "3"})
    assert variables(Ranks(1), {})["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))
    assert "CUDA_VISIBLE_DEVICES" not in variables(Ranks(2), {})
    assert variables(Ranks(2, device_ids=(0, 2)), {})["CUDA_VISIBLE_DEVICES"] == "0,2"
    assert variables(Ranks(2, device_ids=(0, 2)), {"CUDA_VISIBLE_DEVICES": "4,5,6"})["CUDA_VISIBLE_DEVICES"] == "4,6"
    with pytest.raises(SetupError, match="CUDA_VISIBLE_DEVICES=4,5 leaves GPUs 0 to 1"):
        variables(Ranks(2, device_ids=(0, 2)), {"CUDA_VISIBLE_DEVICES": "4,5"})


@pytest.mark.parametrize("code", [2, 3, 75])
def test_a_known_exit_code_is_kept_without_extra_output(code: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert start(f"import os, sys, signal\nif os.environ['RANK'] == '1': sys.exit({code})\nsignal.pause()") == code
    assert capfd.readouterr().err == ""


def test_a_bug_is_one_line_that_names_the_rank(capfd: pytest.CaptureFixture[str]) -> None:
    assert start("import os, sys, signal\nif os.environ['RANK'] == '1': sys.exit(7)\nsignal.pause()") == 1
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("Rank 1 (process ")
    assert "exit code 7" in lines[0]


def test_a_killed_rank_is_named_and_the_others_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = TELL.format(folder=tmp_path).replace("dict(os.environ)", "os.getpid()")
    code += "\nimport signal\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\nsignal.pause()"
    assert start(code) == 1
    assert "Rank 1" in (line := capfd.readouterr().err)
    assert "was ended by SIGKILL: killed " in line
    assert " were in use a moment before" in line
    for pid in environments_of(tmp_path):
        with pytest.raises(ProcessLookupError):
            os.kill(int(str(pid)), 0)


def test_a_rank_that_saves_on_sigterm_does_not_hide_the_one_that_crashed() -> None:
    code = (
        "import os, signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "if os.environ['RANK'] == '1': sys.exit(1)\nsignal.pause()"
    )
    assert start(code) == 1


def test_the_launcher_prints_the_message_of_a_silent_rank(capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        "import os, signal\nos.environ['RANK'] == '0' and signal.pause()\n"
        "from fullshard.commands.group import print_error\nfrom fullshard.errors import DataError\n"
        "print_error(DataError('a.jsonl:7: no text'))\nraise SystemExit(2)"
    )
    assert Local().start([sys.executable, "-c", code], Ranks(2, timeout_s=30)) == 2
    assert capfd.readouterr().err == "Error: rank 1: a.jsonl:7: no text\n"


def test_a_message_that_all_ranks_have_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    imports = "from fullshard.commands.group import print_error\nfrom fullshard.errors import DataError\n"
    code = f"{imports}print_error(DataError('x'))\nexit(2)"
    assert Local().start([sys.executable, "-c", code], Ranks(2, timeout_s=30)) == 2
    assert capfd.readouterr().err.splitlines() in (["Error: x"], ["Error: rank 1: x"])


LAUNCH = """
import sys
from fullshard.errors import FullshardError
from fullshard.contracts.launcher import Ranks
from fullshard.launch.local import Local
try:
    code = Local().start([sys.executable, "-S", "-c", sys.argv[2]], Ranks(**eval(sys.argv[1])))
except FullshardError as error:
    sys.exit(f"Error: {error}")
sys.exit(code)
"""


@contextlib.contextmanager
def launched(code: str, **ranks: object) -> Iterator[subprocess.Popen[str]]:
    """A launcher in a separate process, ended with its ranks when the test is over."""
    # The agent's store ends before every node has left it, and torch's C++ says so.
    environ = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, "-W", "error", "-c", LAUNCH, repr(ranks), code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)


def said(process: subprocess.Popen[str], times: int = 1) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().strip() for _ in range(times)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


# The signals are blocked before `ready` is printed, so that no signal arrives between the word and the wait.
LISTEN = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
sys.stdout.write("ready\\n")
sys.stdout.flush()
signal.sigwait([signal.SIGTERM, signal.SIGINT])
sys.stdout.write("heard\\n")
sys.stdout.flush()
{then}
"""
DIE = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.stdout.write("ready\\n")
sys.stdout.flush()
signal.pause()
"""


@pytest.mark.parametrize(
    ("number", "code", "exit_code", "words"),
    [
        (signal.SIGTERM, LISTEN.format(then="sys.exit(75)"), 75, ""),
        (signal.SIGINT, LISTEN.format(then="sys.exit(75)"), 75, ""),
        (signal.SIGINT, DIE, 130, "Stopped by Ctrl-C.\n"),
    ],
    ids=["SIGTERM", "SIGINT", "SIGINT unheard"],
)
def test_a_signal_reaches_the_ranks_and_their_answer_counts(
    number: signal.Signals, code: str, exit_code: int, words: str
) -> None:
    with launched(code, per_node=2, timeout_s=30) as process:
        assert said(process, 2) == ["ready", "ready"]
        process.send_signal(number)
        _, errors = process.communicate(timeout=300)
        assert (process.returncode, errors) == (exit_code, words)


def test_a_second_ctrl_c_ends_ranks_that_ignore_signals() -> None:
    with launched(LISTEN.format(then="signal.pause()"), per_node=1, timeout_s=30) as process:
        assert said(process) == ["ready"]
        process.send_signal(signal.SIGINT)
        assert said(process) == ["heard"]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
        assert (process.returncode, errors) == (130, "Stopped by Ctrl-C.\n")


ASLEEP = """
import os, sys, time
sys.stdout.write("ready\\n")
sys.stdout.flush()
while not os.path.exists({awake!r}):
    time.sleep(0.05)
"""


def test_sigquit_does_not_end_ranks_that_do_not_listen_yet(tmp_path: Path) -> None:
    with launched(ASLEEP.format(awake=str(tmp_path / "awake")), per_node=2, timeout_s=30) as process:
        assert said(process, 2) == ["ready", "ready"]
        process.send_signal(signal.SIGQUIT)
        assert process.stderr is not None
        assert "The run is still starting" in process.stderr.readline()
        (tmp_path / "awake").touch()
        assert (process.communicate()[1], process.returncode) == ("", 0)


FOLLOW = """
import os, signal, sys
from fullshard.launch.signals import end_with
end_with(int(os.environ["FULLSHARD_STARTED_BY"]))
sys.stdout.write("ready\\n")
sys.stdout.flush()
signal.pause()
"""


def test_ranks_end_when_their_launcher_is_killed() -> None:
    with launched(FOLLOW, per_node=2, timeout_s=30) as process:
        assert said(process, 2) == ["ready", "ready"]
        process.kill()
        # The ranks hold the other end of the pipe: it ends when they have.
        assert process.communicate(timeout=300) == ("", "")


def test_an_early_ctrl_c_prints_no_traceback() -> None:
    with launched(FOLLOW, per_node=2, timeout_s=30) as process:
        assert said(process, 2) == ["ready", "ready"]
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=300) == ("", "Stopped by Ctrl-C.\n")
        assert process.returncode == 130


def test_a_rank_ends_if_its_launcher_has_already_ended() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as gone:
        pass
    code = f"from fullshard.launch.signals import end_with\nend_with({gone.pid})"
    assert subprocess.run([sys.executable, "-S", "-c", code], check=False).returncode == -signal.SIGTERM


def test_two_runs_on_one_machine_do_not_clash() -> None:
    code = "import os, signal\nprint(os.environ['MASTER_PORT'], flush=True)\nsignal.pause()"
    with launched(code, per_node=1, timeout_s=30) as first, launched(code, per_node=1, timeout_s=30) as second:
        assert said(first) != said(second)
        for process in (first, second):
            process.send_signal(signal.SIGTERM)
            assert process.communicate(timeout=300)[1] == "Stopped by SIGTERM.\n"


def test_two_nodes_meet_at_the_master(tmp_path: Path) -> None:
    ranks = {"per_node": 2, "nodes": 2, "master": f"127.0.0.1:{free_port()}", "timeout_s": 300}
    code = TELL.format(folder=tmp_path)
    with launched(code, node_rank=0, **ranks) as first, launched(code, node_rank=1, **ranks) as second:
        for process in (first, second):
            _, errors = process.communicate(timeout=300)
            assert (process.returncode, errors) == (0, "")
    environs = environments_of(tmp_path)
    assert [e["RANK"] for e in environs] == ["0", "1", "2", "3"]
    assert [e["GROUP_RANK"] for e in environs] == ["0", "0", "1", "1"]
    assert {(e["WORLD_SIZE"], e["MASTER_ADDR"]) for e in environs} == {("4", "127.0.0.1")}


def test_a_missing_node_is_an_error() -> None:
    master = f"127.0.0.1:{free_port()}"
    with pytest.raises(SetupError) as error:
        start("pass", Ranks(per_node=1, nodes=2, node_rank=1, master=master, timeout_s=1))
    expected = f"Node 1 waited topology.timeout_s = 1 s at {master} for node 0 of 2: Connection refused. Run the same"
    assert str(error.value).startswith(expected)
    with pytest.raises(SetupError, match="need a place to meet"):
        start("pass", Ranks(per_node=1, nodes=2))


def test_a_waiting_node_says_which_nodes_are_missing_and_handles_signals() -> None:
    ranks = {"per_node": 1, "nodes": 3, "master": f"127.0.0.1:{free_port()}", "timeout_s": 300}
    with launched("pass", node_rank=0, **ranks) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith(f"Waiting for nodes 1, 2 of 3 at {ranks['master']} (")
        assert " s of 300 s). Run the same command on every node, with --node-rank 0 to 2" in line


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        (
            {"node_rank": 1, "nodes": 3},
            "The nodes disagree: node 0 ({}) was started with --nodes 2, node 1 ({}) with --nodes 3.",
        ),
        (
            {"node_rank": 1, "per_node": 2},
            "The nodes disagree: node 0 ({}) was started with --devices 1, node 1 ({}) with --devices 2.",
        ),
    ],
    ids=["nodes", "devices"],
)
def test_nodes_with_different_options_all_stop(second: dict[str, int], problem: str) -> None:
    ranks = {"per_node": 1, "nodes": 2, "master": f"127.0.0.1:{free_port()}", "timeout_s": 300}
    whose = r"host \S+, process \d+"
    with launched("pass", node_rank=0, **ranks) as zero, launched("pass", **{**ranks, **second}) as one:
        for process in (zero, one):
            _, errors = process.communicate(timeout=300)
            assert process.returncode == 1
            assert re.search(re.escape(problem).replace(r"\{\}", whose), errors), errors


def test_the_last_node_to_arrive_notices_a_disagreement_too() -> None:
    """Node 1 is there, and has not compared its options yet."""
    store = HashStore()
    store.set("member-1", json.dumps(facts(options={"--devices": 2})))
    store.add("readers", 1)
    meeting = Meeting("node", 0, 2, "here:1", 60, prefix="")
    with pytest.raises(
        SetupError, match=r"with --devices 1, node 1 \(.*\) with --devices 2\. Give every node the same"
    ):
        meeting.gather(store, facts(options={"--devices": 1}))
    assert store.check(["problem"]), "node 1 reads it"


def test_two_nodes_with_the_same_number_stop_all() -> None:
    ranks = {"per_node": 1, "nodes": 3, "master": f"127.0.0.1:{free_port()}", "timeout_s": 300}
    with contextlib.ExitStack() as running:
        nodes = [running.enter_context(launched("pass", node_rank=number, **ranks)) for number in (0, 1, 1)]
        for process in nodes:
            _, errors = process.communicate(timeout=300)
            assert "Error: Two nodes claim --node-rank 1: host" in errors


def test_a_node_that_comes_back_waits_for_the_end_of_its_run() -> None:
    """As a pod that is replaced while node 0 still saves. Somebody who is alive keeps his number."""
    ranks = {"per_node": 1, "nodes": 2, "master": f"127.0.0.1:{free_port()}", "timeout_s": 300}
    with contextlib.ExitStack() as running:

        def node(number: int, code: str) -> subprocess.Popen[str]:
            return running.enter_context(launched(code, node_rank=number, **ranks))

        zero, one = before = [node(number, FOLLOW) for number in (0, 1)]
        assert [said(process) for process in before] == [["ready"]] * 2
        double = node(1, "pass")
        assert "Error: Two nodes claim --node-rank 1: host" in double.communicate()[1]
        assert (double.returncode, zero.poll(), one.poll()) == (1, None, None)
        one.kill()
        one.wait()
        back = node(1, "pass")
        assert back.stderr is not None
        line = back.stderr.readline()
        assert line.startswith(f"Waiting for node 0 of 2 at {ranks['master']} (")
        assert "s of 300 s): the run before still ends there. Its node 0 ends when it has saved." in line
        zero.kill()
        zero.wait()
        for process in (node(0, "pass"), back):
            process.communicate()
            assert process.returncode == 0


def test_a_node_does_not_wait_for_ever_for_the_end_of_its_run() -> None:
    store = HashStore()
    for key in ("claims-1", "member-0", "member-1"):
        store.set(key, "")
    meeting = Meeting("node", 1, 2, "here:1", 0.1, prefix="")
    with pytest.raises(AbsentError, match=r"node 0 of 2: the run before still ends there\. Its node 0 ends when"):
        awaited_its_end(meeting, store, store)
    store.delete_key("member-0")
    assert not awaited_its_end(meeting, store, store), "the nodes still meet: the number is refused there"
