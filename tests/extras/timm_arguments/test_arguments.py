"""The arguments of timm's train.py: each has a row in the documentation, and a hint if it is typed as a flag."""

import pytest

from configs.flags import FLAGS
from configs.timm_arguments import TIMM_ARGUMENTS
from configs.typed_names import suggest_flag
from tests.support.forks import ROOT

pytestmark = pytest.mark.slow

KNOWN_FLAGS = {flag: key for group in FLAGS.values() for flag, (key, _) in group.items()} | {
    "-cfg": "-cfg",
    "-opts": "-opts",
}


def test_every_timm_argument_is_documented_and_gets_a_flag_suggestion():
    page = (ROOT / "docs" / "from-timm.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    assert len(TIMM_ARGUMENTS) == 203, "202, and train-steps-per-epoch, another name of an argument"
    for name, argument in TIMM_ARGUMENTS.items():
        flag = name if name == "data" else f"--{name}"
        ours = [row[1] for row in rows if f"`{flag}`" in row[0]] or [row[2] for row in rows if f"`{flag}`" in row[2]]
        setting = argument.setting.partition("=bce")[0].split(".")
        leaf = setting[1] if "KWARGS" in setting else setting[-1]
        assert len(ours) == 1 and leaf.split("_")[-1].split("=")[-1] in ours[0], flag
        assert suggest_flag(f"--{name}", KNOWN_FLAGS), flag
