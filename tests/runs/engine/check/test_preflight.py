"""-check reports each planted mistake in its own row, and leaves no files behind."""

import dataclasses

import pytest
import torch

from engine import check as check_program
from engine import first_passes, memory
from engine.quick_checks import OK, WARN, WRONG
from engine.train.trainer import Trainer
from models import build_model
from tests.runs.engine.check.small_photos import CLEAN, sets_of, trouble
from tests.support.cases import cases_of, names_of
from tests.support.configs import RESNET, replaced, small_config
from tests.support.planted import run_out
from tests.support.refusals import assert_names
from tests.support.runs import rows, typed
from utils.host import count_cores

pytestmark = pytest.mark.slow


def test_check_passes_a_clean_run(check):
    found = check()
    assert trouble(found) == {}
    names = "device,data set,data,classes,training images,training sizes,validation images,validation sizes,duplicates"
    names += ",without pictures,updates,learning rate,warm-up,shared memory,output,model,precision,memory,disk"
    names += ",half precision,time"
    assert set(found) == set(names.split(","))
    assert_names(found["data"][1], "12 training", "6 validation")


def test_check_reads_the_files_of_cached_images(check, photos, tmp_path):
    from datasets.cache import CacheProgress, cache_image_sets

    options = ["DATA.CACHE=8", f"DATA.CACHE_PATH={tmp_path / 'cache'}"]
    config, *sets = sets_of(photos, *options)
    cache_image_sets(config, sets, CacheProgress(print, print))
    assert check("-opts", *options)["training sizes"] == check()["training sizes"]


@pytest.mark.parametrize("flags", cases_of("mistakes-in_the_check"))
def test_check_reports_settings_mistake_in_its_own_row(check, flags):
    if torch.cuda.is_available() and "PRECISION.MATMUL=tf32" in flags:
        pytest.skip("not a mistake on a GPU")
    told = "; ".join(f"{row}: {verdict}" for row, verdict in trouble(check(*flags.split())).items())
    assert_names(told or "(nothing)", *names_of("mistakes-in_the_check", flags))


def test_check_reports_all_independent_mistakes_at_once(check, photos):
    (photos / "train/dog/1.png").write_bytes(b"no picture")
    options = ["TRAIN.OPTIMIZER.NAME=adamm", "TRAIN.AUTO_AUGMENT=rnd", "DATA.MAX_BAD_FRACTION=0", "MODEL.FREEZE=[x]"]
    found = trouble(check("-output", "/proc/halfstep", "-opts", *options))
    wrong = {row for row, verdict in found.items() if verdict == WRONG}
    assert wrong == {"optimizer", "augmentation", "training images", "output", "model"}
    assert set(trouble(check("-data_path", "nowhere", "-resume", "no.pth"))) == {"data", "checkpoint"}


def test_check_runs_training_updates_and_one_evaluation_batch(check, monkeypatch):
    trained, evaluated, build, update = [], [], check_program.build, Trainer.update

    def build_and_limit(plan, log):
        trainer = build(plan, log)
        trainer.model.register_forward_pre_hook(
            lambda model, given: None if model.training else evaluated.append(len(given[0]))
        )
        return trainer

    monkeypatch.setattr(check_program, "build", build_and_limit)
    monkeypatch.setattr(
        Trainer, "update", lambda self, window: (trained.append(window.num_samples), update(self, window))
    )
    found = check("-opts", "DATA.BATCH_SIZE_EVAL=5")
    assert set(trained) == {2, 4} and set(evaluated) == {5}  # the memory is measured with 2 images
    assert trouble(found) == {}


def limit_memory(monkeypatch, fits: int) -> None:
    """Let the trainer of -check run out of memory with more images."""
    build = check_program.build

    def build_and_limit(plan, log):
        run_out(trainer := build(plan, log), fits, step=0)
        return trainer

    monkeypatch.setattr(check_program, "build", build_and_limit)


def test_check_names_flags_if_updates_run_out_of_memory(check, monkeypatch):
    limit_memory(monkeypatch, fits=2)
    found = check()
    assert trouble(found) == {"time": WRONG}
    assert_names(found["time"][1], "out of memory", "-batch_size 2 -accum_iter 2")


@pytest.mark.parametrize(("peak", "fits", "verdict"), [(50, 4, OK), (95, 4, WARN), (50, 2, WARN)])
def test_check_tries_the_largest_batch_on_a_device(check, monkeypatch, peak, fits, verdict):
    limit_memory(monkeypatch, fits)
    for name in (check_program, first_passes, memory):
        monkeypatch.setattr(name, "reports_memory", lambda device: True, raising=False)
        monkeypatch.setattr(name, "raises_when_full", lambda device: True, raising=False)
    functions = {
        "mem_get_info": (100 * 2**20, 0),
        "max_memory_allocated": peak * 2**20,
        "reset_peak_memory_stats": None,
    }
    for name, value in functions.items():
        monkeypatch.setattr(torch.cpu, name, lambda device, value=value: value, raising=False)
    found = check()
    assert found["memory"][0] == verdict and found["time"][0] == OK
    assert_names(found["memory"][1], f"{peak} MiB with a batch of {fits} images", "100 MiB")


