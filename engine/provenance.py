"""The facts that must be the same in all processes of a run: settings, images with their labels, source files."""

import contextlib
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.schema import DATA, MODEL, RECIPE, Config
from configs.values import SETTINGS, flatten, of_role
from utils.changed_facts import changed_facts
from utils.distributed import Process
from utils.errors import AlreadyReportedError, ConfigError
from utils.text import first_of, format_ranks

ROOT = Path(__file__).parent.parent
SOURCE_FOLDERS = ("configs", "datasets", "engine", "models", "utils")
# Settings with paths, which may differ between machines. The images, labels and classes are compared instead.
PATHS = "DATA.DATA_PATH", "DATA.IMAGE_ROOT", "DATA.CLASSES"
# Settings that name a file or a timm model. For a file, its content and its name without the folder are compared.
FILES = "MODEL.PRETRAINED", "TRAIN.TEACHER_MODEL", "TRAIN.TEACHER_PRETRAINED", "TRAIN.CLASS_WEIGHTS"
# Settings that decide when processes wait for each other. Their roles are not DATA, MODEL or RECIPE.
IN_STEP = ("DIST.STRATEGY", "REPORT_FREQ", "SAVE_FREQ", "SAVE_STEPS", "KEEP_CHECKPOINTS")


def setting_facts(config: Config) -> dict[str, Any]:
    """Return {setting: value} of all settings that must be the same in every process of a run."""
    values = flatten(config)
    facts = {key: values[key] for key in (*of_role(DATA, MODEL, RECIPE), *IN_STEP) if key not in PATHS}
    facts |= {key: _describe_file(facts[key]) for key in FILES if facts[key]}
    facts |= {key: SETTINGS[key].alike for key in facts if facts[key] in SETTINGS[key].alike}
    return facts | {"EVAL": config.EVAL}


def _describe_file(source: str) -> str:
    """Return the name of a file without its folder, with a digest of its content if the file exists."""
    from models.weights.files import find_file

    name, path = Path(source).name, None
    with contextlib.suppress(ConfigError, OSError):  # the code that loads the file reports the error
        path = find_file(source)
    if path is None:
        return name
    with open(path, "rb") as file:
        return f"{name} ({hashlib.file_digest(file, 'sha256').hexdigest()[:12]})"


def source_facts() -> dict[str, str]:
    """Return {source file: digest} of the halfstep files that a training run may use."""
    files = [*ROOT.glob("main_*.py"), *(file for each in SOURCE_FOLDERS for file in (ROOT / each).rglob("*.py"))]
    hashes = {file.relative_to(ROOT).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()[:12] for file in files}
    return dict(sorted(hashes.items()))


def refuse_other_ranks(process: Process, facts: Mapping[str, Any]) -> None:
    """Raise ConfigError if these facts differ between ranks. Collective.

    Each machine may start its ranks with its own command line, files and copy of the data. If the facts differed, the
    ranks would silently average gradients of different runs.
    """
    digest = hashlib.sha256(repr(facts).encode(errors="surrogateescape")).hexdigest()
    if len(set(process.join([digest]))) == 1:
        return
    first, *others = process.join([dict(facts)])
    differences = {}
    for rank, facts_there in enumerate(others, start=1):
        lacking = dict.fromkeys({*first} ^ {*facts_there}, "missing")  # facts that only one of the two processes has
        differences[rank] = changed_facts(lacking | first, lacking | facts_there)
    if not any(differences.values()):
        return
    if not process.is_first:
        raise AlreadyReportedError("the processes differ in settings, images or source files")
    ranks, hosts = [rank for rank, facts_there in differences.items() if facts_there], process.rendezvous.hosts
    values = [f"{key}: {facts_there}" for key, facts_there in differences[ranks[0]].items()]
    raise ConfigError(
        f"{format_ranks(ranks)} of {process.world_size} ({hosts[ranks[0]]}) would train differently "
        f"from process 0 ({hosts[0]}): {first_of(values, '; ')}; "
        "give all processes the same settings, images and source files (paths may differ)"
    )
