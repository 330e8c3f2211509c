"""The comparison of an export with the model that it was made of: the logits of both for random and for extreme images."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from models.export.subject import Subject
from utils.errors import UserError

BOUND = 1e-4  # of the largest logit, or of 1 where that is smaller; float32 in another order differs by less
BATCHES = (1, 8)


class WrongExport(UserError):
    """An export computes something else than its model. No mistake of the user, who can only choose another format."""

    code = 1


def batches(subject: Subject) -> Iterator[Tensor]:
    """Normalized images: random, black, white, and stripes of the two."""
    size = subject.data["input_size"]
    stripes = (torch.arange(size[-1]) % 2).float().expand(size)
    extreme = subject.normalized(torch.stack([torch.zeros(size), torch.ones(size), stripes]))
    for number, count in enumerate(BATCHES):
        random = subject.images(count, seed=number)
        yield random
        yield torch.cat([extreme, random])[:count]


@torch.no_grad()
def largest_difference(subject: Subject, run: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    """Between the logits of the export and the model's, and the bound that applies; WrongExport beyond it."""
    largest, bound = 0.0, BOUND
    for images in batches(subject):
        expected, found = subject.model(images), run(images)
        if found.shape != expected.shape:
            raise WrongExport(f"it gives logits of shape {list(found.shape)}, not {list(expected.shape)}")
        difference = (found.double() - expected.double()).abs().max().item()
        bound = max(bound, BOUND * expected.abs().max().item())
        if not difference <= bound:  # also for NaN
            raise WrongExport(
                f"its logits for {len(images)} images differ by up to {difference:.1e}, above {bound:.1e}"
            )
        largest = max(largest, difference)
    return largest, bound
