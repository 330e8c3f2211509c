"""The candidates of a choice: weights, each with an image size if wanted."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from configs.image_size import to_image_size
from configs.schema import MAX_SIDE
from engine.catalogue import USUAL, best_of, figures, find_names, is_pattern
from models.weights.files import find_file
from models.weights.metadata import pretrained_cfg
from utils.errors import ConfigError
from utils.runs import LATEST, without_latest
from utils.text import counted

MOST_MATCHES = 6  # candidates from one pattern


class Candidate(NamedTuple):
    """A file of weights or the name of timm weights, and the size of its images (None: that of the settings)."""

    source: str
    size: int | str | None = None  # as in DATA.IMAGE_SIZE

    @property
    def word(self) -> str:
        """Return the word that names this candidate."""
        return f"{self.source}@{self.size}" if self.size else self.source

    @property
    def settings(self) -> dict[str, str]:
        """Return the settings of a run that fine-tunes this candidate, as texts of a settings file."""
        return {"MODEL.PRETRAINED": self.source} | ({"DATA.IMAGE_SIZE": str(self.size)} if self.size else {})


def candidates_of(candidate_names: Sequence[str], notes: list[str]) -> list[Candidate]:
    """Return the candidates with these names, or the usual ones. Add lines about patterns to `notes`.

    Raise ConfigError for a name that is neither a file, nor the name of timm weights, nor a pattern with a match.
    """
    candidates: dict[tuple[Path, int | str | None], Candidate] = {}
    for candidate in (candidate for name in candidate_names or USUAL for candidate in _named(name, notes)):
        path = find_file(candidate.source) or Path(candidate.source)
        candidates.setdefault((path.resolve(), candidate.size), candidate)
    return [*candidates.values()]


def _named(candidate_name: str, notes: list[str]) -> Iterator[Candidate]:
    """Yield the candidate with this name, or the best ones that match this pattern."""
    source, size = candidate_name, None
    match = re.fullmatch(r"(.+)@([1-9][0-9]*(x[1-9][0-9]*)?)", candidate_name)
    if match and find_file(candidate_name) is None:
        source, size = match[1], _size_of(candidate_name, match[2])
    if find_file(source) is not None:
        yield Candidate(source, size)
        return
    if not is_pattern(source):
        pretrained_cfg(source)  # raises an error with similar names
        yield Candidate(source, size)
        return
    matches = find_names([source])
    chosen = best_of(matches, MOST_MATCHES)
    if len(matches) > len(chosen):
        known = sum(name in figures() for name in chosen)
        how = "that no other match beats in both accuracy and speed on ImageNet" if known else "the first"
        notes.append(f"{source}: {len(chosen)} of {counted(len(matches), 'match')}, {how}")
    yield from (Candidate(name, size) for name in chosen)


def _size_of(candidate_name: str, text: str) -> int | str:
    try:
        return to_image_size(text)
    except ValueError:
        raise ConfigError(f"{candidate_name}: {text} is no size of images; use at most {MAX_SIDE} pixels") from None


def with_newest_run(candidate_names: Sequence[str], save: str) -> list[str]:
    """Return the names with the newest run in `save` in place of `latest`."""
    return [re.sub(f"^{LATEST}(?=@|$)", lambda _: without_latest(LATEST, save), name) for name in candidate_names]
