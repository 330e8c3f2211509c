"""Hostile files, secrets in the environment, and commands and calls that must use their safe forms."""

import ast
import contextlib
import functools
import gzip
import io

import pytest
import yaml
from PIL import Image

from configs.load import load
from datasets.pixels import Pixels
from datasets.pixels.decode import decode
from datasets.types import ImageReadError
from tests.support.cases import cases_of, content_of, names_of
from tests.support.modules import parsed
from tests.support.refusals import refused
from tests.support.runs import ROOT, run_folder
from utils.errors import ConfigError

pytestmark = pytest.mark.slow

PACKAGES = ("configs", "datasets", "engine", "models", "scripts", "utils")
OURS = [*ROOT.glob("*.py"), *(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))]


@pytest.mark.parametrize("text", cases_of("mistakes-that_ask_for_python"))
def test_settings_with_python_code_are_never_executed(tmp_path, text):
    marker, path = tmp_path / "marker", tmp_path / "hostile.yaml"
    path.write_text(content_of(text).replace("MARKER", str(marker)))
    with refused(ConfigError, *names_of("mistakes-that_ask_for_python", text)):
        load(["-cfg", str(path)])
    assert not marker.exists()
    with contextlib.suppress(yaml.YAMLError, TypeError):
        yaml.unsafe_load(path.read_text())
    assert marker.exists(), "this text must be a real threat"


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(("kind", "least"), [("PNG", 1200), ("JPEG", 1200), ("GIF", 1200), ("WEBP", 1920)])
def test_image_with_more_pixels_than_allowed_is_refused(kind, least):
    file = io.BytesIO()
    Image.new("RGB", (40, 30)).save(file, kind)
    assert decode(file.getvalue(), Pixels(3, max_pixels=least)).shape == (30, 40, 3)
    for limit in (least - 1, 599):  # Pillow warns for the first limit and refuses for the second
        with refused(ImageReadError, "DATA.MAX_PIXELS", limit):
            decode(file.getvalue(), Pixels(3, max_pixels=limit))


@functools.cache
def calls() -> list[tuple[str, str, dict[str, str]]]:
    """Return (file, called function, its named arguments) of all calls in the program."""
    found = []
    for path in OURS:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call):
                named = {each.arg: ast.unparse(each.value) for each in node.keywords if each.arg}
                found.append((str(path.relative_to(ROOT)), ast.unparse(node.func), named))
    return found


def test_program_code_never_loads_files_unsafely():
    unsafe = "eval exec compile pickle.load pickle.loads yaml.load yaml.unsafe_load yaml.full_load".split()
    for file, function, named in calls():
        assert function not in unsafe, f"{file}: {function}"
        assert not function.endswith((".extract", ".extractall")), f"{file}: {function} writes what a tar says"
        if function == "torch.load":
            assert named.get("weights_only") == "True", file
        if function == "np.load":
            assert named.get("allow_pickle") == "False", file
        if function == "Image.open":  # with the allowed formats, because for some others Pillow starts Ghostscript
            assert "formats" in named, file
    assert any(function == "torch.load" for _, function, _ in calls())
    assert not any("LOAD_TRUNCATED_IMAGES" in path.read_text() for path in OURS)


def test_durations_never_use_the_wall_clock():
    # MLflow needs a timestamp for each value. Run identities, status.json, ends and heartbeats have timestamps too.
    names = ("record/saved_run", "train/forecast", "session")
    times_of_day = [
        "utils/runs.py",
        "engine/train/budget.py",
        "engine/record/trackers/servers.py",
        *(f"engine/{name}.py" for name in names),
    ]
    for file, function, _ in calls():
        clocks = ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow")
        assert file in times_of_day or not function.endswith(clocks), f"{file}: {function}"


SECRETS = {
    name: f"the-secret-of-{name}"
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "SLURM_JWT", "DATABASE_URL", "HALFSTEP_ANYTHING")
}


@pytest.mark.parametrize("processes", [1, 2])
def test_run_files_and_output_contain_no_secret_environment_variables(tmp_path, start, processes):
    """Check two runs: one that succeeds, and one that fails with a traceback."""
    profile = ["-profile", "1"]
    flags = ["-batch_size", "4", *profile, "-opts", "TRACK=tensorboard", "DATA.SYNTHETIC_SIZE=256"]
    done = start(tmp_path / "done", *flags, processes=processes, set_variables=[SECRETS])
    failed = start(tmp_path / "failed", *flags, processes=processes, set_variables=[SECRETS], break_update=[3])
    assert done.returncode == 0 and failed.returncode == 1, done.printed + failed.printed
    for output in ("done", "failed"):
        files = [path for path in run_folder(tmp_path / output).rglob("*") if path.is_file()]
        assert {"config.yaml", "log.txt", "status.json", "steps.csv"} <= {path.name for path in files}
        for path in files:
            content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            assert b"the-secret-of" not in content and not any(name.encode() in content for name in SECRETS), path
    assert "the-secret-of" not in done.printed + failed.printed
