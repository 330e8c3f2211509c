"""Reads the dependencies and extras of the wheel from requirements.txt, for pyproject.toml."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

EXTRA = re.compile(r"# optional (\w+): ([^,]+),")


class RequirementsHook(MetadataHookInterface):
    def update(self, metadata: dict) -> None:
        lines = (Path(self.root) / "requirements.txt").read_text(encoding="utf-8").splitlines()
        metadata["dependencies"] = [line for line in lines if not line.startswith("#")]
        extras = filter(None, map(EXTRA.match, lines))
        metadata["optional-dependencies"] = {found[1]: found[2].split() for found in extras}
