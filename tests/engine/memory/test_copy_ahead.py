"""A batch that finds no memory on the device while it is copied ahead is trained like any other, once and in its turn."""

from unittest import mock

import torch

from datasets import Batch
from datasets.loading.workers import prefetch_to_device
from tests.support.configs import small_config
from tests.support.pretend_device import DEVICE, NAME, on_pretend_device, waits
from tests.support.trainers import make_trainer, update
from utils.torch_internals import TorchDispatchMode

UPDATES = 3
SPLIT = "DATA.BATCH_SIZE=16", "TRAIN.ACCUM_ITER=2", "TRAIN.MIXUP_ALPHA=0.8", "TRAIN.WARMUP_EPOCHS=0"


class NoRoom(TorchDispatchMode):
    """Copies of images to the device fail if they have one of these numbers, or are of more than `fits` images."""

    def __init__(self, *numbers: int, fits: int = 10**6):
        super().__init__()
        self.numbers, self.fits, self.sizes = numbers, fits, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        to_device = func is torch.ops.aten._to_copy.default and torch.device(kwargs.get("device") or "cpu").type == NAME
        if to_device and args[0].dtype is torch.uint8:
            self.sizes.append(len(args[0]))
            if len(self.sizes) in self.numbers or len(args[0]) > self.fits:
                raise torch.OutOfMemoryError("out of memory, as arranged")
        return func(*args, **kwargs)


def trained(config, no_room: NoRoom) -> tuple:
    """The trainer after the updates, in float64, and the images of each forward."""
    trainer = make_trainer(config, double=True, device=torch.device(DEVICE))
    forwards = []
    trainer.model.register_forward_pre_hook(lambda module, inputs: forwards.append(len(inputs[0])))
    with no_room:
        update(trainer, UPDATES)
    return trainer, forwards


def assert_same_weights(one, other) -> None:
    for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert (mine - theirs).abs().max().item() < 1e-12


@on_pretend_device
def test_before_a_batch_is_used_the_device_waits_for_its_copy_and_keeps_its_memory():
    order, stream = [], torch.accelerator.current_stream()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.record_stream.default:
                order.append(id(args[0]))
            return func(*args, **(kwargs or {}))

    batches = [Batch(torch.full((2, 1, 1, 1), n).pin_memory(), torch.zeros(2).pin_memory(), 2, []) for n in range(3)]
    watched = mock.patch.object(type(stream), "wait_event", lambda self, event: order.append("wait"))
    with Watch(), watched, waits() as seen:
        for given, batch in zip(
            batches, prefetch_to_device((each for each in batches), torch.device(DEVICE)), strict=True
        ):
            assert order == ["wait", id(batch.images), id(batch.targets)]
            assert torch.equal(batch.images.values, given.images)
            order.clear()
    assert seen == {}


@on_pretend_device
def test_a_copy_ahead_that_fails_once_is_made_up_for(tmp_path):
    config = small_config(tmp_path, *SPLIT)
    undisturbed, forwards = trained(config, NoRoom())
    for number in (1, len(forwards) // 2, len(forwards)):
        trainer, seen = trained(config, no_room := NoRoom(number))
        assert seen == forwards and trainer.guard.max_images is None
        assert len(no_room.sizes) == len(forwards) + 1  # one copy was made twice
        assert_same_weights(trainer, undisturbed)


@on_pretend_device
def test_where_no_whole_batch_fits_the_updates_go_on_with_halves_of_it(tmp_path):
    config = small_config(tmp_path, *SPLIT)
    undisturbed, forwards = trained(config, NoRoom())
    half = forwards[0] // 2
    trainer, seen = trained(config, NoRoom(fits=half))
    assert seen == [half] * 2 * len(forwards) and trainer.guard.max_images == half
    assert_same_weights(trainer, undisturbed)
