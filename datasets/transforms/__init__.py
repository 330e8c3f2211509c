"""Image transforms, from the bytes of a file to the model's input: decoding, cropping, augmentation, mixing."""

from configs.schema import Train

# REVISION increases whenever augmentation changes for the same settings. A resumed run compares the saved value.
REVISION = 3


def check_policy(train: Train) -> None:
    """Raise ConfigError if TRAIN.AUTO_AUGMENT is set and is not a valid policy."""
    if train.AUTO_AUGMENT:
        from datasets.transforms.augment import parse_policy

        parse_policy(train)
