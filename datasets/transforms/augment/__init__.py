"""Augmentation policies, colour jitter, greyscale and blur for one training image, as timm's."""

# ruff: noqa: F401

from datasets.transforms.augment.augmentation import REVISION, Augmentation, build_augmentation
from datasets.transforms.augment.names import parse_policy
from datasets.transforms.augment.plan import OPERATIONS, Operation, Plan
