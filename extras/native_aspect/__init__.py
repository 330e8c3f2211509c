"""Images at their own aspect ratio (DATA.TOKENS), as sequences of patches for timm's NaFlexVit.

A batch is one uint8 tensor [B, N + 1, P * P * C], so that loaders, pinned memory, prefetching and memory recovery work
as for squares. Each image has N patches, padded with zeros, and a last row whose first bytes are the size of its grid
(models.py). PatchNormalize (transforms.py) turns a batch into the dict that NaFlexVit takes. This file has the rules for
settings that such images do not support.
"""

from collections.abc import Callable, Iterator
from typing import Any

TOKENS = "DATA.TOKENS"
# {setting: (supported values, the demand in the message, the reason)}
SUPPORTED = {
    "TRAIN.SIZE_SCHEDULE": (((),), "must be empty", "DATA.TRAIN_TOKENS varies the size of images"),
    "DATA.TRAIN_CROP": (("rrc",), "must be rrc", "simple crops are square"),
    "TRAIN.CUTMIX_MINMAX": (
        ((),),
        "must be empty",
        "images of different sizes have no common box; use TRAIN.CUTMIX_ALPHA",
    ),
    "TRAIN.MIXUP_MODE": (("batch",), "must be batch", "timm mixes whole batches of such images"),
    "TRAIN.OBJECTIVE": (("classes",), "must be classes", "features are learned from square images"),
    "DATA.CACHE": (("none", "disk"), "must be none or disk", "a cache of reduced images would lose detail; use disk"),
}


def native_rules(values: dict[str, Any], named: Callable[[str], str]) -> Iterator[tuple[bool, str, str]]:
    """Yield whether a rule is broken, the setting to name, and the problem."""
    for key, (allowed, demand, reason) in SUPPORTED.items():
        value = values[key] if isinstance(values[key], str | int | tuple) else tuple(values[key])
        yield value not in allowed, key, f"{demand} with {named(TOKENS)}: {reason}"
