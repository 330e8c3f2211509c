"""The candidates of a choice: weights, each with an image size if wanted."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from engine.catalogue import USUAL, best_of, figures, find_names, is_pattern
from models.weights.files import find_file
from models.weights.metadata import pretrained_cfg
from utils.runs import LATEST, without_latest
from utils.text import counted

MOST_MATCHES = 6  # candidates from one pattern


class Candidate(NamedTuple):
    """A file of weights or the name of timm weights, and the side of its images (None: that of the settings)."""

    source: str
    size: int | None = None

    @property
    def word(self) -> str:
        """Return the word that names this candidate."""
        return f"{self.source}@{self.size}" if self.size else self.source

    @property
    def settings(self) -> dict[str, str]:
        """Return the settings of a run that fine-tunes this candidate, as texts of a settings file."""
        return {"MODEL.PRETRAINED": self.source} | ({"DATA.IMAGE_SIZE": str(self.size)} if self.size else {})


def candidates_of(words: Sequence[str], notes: list[str]) -> list[Candidate]:
    """Return the candidates that these words name, or the usual ones. Add lines about patterns to `notes`.

    Raise ConfigError for a word that is neither a file, nor the name of timm weights, nor a pattern with a match.
    """
    candidates: dict[tuple[Path, int | None], Candidate] = {}
    for candidate in (candidate for word in words or USUAL for candidate in _of_word(word, notes)):
        path = find_file(candidate.source) or Path(candidate.source)
        candidates.setdefault((path.resolve(), candidate.size), candidate)
    return [*candidates.values()]


def _of_word(word: str, notes: list[str]) -> Iterator[Candidate]:
    source, size = word, None
    if (match := re.fullmatch(r"(.+)@([1-9][0-9]*)", word)) and find_file(word) is None:
        source, size = match[1], int(match[2])
    if find_file(source) is not None:
        yield Candidate(source, size)
        return
    if not is_pattern(source):
        pretrained_cfg(source)  # raises an error with similar names
        yield Candidate(source, size)
        return
    names = find_names([source])
    chosen = best_of(names, MOST_MATCHES)
    if len(names) > len(chosen):
        known = sum(name in figures() for name in chosen)
        how = "that no other match beats in both accuracy and speed on ImageNet" if known else "the first"
        notes.append(f"{source}: {len(chosen)} of {counted(len(names), 'match')}, {how}")
    yield from (Candidate(name, size) for name in chosen)


def with_newest_run(words: Sequence[str], save: str) -> list[str]:
    """Return the words with the newest run in `save` in place of `latest`."""
    return [re.sub(f"^{LATEST}(?=@|$)", lambda _: without_latest(LATEST, save), word) for word in words]
