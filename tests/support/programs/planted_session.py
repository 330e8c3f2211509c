"""A session of planted parts: planted_session.py FOLDER SECONDS. The second part hides a process and then sleeps."""

import sys
from dataclasses import dataclass
from pathlib import Path

from scripts.benchmarks.gpu_session import run_session
from scripts.benchmarks.session.plan import Part


@dataclass(frozen=True)
class Planted(Part):
    """A part that is a line of shell."""

    def command(self, folder: Path, dry: bool) -> list[str]:
        row = f"""echo '{{"part": "{self.name}"}}' >> {folder}/session.jsonl"""
        return ["sh", "-c", f"cd {folder}; {self.function.replace('ROW', row)}"]


if __name__ == "__main__":
    # In a session of its own, as some tests start their programs: to kill the part's group is not enough.
    hidden = "setsid sleep 1000 & echo $$ > part; echo $! > hidden.part; mv hidden.part hidden; ROW; sleep 1000"
    parts = [("first", 600, "ROW"), ("slow", float(sys.argv[2]), hidden), ("last", 600, "ROW; exit 3")]
    planted = tuple(Planted(name, seconds, name, function) for name, seconds, function in parts)
    sys.exit(run_session(Path(sys.argv[1]), planted, dry=True))
