"""A Slurm cluster of two nodes on this machine, each with its own network and host name in namespaces. When its first
process ends, everything ends."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

from tests.support.runs import wait_until

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "ip", "nsenter", "setpriv")
LACKING = [name for name in PROGRAMS if shutil.which(name) is None]
MISSING = (
    "root" if os.getuid() else f"{' '.join(LACKING)} (apt-get install slurmctld slurmd slurm-client munge iproute2)"
)
IS_MISSING = bool(LACKING or os.getuid())
FILES = Path(__file__).parents[1] / "data/slurm"  # the configuration, and scripts of the cluster


class Slurm:
    """A running cluster; `room` is the folder with its files."""

    def __init__(self, room: Path):
        self.room = room
        (room / "state").mkdir()
        (room / "slurm.conf").write_text((FILES / "slurm.conf").read_text().format(room=room))
        (room / "gres.conf").write_text(f"Name=gpu File={room}/gpu[0-3]\n")
        (room / "hosts").write_text("127.0.0.1 localhost\n10.78.0.254 head\n10.78.0.1 n1\n10.78.0.2 n2\n")
        (room / "munge.key").write_bytes(os.urandom(128))
        (room / "munge.key").chmod(0o400)
        for number in range(4):
            os.mknod(room / f"gpu{number}", 0o020666, os.makedev(1, 3))  # like /dev/null
        self.environment = os.environ | {"SLURM_CONF": str(room / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        spaces = "unshare --pid --fork --kill-child --mount-proc --mount --net --uts".split()
        # --pdeathsig: no process is left behind if pytest is killed.
        words = ["setpriv", "--pdeathsig", "KILL", *spaces, "bash", str(FILES / "head.sh")]
        with open(room / "head.log", "w") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log, cwd=room, env=self.environment)
        wait_until(self._is_up, 60)

    def _is_up(self) -> bool:
        assert self.process.poll() is None, (self.room / "head.log").read_text()
        with contextlib.suppress(AssertionError, IndexError):
            return self.run("sinfo", "-h", "-N", "-o", "%t").split() == ["idle", "idle"]

    def _first(self) -> str:
        """Return the process id of the first process, as seen from outside the cluster."""
        return Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()[0]

    def run(self, *words: str, cwd: Path | None = None, **environment: str) -> str:
        """Run a command in the cluster, but on no node, and return its output."""
        inside = ["nsenter", "--target", self._first(), "--all", "bash", "-c", 'cd "$0" && exec "$@"']
        options = {"env": self.environment | environment, "capture_output": True, "text": True, "timeout": 60}
        done = subprocess.run([*inside, str(cwd or self.room), *words], **options)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """Return the fields that `scontrol show job` prints for a job, by name."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "show", "job", number)))

    def wait(self, job: str, name: str, *values: str) -> dict[str, str]:
        """Wait until a field of the job has one of the values, and return the job."""
        found = []
        wait_until(lambda: found.append(self.job(job)) or found[-1][name] in values)
        return found[-1]

    def lose_node(self) -> None:
        """Cut the second node's network and kill everything on it."""
        self.run("bash", str(FILES / "lose.sh"))

    def bring_node_back(self) -> None:
        self.run("bash", "-c", "ip link set n2 up && rm n2.off")

    def close(self) -> None:
        os.kill(int(self._first()), signal.SIGKILL)
        self.process.wait()
