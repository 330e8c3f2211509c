"""Behaviour that only a GPU shows: no host sync in a step, float16 by default, less memory, exact resume."""

import time

import pytest
import torch

from datasets import build_train_data
from engine.build import build_trainer
from engine.checkpoint.async_saver import HostCopy
from engine.plan import StepPlan
from engine.train.clock import PHASES
from engine.train.trainer import Trainer
from models import build_model
from tests.support.configs import SMALL, replaced, small_config
from tests.support.opened import open_sets
from tests.support.run_hash import run_hash
from tests.support.runs import epochs_of, run, run_folder
from tests.support.trainers import Reports, cosines_to_float32, train, update
from utils.distributed import Process
from utils.log import Log
from utils.program import StopSignal

SYNTHETIC = "DATA.DATASET=synthetic DATA.IMAGE_SIZE=64 DATA.BATCH_SIZE=64 MODEL.EMBED_DIM=192 MODEL.DEPTH=4".split()


def cuda_trainer(config) -> Trainer:
    process = Process.start("cuda")
    train_set, _ = open_sets(config)
    torch.manual_seed(0)
    model = build_model(config, len(train_set.classes)).to(process.device)
    data = build_train_data(config, train_set, process)
    return build_trainer(StepPlan.of_trial(config, process, train_set), model, data, Log(0))


def test_device_times_of_update_phases_sum_to_100_percent(tmp_path):
    trainer = cuda_trainer(small_config(tmp_path, "REPORT_FREQ=4", *SYNTHETIC))
    reports = Reports()
    trainer.callbacks = [reports]
    start = time.perf_counter()
    train(trainer)
    passed = time.perf_counter() - start
    assert 0.5 * passed < sum(report.seconds for report in reports.seen) < passed
    for report in reports.seen:
        assert sum(report.shares[name] for name in PHASES) == pytest.approx(100, abs=0.05)
        assert min(report.shares[name] for name in ("forward", "backward", "optimizer")) > 0


def updated(tmp_path, *options: str) -> tuple[float, int, torch.dtype | None]:
    """Return the loss of three updates, their peak memory, and the chosen half-precision type."""
    trainer = cuda_trainer(small_config(tmp_path, *SYNTHETIC, "MODEL.DEPTH=12", "MODEL.DROPPATH=0.2", *options))
    torch.cuda.reset_peak_memory_stats()
    for window in trainer.data.windows(0, 3):
        trainer.update(window)
    return trainer.report().mean_loss, torch.cuda.max_memory_allocated(), trainer.precision.half


def test_amp_and_grad_checkpointing_each_save_memory_on_gpu(tmp_path):
    _, memory, half = updated(tmp_path)
    loss, less, chosen = updated(tmp_path, "AMP=true")
    again, least, _ = updated(tmp_path, "AMP=true", "TRAIN.GRAD_CHECKPOINTING=true")
    assert half is None and chosen is torch.float16
    assert less < 0.75 * memory and least < 0.6 * less
    assert again == pytest.approx(loss, rel=1e-3)


def test_float8_gradients_stay_near_float32_at_any_batch_size(tmp_path):
    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9")
    options = ("AMP=true", "PRECISION.MODE=float8", *SYNTHETIC, "MODEL.EMBED_DIM=384", "DATA.BATCH_SIZE=30")
    trainer = cuda_trainer(small_config(tmp_path, *options))
    update(trainer, 3)
    assert trainer.report().skipped == 0
    assert 0.9 < min(cosines_to_float32(trainer).values()) < 0.9999


def test_deterministic_gpu_run_matches_unbroken_run_after_resume(tmp_path):
    """torch's own gradient for resizing position embeddings is not deterministic."""
    settings = tmp_path / "small.yaml"
    settings.write_text(SMALL)
    flags = ["-cfg", str(settings), "-amp", "-opts", "DETERMINISTIC=true", "MODEL.DROPPATH=0.1", "SAVE_STEPS=10"]
    flags.append("TRAIN.SIZE_SCHEDULE=[0:4,1:8]")
    hashes = []
    for name, stop_after in (("unbroken", None), ("resumed", 1)):
        output = ["-output", str(tmp_path / name)]
        if stop_after:
            run("main_single_gpu.py", *output, "-resume", "auto", *flags, "TRAIN.NUM_EPOCHS=2").done()
            folder = run_folder(tmp_path / name)
            (folder / "last.pth").unlink()  # as if killed before the last save: previous.pth is in mid-epoch
            assert torch.load(folder / "previous.pth", weights_only=True)["step"] % 44
        run("main_single_gpu.py", *output, "-resume", "auto", *flags).done()
        hashes.append(run_hash(run_folder(tmp_path / name)))
    assert hashes[0] == hashes[1]


