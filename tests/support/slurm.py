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

SLURM_CONF = """
ClusterName=halfstep
SlurmctldHost=head(10.78.0.254)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={room}/munge.socket,cred_expire=5
StateSaveLocation={room}/state
SlurmdSpoolDir={room}/%n
SlurmctldPidFile={room}/slurmctld.pid
SlurmdPidFile={room}/%n.pid
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=2
ReturnToService=2
SlurmdTimeout=9
KillWait=3
TCPTimeout=2
NodeName=n[1-2] NodeAddr=10.78.0.[1-2] CPUs=8 Gres=gpu:4
PartitionName=all Nodes=ALL Default=YES
"""

# The script of the first process. If slurmd ends, it is restarted once the file n1.off or n2.off is gone.
HEAD = """
set -e
hostname head
mount --bind hosts /etc/hosts
ip link set lo up
ip link add cables type bridge
ip addr add 10.78.0.254/24 dev cables
ip link set cables up
munged --foreground --force --key-file=munge.key --socket=munge.socket --pid-file=munge.pid --log-file=munge.log \
    --seed-file=munge.seed &
until [ -S munge.socket ]; do sleep 0.05; done
slurmctld -D -i &> slurmctld.log &
for number in 1 2; do
    unshare --net --uts sleep infinity &
    inside="nsenter --target $! --net --uts"
    until [ "$(readlink /proc/$!/ns/uts)" != "$(readlink /proc/self/ns/uts)" ]; do sleep 0.05; done
    ip link add n$number type veth peer name eth0 netns $!
    ip link set n$number master cables up
    $inside hostname n$number
    $inside ip addr add 10.78.0.$number/24 dev eth0
    $inside ip link set eth0 up
    $inside ip link set lo up
    while sleep 0.1; do [ -e n$number.off ] || $inside slurmd -D -N n$number &>> n$number.log || true; done &
done
wait
"""

LOSE = """
touch n2.off
ip link set n2 down
host=$(readlink /proc/$(cat n2.pid)/ns/uts)
for each in /proc/[0-9]*; do
    [ "$(readlink $each/ns/uts)" != "$host" ] || [ "$(cat $each/comm)" = sleep ] || kill -9 ${each#/proc/}
done
"""


class Slurm:
    """A running cluster; `room` is the folder with its files."""

    def __init__(self, room: Path):
        self.room = room
        (room / "state").mkdir()
        (room / "slurm.conf").write_text(SLURM_CONF.format(room=room))
        (room / "gres.conf").write_text(f"Name=gpu File={room}/gpu[0-3]\n")
        (room / "hosts").write_text("127.0.0.1 localhost\n10.78.0.254 head\n10.78.0.1 n1\n10.78.0.2 n2\n")
        (room / "munge.key").write_bytes(os.urandom(128))
        (room / "munge.key").chmod(0o400)
        for number in range(4):
            os.mknod(room / f"gpu{number}", 0o020666, os.makedev(1, 3))  # like /dev/null
        self.environment = os.environ | {"SLURM_CONF": str(room / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        spaces = "unshare --pid --fork --kill-child --mount-proc --mount --net --uts".split()
        # --pdeathsig: no process is left behind if pytest is killed.
        words = ["setpriv", "--pdeathsig", "KILL", *spaces, "bash", "-c", HEAD]
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
        self.run("bash", "-c", LOSE)

    def bring_node_back(self) -> None:
        self.run("bash", "-c", "ip link set n2 up && rm n2.off")

    def close(self) -> None:
        os.kill(int(self._first()), signal.SIGKILL)
        self.process.wait()
