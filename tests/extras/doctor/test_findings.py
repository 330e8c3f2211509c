"""The doctor's message for each case that it can find."""

from dataclasses import replace

import pytest
import torch

from extras.doctor.diagnosis import Diagnosis, Row, Vanishing
from extras.doctor.overflow import advice
from extras.doctor.trace import Location
from tests.support.cases import assert_cases
from tests.support.configs import small_config

pytestmark = pytest.mark.slow

CORE, MLP = Location("blocks.1.attn", "logits (q·k)"), Location("blocks.1.mlp.fc1")
ROWS = [Row(CORE, "float16", 131008.0, 64.0, 0.25), Row(MLP, "float16 float32", 3.5, 70000.0, None)]
CONSTANTS = [Vanishing("norm.eps", 1e-8, 1.0, False), Vanishing("blocks.0.ls1.gamma", 2e-8, 0.75, True)]
FOUND = Diagnosis(torch.float16, 1024.0, CORE, rows=ROWS, black_list=["blocks.1.attn"], best_scale=256.0)
FINDINGS = {
    "nothing breaks": replace(FOUND, first=None, black_list=[], vanishing=CONSTANTS),
    "an output, fixed": FOUND,
    "an output without a row, not fixed": replace(FOUND, rows=[], is_fixed=False),
    "an output of bfloat16, not fixed": replace(FOUND, half=torch.bfloat16, rows=[], is_fixed=False),
    "a gradient, fixed by the scale": replace(FOUND, first=MLP, is_forward=False, black_list=[]),
    "a gradient without a row": replace(FOUND, first=Location(""), is_forward=False, rows=[]),
    "an output in float32 too": replace(FOUND, breaks_in_float32=True, rows=[]),
    "a gradient in float32 too": replace(FOUND, breaks_in_float32=True, is_forward=False, rows=[]),
}


def test_doctor_findings_prescription_and_advice_have_their_settings_and_values(tmp_path):
    usual = small_config(tmp_path).PRECISION
    odd = replace(usual, MODE="naive", CUSTOM_BLACK_LIST=("head",), CUSTOM_WHITE_LIST=("conv",))
    odd = replace(odd, MAX_LOSS_SCALING=128.0, MIN_LOSS_SCALING=512.0)
    pages = {}
    for name, found in FINDINGS.items():
        written = [f"{of}: {found.prescription(each)}" for of, each in {"usual": usual, "odd": odd}.items()]
        last = advice(found, "run/doctor.yaml" if found.first and found.is_fixed else None)
        pages[name] = "\n".join([*found.lines(), *written, last])
    assert_cases("doctor-doctor", pages)
