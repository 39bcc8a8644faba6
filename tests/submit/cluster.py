"""A real Slurm for tests: its own munged, slurmctld and two slurmd on this machine, in one folder and on free ports."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel", "srun", "setpriv")
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
# A requeued job waits until its credential has expired; the default is two minutes.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldParameters=enable_configless
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
KillWait=120
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MinJobAge=600
# The first name is that of the machine and sorts first: it becomes the address where ranks meet.
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName={second} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE
PartitionName=urgent Nodes=ALL PriorityTier=10
"""


def missing() -> list[str]:
    """The programs of Slurm and munge that are not installed."""
    return [name for name in PROGRAMS if not shutil.which(name, path=_PATH)]


@dataclass
class Cluster:
    """Two nodes of one Slurm. Its commands find it by SLURM_CONF."""

    folder: Path
    _started: ExitStack

    @property
    def environ(self) -> dict[str, str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
        return {**clean, "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _PATH}

    def call(self, *words: str) -> str:
        """What a command of Slurm prints; without a controller these commands block."""
        done = subprocess.run(words, capture_output=True, text=True, env=self.environ, timeout=300, check=False)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def start(self) -> None:
        host, user = socket.gethostname(), _user()
        conf = CONF.format(host=host, second=f"{host}-b", user=user, folder=self.folder, ports=_free_ports(3))
        (self.folder / "slurm.conf").write_text(conf)
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = {"key-file": key, "socket": self.folder / "munge.socket", "pid-file": self.folder / "munge.pid"}
        files |= {"log-file": self.folder / "munge.log", "seed-file": self.folder / "munge.seed"}
        self._run("munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in files.items()))
        until(lambda: (self.folder / "munge.socket").exists(), "munged did not start")
        self._run("slurmctld", "-D")
        for node in (host, f"{host}-b"):
            self._run("slurmd", "-D", "-N", node)
        until(lambda: self._idle() == 2, f"two nodes are not idle, see {self.folder}")

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says about a job."""
        words = self.call("scontrol", "--oneliner", "show", "job", number).split(" ")
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, number: str, state: str) -> dict[str, str]:
        """The job once it is in this state."""
        until(lambda: self.job(number)["JobState"] == state, f"job {number} is not {state}")
        return self.job(number)

    def stop(self) -> None:
        """Ends the jobs, then the programs."""
        words = ["timeout", "10", "scancel", "--full", "--signal=KILL", "--user", _user()]
        subprocess.run(words, capture_output=True, env=self.environ, check=False)
        self._started.close()

    def _run(self, *words: str) -> None:
        log = self._started.enter_context((self.folder / f"{words[0]}.out").open("ab"))
        command = ["setpriv", "--pdeathsig", "TERM", *words]  # ends with us, even if we are killed
        process = subprocess.Popen(command, env=self.environ, stdout=log, stderr=log, start_new_session=True)
        self._started.callback(_end, process)

    def _idle(self) -> int:
        words = ["timeout", "10", "sinfo", "--noheader", "--partition=main", "--Node", "--format=%t"]
        done = subprocess.run(words, capture_output=True, text=True, env=self.environ, check=False)
        return done.stdout.split().count("idle")


def start(folder: Path) -> Cluster:
    cluster = Cluster(folder, ExitStack())
    try:
        cluster.start()
    except BaseException:
        cluster.stop()
        raise
    return cluster


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name


def _free_ports(count: int) -> Sequence[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def until(done: Callable[[], bool], why: str) -> None:
    """Waits for a while that only ends a broken test: Slurm alone may send a signal a minute late."""
    end = time.monotonic() + 300
    while not done():
        assert time.monotonic() < end, why
        time.sleep(0.1)
