"""Image transforms, from the bytes of a file to the model's input: decoding, cropping, augmentation, mixing."""

from typing import TYPE_CHECKING

from configs.schema import Config, Train

if TYPE_CHECKING:
    from datasets.transforms.augment import Augmentation
    from datasets.transforms.erasing import Boxes

# REVISION increases whenever augmentation changes for the same settings. A resumed run compares the saved value.
# Revision 3 only resizes some images in another order (see crop.py).
REVISION = 3


def build_augmentation(config: Config) -> "Augmentation | None":
    """Return the augmentation for these settings, or None."""
    if not config.TRAIN.augments:
        return None
    from datasets.transforms.augment import Augmentation

    return Augmentation(config)


def build_boxes(config: Config) -> "Boxes | None":
    """Return the generator of boxes to erase, or None if the settings have no random erasing."""
    if not config.TRAIN.RANDOM_ERASE_PROB:
        return None
    from datasets.transforms.erasing import Boxes

    return Boxes(config)


def check_policy(train: Train) -> None:
    """Raise ConfigError if TRAIN.AUTO_AUGMENT is set and is not a valid policy."""
    if train.AUTO_AUGMENT:
        from datasets.transforms.augment import parse_policy

        parse_policy(train)
