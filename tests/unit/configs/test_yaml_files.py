"""Settings files: the precedence of BASE files, and invalid files."""

import shutil
from pathlib import Path

import pytest

from configs.load import load
from configs.schema import Config
from tests.support.cases import cases_of, names_of
from tests.support.configs import load_text, write
from tests.support.refusals import refused
from tests.support.runs import ROOT
from utils.errors import ConfigError

pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize(
    "text", ["", "BASE: ''", "BASE: ['']", "BASE:", "# nothing", "TRAIN:", "TRAIN: null", "DATA: {}"]
)
def test_settings_file_without_settings_gives_the_defaults(text):
    assert load_text(text).config == Config()


def test_settings_file_overrides_its_base_files_loaded_depth_first():
    write("SEED: 1\nDEVICE: cpu\nSAVE: one\nSAVE_FREQ: 1\n", "shared/one.yaml")
    write("BASE: one.yaml\nSEED: 2\nNAME: b\nSAVE: two\n", "shared/two.yaml")
    write("BASE: shared/one.yaml\nSEED: 3\nNAME: c\n", "three.yaml")  # a file may be the BASE of two files
    loaded = load_text("BASE: [shared/two.yaml, '', three.yaml]\nSEED: 4\n")
    config = loaded.config
    assert (config.SEED, config.NAME, config.SAVE, config.SAVE_FREQ) == (4, "c", "one", 1)
    assert loaded.origins["SAVE_FREQ"] == "shared/one.yaml"


def test_section_that_is_written_twice_is_refused():
    with refused(ConfigError, "x.yaml", "TRAIN", "lines 1 and 3"):
        load_text("TRAIN: {BASE_LR: 0.1}\nSEED: 1\nTRAIN: {NUM_EPOCHS: 2}\n")


def test_circular_base_files_are_refused_and_named():
    write("BASE: b.yaml", "a.yaml")
    write("BASE: [./a.yaml]", "b.yaml")
    for first in ("a.yaml", write("BASE: a.yaml")):  # x.yaml leads to the loop but is not part of it
        with refused(ConfigError, "BASE", "a.yaml -> b.yaml -> a.yaml"):
            load(["-cfg", first])
    with refused(ConfigError, "y.yaml -> y.yaml"):
        load(["-cfg", write("BASE: y.yaml", "y.yaml")])


@pytest.mark.parametrize("text", cases_of("mistakes-in_a_file"))
def test_settings_file_mistake_is_reported_with_place_and_remedy(text):
    with refused(ConfigError, *names_of("mistakes-in_a_file", text)):
        load_text(text.encode().decode("unicode_escape"))


def test_binary_file_or_folder_as_cfg_is_refused():
    Path("weights.pth").write_bytes(b"PK\x03\x04\xff\xfe")
    with refused(ConfigError, "weights.pth", "UTF-8", "byte 4", "-pretrained", "-resume"):
        load(["-cfg", "weights.pth"])
    Path("folder").mkdir()
    with refused(ConfigError, "folder", "a folder"):
        load(["-cfg", "folder"])


def test_file_with_bom_crlf_and_python_tags_loads():
    Path("x.yaml").write_bytes("\ufeffSEED: 7\r\nNAME: !!python/object:os.system ä\r\n".encode())
    config = load(["-cfg", "x.yaml"]).config
    assert (config.SEED, config.NAME) == (7, "ä")


def test_missing_cfg_error_shows_how_to_train_on_photos():
    for argv in ([], ["-cfg", ""], ["-amp"]):
        with refused(ConfigError, "halfstep train photos", "-cfg vit_digits", "-cfg list"):
            load(argv)


def test_cfg_that_resembles_no_file_lists_the_shipped_ones():
    with refused(
        ConfigError, "-cfg", "list", "  configs/vit_digits.yaml ", "  configs/recipes/deit_small_patch16_224.yaml "
    ):
        load(["-cfg", "list"])


@pytest.mark.parametrize("name", ["finetune", "finetune.yaml", "vit_small_patch16_224_90ep"])
def test_shipped_file_is_found_by_name_unless_local_file_exists(name):
    Path("finetune").mkdir()
    (path,) = (ROOT / "configs").rglob(f"{name.removesuffix('.yaml')}.yaml")
    assert load(["-cfg", name]).config == load(["-cfg", str(path)]).config
    shutil.rmtree("finetune")
    write("SEED: 7", name)
    assert load(["-cfg", name]).config.SEED == 7


def test_error_for_missing_cfg_or_base_names_it():
    with refused(ConfigError, "flowers.yaml"):
        load_text("BASE: mine/flowers.yaml")
    with refused(ConfigError, "deit_tiny_patch16_224"):  # the name of a shipped file
        load(["-cfg", "configs/deit_tiny_patch16_224.yaml"])


ALIAS, NESTED = "SEED: 1\nDATA: &a {EXIF: ignore}\nMODEL: *a", "SEED: 1\n\nDATA: " + "{a: " * 50 + "}" * 50


@pytest.mark.parametrize("text", [ALIAS, NESTED], ids=["alias", "nested"])
def test_unsupported_yaml_is_refused_with_its_line(text):
    with refused(ConfigError, "x.yaml: line 3:"):
        load_text(text)
