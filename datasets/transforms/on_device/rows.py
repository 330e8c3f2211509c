"""The plan of an image as rows of numbers, which the device carries out for all images of a batch at once."""

from collections.abc import Callable
from random import Random

from datasets.transforms.augment import Augmentation
from datasets.transforms.on_device import colors, geometry
from datasets.transforms.on_device.geometry import Matrix
from datasets.transforms.pixels import Operation, Plan, box_of
from datasets.transforms.random_operations import GEOMETRIC
from datasets.types import NUM_PARAMETERS


def no_parameter(value: float) -> tuple[float, ...]:
    return ()


def value_alone(value: float) -> tuple[float, ...]:
    return (value,)


# {name of an operation: its function, and what makes that function's parameters of its value}
ENCODINGS: dict[str, tuple[Callable, Callable[[float], tuple[float, ...]]]] = {
    "autocontrast": (colors.autocontrast, no_parameter),
    "equalize": (colors.equalize, no_parameter),
    "invert": (colors.invert, no_parameter),
    "posterize": (colors.posterize, colors.mask_of),
    "solarize": (colors.solarize, value_alone),
    "solarize_add": (colors.solarize_add, value_alone),
    "brightness": (colors.brightness, value_alone),
    "contrast": (colors.contrast, value_alone),
    "color": (colors.color, value_alone),
    "sharpness": (colors.sharpness, value_alone),
    "gaussian_blur": (geometry.gaussian_blur, box_of),
}
INTERPOLATIONS = {0: geometry.nearest, 2: geometry.bilinear, 3: geometry.bicubic}  # by Pillow's numbers
MATRICES: dict[str, Callable[[float, int], Matrix]] = {name: getattr(geometry, name) for name in GEOMETRIC}
# KIND of Draws.rows is an index into these.
KINDS = (*(kind for kind, _ in ENCODINGS.values()), *INTERPOLATIONS.values())
NUMBERS = {kind: number for number, kind in enumerate(KINDS)}


class OperationRows:
    """Draws the operations of an image as the host would, from the same generator."""

    def __init__(self, augmentation: Augmentation, side: int):
        self.augmentation, self.side = augmentation, side
        self.fill = augmentation.fill if isinstance(augmentation.fill, tuple) else (augmentation.fill,)

    def draw(self, rng: Random, image: int) -> tuple[list[tuple[float, ...]], tuple[float, ...]]:
        """ImageDraws.rows of the image at this position of the batch, and ImageDraws.weights."""
        plan = self.augmentation.draw(rng)
        weights = (*plan.weights, plan.blend) if plan.chains else ()
        return self.encode(plan, image), weights

    def encode(self, plan: Plan, image: int) -> list[tuple[float, ...]]:
        """The plan's `operations` come as one more chain after its chains."""
        rows = []
        for chain, operations in enumerate((*plan.chains, plan.operations)):
            for layer, operation in enumerate(operations):
                kind, parameters = self.encode_one(operation)
                padding = [0.0] * (NUM_PARAMETERS - len(parameters))
                rows.append((image, chain, layer, NUMBERS[kind], *parameters, *padding))
        return rows

    def encode_one(self, operation: Operation) -> tuple[Callable, tuple[float, ...]]:
        """One of KINDS, and its parameters."""
        name, value, resample = operation
        if name not in MATRICES:
            kind, parameters_of = ENCODINGS[name]
            return kind, parameters_of(value)
        kind, matrix = INTERPOLATIONS[resample], MATRICES[name](value, self.side)
        return kind, (*(geometry.in_fixed_point(matrix) if kind is geometry.nearest else matrix), *self.fill)
