"""The way from the bytes of an image file to the model's input: decoding, cropping, augmentation, mixing."""

from typing import TYPE_CHECKING

from configs.schema import Config, Train

if TYPE_CHECKING:
    from datasets.transforms.augment import Augmentation
    from datasets.transforms.erasing import Boxes

REVISION = 2  # increases whenever the same settings draw or do something else; a resumed run compares it


def build_augmentation(config: Config) -> "Augmentation | None":
    """Return the augmentation that the settings ask for, if any."""
    if not config.TRAIN.augments:
        return None
    from datasets.transforms.augment import Augmentation

    return Augmentation(config)


def build_boxes(config: Config) -> "Boxes | None":
    """Return what draws the boxes to erase, if the settings ask for random erasing."""
    if not config.TRAIN.RANDOM_ERASE_PROB:
        return None
    from datasets.transforms.erasing import Boxes

    return Boxes(config)


def check_policy(train: Train) -> None:
    """Raise ConfigError if TRAIN.AUTO_AUGMENT is set and names no policy."""
    if train.AUTO_AUGMENT:
        from datasets.transforms.augment import parse_policy

        parse_policy(train)