def test_digits_run_with_amp_reaches_97_percent_accuracy_on_gpu(tmp_path):
    run("main_single_gpu.py", "-cfg", "configs/vit_digits.yaml", "-amp", "-output", str(tmp_path)).done()
    last = epochs_of(run_folder(tmp_path))[-1]
    assert last["eval_top1"] >= 97


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_gpus_give_the_same_losses_as_one_gpu(tmp_path, strategy):
    losses = []
    for count in (1, 2):
        flags = f"-amp -epochs 2 -ngpus {count} -batch_size {128 // count} -output {tmp_path}/{count}".split()
        words = ["-cfg", "configs/vit_digits.yaml", *flags, "-opts", f"DIST.STRATEGY={strategy}"]
        run("main_multi_gpu.py", *words).done()
        losses.append([row["train_loss"] for row in epochs_of(run_folder(tmp_path / str(count)))])
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_batches_copied_ahead_to_gpu_match_batches_on_cpu(tmp_path, workers):
    config = small_config(tmp_path, "DATA.NUM_WORKERS=2", f"DATA.WORKERS={workers}", "DATA.DROP_LAST=false")
    train_set, _ = open_sets(config)
    device = torch.device("cuda", 0)

    def batches(where: torch.device) -> list:
        data = build_train_data(config, train_set, Process(where))
        return [batch for window in data.windows(0, 60) for batch in window.batches]

    for ours, plain in zip(batches(device), batches(torch.device("cpu")), strict=True):
        assert ours.images.device == ours.targets.device == device and ours.num_samples == plain.num_samples
        assert torch.equal(ours.images.cpu(), plain.images) and torch.equal(ours.targets.cpu(), plain.targets)


def test_host_copy_of_a_busy_device_is_consistent():
    device = torch.device("cuda", torch.cuda.current_device())
    snapshot = HostCopy(device)
    matrix, state = torch.randn(4096, 4096, device=device), {"weights": torch.zeros(2**20, device=device), "one": 1}
    for step in range(3):
        for _ in range(20):
            matrix = torch.nn.functional.normalize(matrix @ matrix)  # makes the queue long before the copy is added
        state["weights"] += 1
        copy = snapshot.take(state)
        state["weights"] += 1
        assert copy["weights"].is_pinned() and (copy["weights"] == 2 * step + 1).all() and copy["one"] == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_single_process_fsdp2_matches_plain_model_without_syncs(tmp_path, monkeypatch, dtype):
    options = ("AMP=true", f"PRECISION.DTYPE={dtype}", "TRAIN.MODEL_EMA=true", "TRAIN.ACCUM_ITER=2", *SYNTHETIC)
    whole = cuda_trainer(small_config(tmp_path, *options))
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr("engine.parallel.is_sharded", lambda config, process: True)
        shards = cuda_trainer(small_config(tmp_path, *options, "DIST.STRATEGY=fsdp2"))
        for one, other in zip(whole.data.windows(0, 4), shards.data.windows(0, 4), strict=True):
            whole.update(one)
            torch.cuda.set_sync_debug_mode("error" if shards.step else "default")
            shards.update(other)
            torch.cuda.set_sync_debug_mode("default")
        assert shards.report().mean_loss == pytest.approx(whole.report().mean_loss, rel=1e-2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("amp", [False, True])
def test_automatic_batch_size_trains_and_leaves_a_tenth_of_memory(tmp_path, amp):
    """Limit the usable memory, because otherwise the search fills the whole device."""
    from engine.batch_size import StepTrial, search
    from engine.first_passes import fit_micro_batches
    from engine.memory import release

    device = torch.device("cuda", 0)
    limit = 2 * 2**30
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(device).total_memory, device)
    try:
        options = ("DATA.DATASET=synthetic", "DATA.IMAGE_SIZE=64", "MODEL.EMBED_DIM=192", "MODEL.DEPTH=4")
        config = small_config(tmp_path, *options, f"AMP={amp}", "TRAIN.MODEL_EMA=true", "DATA.BATCH_SIZE=auto")
        trial = StepTrial(config, 1000, Process.start("cuda"), StopSignal())
        found = search(trial, withheld=limit // 10, limit=10**5)
        del trial
        release(device)
        assert found % 8 == 0 and 8 < found < 10**5
        trainer = cuda_trainer(replaced(config, DATA={"BATCH_SIZE": found, "SYNTHETIC_SIZE": 3 * found}))
        torch.cuda.reset_peak_memory_stats(device)
        fit_micro_batches(trainer, Log(1))
        windows = trainer.data.windows(0, 3)
        for _ in range(3):
            trainer.update(next(windows))
        assert trainer.data.order.batch_size == found
        assert 0.4 * limit < torch.cuda.max_memory_allocated(device) < 0.95 * limit
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