def test_missing_device_does_not_skip_image_check(check):
    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    found = check("-opts", "DEVICE=cuda")
    assert trouble(found) == {"device": WRONG} and "training images" in found


def test_check_reports_whether_initial_weights_can_be_loaded(check, tmp_path):
    def saved(name: str, num_classes: int, depth: int) -> str:
        config = dataclasses.replace(small_config(tmp_path), DATA=sets_of(tmp_path / "photos")[0].DATA)
        torch.save(build_model(replaced(config, MODEL={"DEPTH": depth}), num_classes).state_dict(), tmp_path / name)
        return str(tmp_path / name)

    other, same, head = saved("other.pth", 2, 3), saved("same.pth", 2, 2), saved("head.pth", 3, 2)
    gentle = ["-opts", "TRAIN.BASE_LR=1e-6"]
    found = check("-pretrained", other, *gentle)
    assert trouble(found) == {"model": WRONG} and "blocks.2." in found["model"][1]
    found = check("-pretrained", head, *gentle)
    assert trouble(found) == {}
    assert_names(found["model"][1], "3 classes")
    assert trouble(check("-resume", same)) == {}
    for flag, name in (("-pretrained", "MODEL.PRETRAINED"), ("-resume", "-resume")):
        found = check("-eval", flag, head)
        assert trouble(found) == {"weights": WRONG}
        assert_names(found["weights"][1], name, "-num_classes")
    assert trouble(check("-resume", "auto")) == {}


CHECK = ("-check", "-check_images", "10")


@pytest.mark.long
def test_check_compares_settings_with_the_resumed_run(tmp_path, small_yaml):
    flags = ["-cfg", str(small_yaml), "-output", str(tmp_path / "o"), "-batch_size", "160"]
    assert typed("main_single_gpu.py", *flags).returncode == 0
    before = sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*"))
    deeper = "-opts MODEL.DEPTH=3 RESUME.ALLOW_CHANGED=[MODEL.DEPTH]"
    frozen = "-opts MODEL.FREEZE=[patch_embed] RESUME.ALLOW_CHANGED=[MODEL.FREEZE]"
    for words, row, verdict, parts in (
        ("", "resume", OK, ["epoch 2", "step 4"]),
        ("-pretrained nothing.pth", "resume", OK, []),  # a resumed run does not read these weights
        ("-epochs 3", "resume", OK, ["3 epochs instead of 2"]),
        ("-opts SEED=3", "resume", WRONG, ["SEED: 0 -> 3"]),
        (deeper, "resume", WRONG, ["blocks.2."]),
        (frozen, "resume", WRONG, ["MODEL.FREEZE"]),
        ("-eval", "weights", OK, ["raw"]),
    ):
        found = rows(typed("main_single_gpu.py", *flags, "-resume", "auto", *CHECK, *words.split()).stdout)
        assert found[row][0] == verdict and all(part in found[row][1] for part in parts), words
        assert "MODEL.PRETRAINED" not in found.get("model", "")
    assert sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*")) == before


def test_check_estimates_scale_with_the_number_of_processes(check):
    found = check("-ngpus", "3", program="main_multi_gpu.py")
    assert trouble(found) == {}
    assert_names(found["device"][1], "processes: 3")
    assert_names(found["learning rate"][1], "12 images")
    assert_names(found["memory"][1], 3)


def test_unshardable_optimizer_fails_the_check(check):
    lamb = ["DIST.STRATEGY=fsdp2", "TRAIN.OPTIMIZER.NAME=lamb"]
    assert trouble(check("-ngpus", "2", "-opts", *lamb, program="main_multi_gpu.py")) == {"optimizer": WRONG}


def test_check_under_launcher_prints_a_single_table(photos):
    (photos.parent / "clean.yaml").write_text(CLEAN)
    flags = f"-cfg {photos.parent}/clean.yaml -data_path {photos} -check -output {photos}/o".split()
    result = typed("main_multi_gpu.py", *flags, "-opts", "TRAIN.MODEL_EMA_DECAY=0.5", processes=2).done()
    assert_names(rows(result.stdout)["device"][1], "processes: 2")
    assert_names(result.stdout, "TRAIN.MODEL_EMA_DECAY", "TRAIN.MODEL_EMA")  # has no effect without the EMA
    assert result.stdout.count("check: 0 wrong") == 1


def test_check_compiles_the_model_like_a_run(check, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: compiled.append(self))
    options = ["-opts", "COMPILE=blocks"]
    assert trouble(check(*options)) == {} and len(compiled) == 2
    verdict, told = check(*options, *RESNET.split(), "DATA.IMAGE_SIZE=32")["model"]
    assert verdict == WRONG
    assert_names(told, "COMPILE", "blocks")


@pytest.mark.parametrize("more, warns", [(0, False), (1, True)])
def test_more_processes_than_cores_of_a_cpu_are_warned_of(small_yaml, more, warns):
    number = count_cores() + more
    ended = typed("main_multi_gpu.py", "-cfg", small_yaml, *CHECK, "-ngpus", number, "-device", "cpu")
    assert ("warning: -ngpus" in ended.stdout) == warns
    assert f"processes: {number}" in ended.stdout
