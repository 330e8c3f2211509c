"""The folder of a named run: which run owns it, and which run may continue in it."""

import errno
import fcntl
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from unittest.mock import Mock

import pytest

from engine.session import Session, lock_folder, make_folder
from tests.support.configs import CPU, SMALL, load_text, small_config
from tests.support.image_sets import make_folders
from tests.support.refusals import refused
from tests.support.runs import Ended, epochs_of, rows, status_of, typed
from utils.distributed import Process
from utils.errors import ConfigError, LostProcess

pytestmark = pytest.mark.slow


def start(folder: Path, *words: str, **options) -> Ended:
    """Run one epoch under the name `mine`."""
    (folder / "small.yaml").write_text(SMALL)
    flags = ["-cfg", str(folder / "small.yaml"), "-output", str(folder / "o"), "-name", "mine", "-epochs", "1"]
    script = "main_multi_gpu.py" if options.get("processes") else "main_single_gpu.py"
    return typed(script, *flags, *words, **{"faults": {"draw_nothing": []}, **options})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return the folder of a run of two processes that was killed before its first save, and then finished."""
    folder = tmp_path_factory.mktemp("named")
    killed = start(folder, "-resume", "auto", processes=2, faults={"signal_at": [3, signal.SIGKILL, [0, 1]]})
    assert killed.codes == [-signal.SIGKILL] * 2
    assert not (folder / "o/mine/last.pth").exists()
    assert start(folder, "-resume", "auto", processes=2).codes == [0, 0]
    return folder


@pytest.mark.long
def test_restart_of_named_run_killed_early_reuses_its_folder(folder):
    assert {path.name for path in (folder / "o").iterdir()} == {"mine"}
    status = status_of(folder / "o/mine")
    assert (status["state"], status["epoch"]) == ("done", 1)
    assert len(epochs_of(folder / "o/mine")) == 1


def test_existing_run_name_is_refused_without_resume(folder):
    before = {path: path.read_bytes() for path in (folder / "o").rglob("*") if path.is_file()}
    start(folder).refused("NAME", folder / "o/mine", f"-resume {folder / 'o/mine'}", "-name")
    assert {path: path.read_bytes() for path in (folder / "o").rglob("*") if path.is_file()} == before
    found = rows(start(folder, "-check", "-check_images", "10").stdout)["output"]
    assert found[0] == "WRONG" and str(folder / "o/mine") in found[1]
    goes_on = start(folder, "-resume", "auto").done()
    assert "Epoch[" not in goes_on.stdout, "its only epoch is already trained"


def test_saved_settings_repeat_run_under_another_name(folder):
    words = ["-cfg", str(folder / "o/mine/config.yaml"), "-name", "again", "-epochs", "1"]
    assert typed("main_single_gpu.py", *words, "-output", str(folder / "p")).returncode == 0
    assert [path.name for path in (folder / "p").iterdir()] == ["again"]


@pytest.mark.long
def test_evaluation_writes_to_its_own_folder(folder):
    words = ["-eval", "-output", str(folder / "o"), "-name"]
    weights = ["-pretrained", str(folder / "o/mine/best.pth")]
    assert typed("main_single_gpu.py", *words, "scored", *weights).returncode == 0
    assert status_of(folder / "o/scored")["state"] == "done"
    typed("main_single_gpu.py", *words, "mine", *weights).refused("NAME", folder / "o/mine")
    assert typed("main_single_gpu.py", *words, "mine", "-resume", "auto").returncode == 0
    assert len(list((folder / "o").glob("eval-*-mine"))) == 1


def config_of(folder: Path, *options: str):
    return small_config(folder, f"SAVE={folder / 'o'}", "NAME=mine", *options)


@pytest.mark.long
@pytest.mark.parametrize("words", [[], ["MODEL.RESUME=auto"]])
def test_only_one_of_simultaneous_runs_gets_the_requested_name(tmp_path, words):
    config, barrier = config_of(tmp_path, *words), Barrier(8)

    def begin(number: int) -> tuple | str:
        barrier.wait()
        try:
            folder, _ = make_folder(config, "train", None)
            return folder, lock_folder(folder)
        except ConfigError as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(begin, range(8)))
    assert [each[0] for each in got if isinstance(each, tuple)] == [tmp_path / "o/mine"]
    assert all(str(tmp_path / "o/mine") in each for each in got if isinstance(each, str))


def test_foreign_folders_and_damaged_runs_are_never_overwritten(tmp_path):
    (tmp_path / "o/mine").mkdir(parents=True)
    (tmp_path / "o/mine/thesis.tex").touch()
    for words in ([], ["MODEL.RESUME=auto"]):
        with refused(ConfigError):
            make_folder(config_of(tmp_path, *words), "train", None)
    assert [path.name for path in (tmp_path / "o/mine").iterdir()] == ["thesis.tex"]
    folder, _ = make_folder(config_of(tmp_path, "NAME=other"), "train", None)
    (folder / "last.pth").write_bytes(b"damaged")
    with refused(ConfigError):
        make_folder(config_of(tmp_path, "NAME=other", "MODEL.RESUME=auto"), "train", None)


def test_runs_started_within_a_second_get_separate_folders(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.session.time.strftime", lambda form: "now")
    config = config_of(tmp_path, "NAME=")
    made = [make_folder(config, "train", None)[0] for _ in range(3)]
    assert [each.name for each in made] == ["train-now", "train-now.2", "train-now.3"]
    (tmp_path / "missing").symlink_to(tmp_path / "disk that is not mounted")
    with refused(ConfigError, "SAVE", tmp_path / "missing"):
        make_folder(config_of(tmp_path, f"SAVE={tmp_path / 'missing'}", "NAME="), "train", None)


def test_resumed_run_keeps_its_folder_and_name(tmp_path):
    with refused(ConfigError, "NAME", tmp_path / "other", "mine"):
        make_folder(config_of(tmp_path), "train", tmp_path / "other")
    mine = tmp_path / "elsewhere/mine"
    assert make_folder(config_of(tmp_path), "train", mine) == (mine, False)


def test_folder_of_a_killed_run_is_locked_when_its_loader_processes_have_ended(tmp_path, monkeypatch):
    left = [BlockingIOError(errno.EAGAIN, "planted"), BlockingIOError(errno.EAGAIN, "planted"), None]
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=left))
    file, is_locked = lock_folder(tmp_path)
    assert is_locked and not file.closed


@pytest.mark.parametrize(("number", "has_lock"), [(errno.ENOSYS, False), (errno.ENOTSUP, False), (errno.EACCES, None)])
@pytest.mark.usefixtures("here")
def test_file_system_without_locks_only_causes_a_warning(tmp_path, monkeypatch, capsys, number, has_lock):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(number, "planted")))
    if has_lock is None:
        with refused(ConfigError, "SAVE", tmp_path):
            lock_folder(tmp_path)
    else:
        Session(load_text(SMALL, "-output", str(tmp_path)), Process(CPU)).open_folder("train")
        assert "warning: SAVE: " in capsys.readouterr().out


def test_failed_start_removes_only_its_own_folder(here):
    class Lost(Process):
        def first(self, task, *types):
            task()
            raise LostProcess("process 1 broke off")

    (here / "mine.txt").write_text("")
    session = Session(load_text(SMALL, "-output", "o"), Lost(CPU))
    with pytest.raises(LostProcess) as lost:
        session.open_folder("train")
    session.end(lost.value)
    assert sorted(path.name for path in here.iterdir()) == ["mine.txt", "x.yaml"]


PHOTOS = SMALL.replace("IMAGE_CHANNELS: 1", "IMAGE_CHANNELS: 3")


def train_on(data: Path, output: Path, *words: str) -> Ended:
    """Run one epoch on class folders."""
    (data.parent / "photos.yaml").write_text(PHOTOS)
    flags = ["-dataset", "imagefolder", "-data_path", data, "-output", output, "-epochs", "1", "-batch_size", "2"]
    words = ["-cfg", data.parent / "photos.yaml", *flags, *words]
    return typed("main_single_gpu.py", *map(str, words))


def test_output_folder_inside_an_image_folder_is_refused(tmp_path):
    make_folders(tmp_path / "photos", {"cat": 4, "dog": 4})
    make_folders(tmp_path / "elsewhere", {"owls": 4})
    (tmp_path / "photos/owl").symlink_to(tmp_path / "elsewhere/owls")
    make_folders(tmp_path / "parts", {"train/cat": 2, "train/dog": 2, "val/cat": 2})
    before = sorted(tmp_path.rglob("*"))
    places = {"photos": ("photos/cat", "photos/cat/more/o", "photos/new", "elsewhere/owls/o")}
    places["parts"] = ("parts/train", "parts/val/o", "parts/train/dog/o")
    for data, outputs in places.items():
        for output in outputs:
            train_on(tmp_path / data, tmp_path / output).refused("-output")
            assert sorted({*tmp_path.rglob("*")} - {tmp_path / "photos.yaml"}) == before
    found = rows(train_on(tmp_path / "photos", tmp_path / "photos/cat", "-check").stdout)["data"]
    assert found[0] == "WRONG" and str(tmp_path / "photos/cat") in found[1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("output", "told"), [("photos", "left out: folders of runs 2"), ("parts", "first"), ("parts/o", "")]
)
def test_output_folder_next_to_class_folders_is_not_read_as_class(tmp_path, output, told):
    make_folders(tmp_path / "photos", {"cat": 4, "dog": 4})
    make_folders(tmp_path / "parts", {"train/cat": 2, "train/dog": 2, "val/cat": 2})
    data, save = tmp_path / output.split("/")[0], tmp_path / output
    for name in ("first", "second"):
        ended = train_on(data, save, "-name", name).done()
        assert status_of(save / name)["about"]["classes"] == 2
    assert told in ended.stdout, "a line must name or count the folder that is skipped"
