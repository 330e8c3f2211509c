"""TensorBoard files in the run's folder."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from configs.schema import DATA, MODEL, RECIPE, Config
from configs.values import flatten, of_role, to_text
from engine.record.board import Board, Row, epoch_figures, step_figures


class TensorBoard(Board):
    """The files are made with the first figure: importing the library takes half a second."""

    def __init__(self, folder: Path, first_step: int, config: Config):
        """`first_step`: of this start of the run; figures of earlier starts from there on are dropped."""
        self._folder, self._first_step = folder / "tensorboard", first_step
        self._changed, self._writer = changed_settings(config), None

    @property
    def is_open(self) -> bool:
        return self._writer is not None

    def open(self) -> None:
        if not self.is_open:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=self._first_step)

    def add_steps(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.add(step_figures(row), int(row["step"]))

    def add_epochs(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.add(epoch_figures(row), int(row["epoch"]))

    def add(self, figures: Mapping[str, float | None], step: int) -> None:
        self.open()
        for name, value in figures.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def add_picture(self, path: Path) -> None:
        import numpy
        from PIL import Image

        with Image.open(path) as picture:
            pixels = numpy.asarray(picture.convert("RGB"))
        self._writer.add_image(path.stem, pixels, dataformats="HWC")

    def show_best(self, best: Mapping[str, Any]) -> None:
        """With the settings that are not the defaults, a row of the tab HPARAMS, which compares runs."""
        figures = {f"best/{name}": value for name, value in best.items()}
        self._writer.add_hparams(self._changed, figures, run_name=".", global_step=best["epoch"])

    def close(self) -> None:
        if self.is_open:
            self._writer.close()


def changed_settings(config: Config) -> dict[str, bool | int | float | str]:
    """The settings with influence on the result that differ from their defaults, as types that TensorBoard knows."""
    values, defaults = flatten(config), flatten(Config())
    changed = {key: values[key] for key in of_role(DATA, MODEL, RECIPE) if values[key] != defaults[key]}
    return {
        key: value if isinstance(value, bool | int | float | str) else to_text_of_any(value)
        for key, value in changed.items()
    }


def to_text_of_any(value: Any) -> str:
    """Sections of arguments too."""
    return str(value) if isinstance(value, dict) else to_text(value)
