"""The workers that are chosen beside a device: the batches of the host, copied ahead without a wait for the device."""

import itertools
import multiprocessing

import torch

from datasets import ImageSet, build_train_data, load_image_sets
from datasets.loading.workers import choose_workers
from tests.support.configs import CPU
from tests.support.loading import folder_settings, make_folder, settings
from tests.support.pretend_device import DEVICE, on_pretend_device, pinned, waits
from utils.distributed import Process


def batches(config, image_set: ImageSet, process: Process) -> list:
    windows = build_train_data(config, image_set, process).windows(0, 6)
    return list(itertools.chain.from_iterable(window.batches for window in windows))


@on_pretend_device
def test_beside_a_device_threads_read_files_and_processes_images_in_memory(tmp_path, monkeypatch):
    # torch's own thread pins what comes from processes, and the pretend device is in this one alone.
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned(tensor.clone()))
    beside = Process(torch.device(DEVICE), num_cores=3)
    for config, kind in (
        (folder_settings(make_folder(tmp_path), None), "threads"),
        (settings(NUM_WORKERS=None), "processes"),
    ):
        image_set = load_image_sets(config)[0]
        assert choose_workers(config, image_set, beside)[:2] == (kind, 3)
        with waits() as seen:
            ours = batches(config, image_set, beside)
        assert not seen and not multiprocessing.active_children()
        for batch, plain in zip(ours, batches(config, image_set, Process(CPU)), strict=True):
            assert batch.images.device == batch.targets.device == beside.device
            assert torch.equal(batch.images.cpu(), plain.images) and torch.equal(batch.targets.cpu(), plain.targets)
