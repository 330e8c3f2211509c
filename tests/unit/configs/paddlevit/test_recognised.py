"""PaddleViT's settings are recognised, and the modules for them are imported only then."""

import pytest

from configs.load import load
from configs.translate.paddlevit import our_name
from engine.settings import load_settings
from tests.support.configs import load_text, write
from tests.support.modules import ROOT
from tests.support.runs import run_fresh

SHIPPED = """
import sys
import pytest

from configs.load import load
from configs.yaml_files import shipped_files
for path in shipped_files():
    if path.stem.startswith("vit_"):  # others translate timm's names
        load(["-cfg", str(path)])
print(*(name for name in sys.modules if name.endswith("paddlevit_files")))
"""


@pytest.mark.slow
def test_shipped_files_do_not_load_the_translation_of_paddlevits_files(tmp_path):
    (tmp_path / "program.py").write_text(SHIPPED)
    assert run_fresh(str(tmp_path / "program.py"), environment={"PYTHONPATH": str(ROOT)}).done().stdout.split() == []


def test_values_spelled_as_in_paddlevit_are_read_with_a_note(here):
    words = ["NGPUS=-1", "TRAIN.GRAD_CLIP=0", "PRECISION.DTYPE=fp16", "PRECISION.MODE=apex_O1"]
    loaded = load(["-cfg", "vit_digits", "-amp", "-opts", *words])
    assert (loaded.config.NGPUS, loaded.config.TRAIN.GRAD_CLIP) == (None, None)
    assert (loaded.config.PRECISION.DTYPE, loaded.config.PRECISION.MODE) == ("float16", "autocast")
    assert sum(" is read as " in note for note in loaded.notes) == 4


def test_each_field_of_the_older_format_has_the_name_of_the_setting_that_it_sets(here):
    fields = {"HIDDEN_SIZE": 96, "NUM_LAYERS": 3, "NUM_HEADS": 3, "MLP_DIM": 192, "QKV_BIAS": False, "PATCH_SIZE": 4}
    origins = load_text(f"MODEL: {{TRANS: {fields}}}").origins
    changed = {key for key, origin in origins.items() if origin == "x.yaml"}
    assert {our_name(f"MODEL.TRANS.{name}") for name in fields} == changed


def test_fields_of_the_older_format_without_a_setting_keep_their_names(here):
    loaded = load_settings(["-cfg", write("MODEL: {TRANS: {HIDDEN_SIZE: 96, HYBRID: false}}")])
    assert loaded.config.MODEL.EMBED_DIM == 96 and our_name("MODEL.TRANS.HYBRID") == "MODEL.TRANS.HYBRID"
