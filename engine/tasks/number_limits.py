"""Finds numbers that no image passes, such as 0 and 1 of a share, so that intervals of predictions end there."""

from typing import Any

import numpy as np

from configs.schema import Config
from datasets import ImageSet
from datasets.split.by_hash import hashes_of

# The smallest or largest number is a limit only if at least this many images have it, and at least this share of all
# images. If few images have it, the next images may have a larger (or smaller) number.
FEWEST, SHARE = 5, 0.01


def groups_and_limits(config: Config, train: ImageSet, val: ImageSet) -> tuple[np.ndarray | None, dict[str, Any]]:
    """Return the number of each validation image's group (None without DATA.GROUP_BY), and {"limits": of each column}.

    Limits are a pair for each column: the smallest and the largest number of the training images, None where it is no
    limit. With groups, each group counts once, as images of new groups may differ more.
    """
    parts = (train, val)
    keys = [hashes_of(each.split_keys(), seed=0) for each in parts] if config.DATA.GROUP_BY else []
    tables = [each.meaning.values[each.targets] for each in parts]
    owners = keys[0] if keys else np.arange(len(train))
    limits = []
    for column, others in zip(tables[0].T, tables[1].T, strict=True):
        is_known = ~np.isnan(column)
        least, most = (column[is_known].min(), column[is_known].max()) if is_known.any() else (np.nan, np.nan)
        fewest, ends = max(FEWEST, SHARE * len(np.unique(owners[is_known]))), []
        for end, is_beyond in ((least, others < least), (most, others > most)):
            is_limit = len(np.unique(owners[column == end])) >= fewest and not is_beyond.any()
            ends.append(float(end) if is_limit else None)
        limits.append(ends)
    return keys[1] if keys else None, {"limits": limits}
