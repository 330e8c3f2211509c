"""Image sets, and batches for training and evaluation. Other packages import the names listed here."""

# ruff: noqa: F401

from datasets.bad_images import BadImages
from datasets.build import (
    build_eval_data,
    build_order,
    build_preparation,
    build_train_data,
    choose_workers,
    class_weights,
    invent_images,
    watches,
)
from datasets.fingerprint import validation_facts
from datasets.image_set import ImageSet
from datasets.loading.readers import EvalData, TrainData, Window
from datasets.opening import OpenedData, open_data
from datasets.order import Piece
from datasets.split import write_split
from datasets.transforms import check_policy
from datasets.transforms.crop import Normalize
from datasets.transforms.preparation import Preparation, SizedPreparation, dominant_class
from datasets.types import Batch, CacheProgress, Mixed, PriorFacts, SavedData, Settled
