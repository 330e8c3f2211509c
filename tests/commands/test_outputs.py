"""Each command of the table of outputs prints and writes the expected texts, tables, pictures and weights."""

import argparse
import shlex

import pytest

from tests.support.output_table import EXPECTED, QUICK, ROWS, difference, make_root, outputs_of, parser_of

# {script: {flag: why no row has it}}
WITHOUT_ROW = {
    "doctor": {"-batch": "it needs a run that overflowed, as in tests/runs/engine/doctor"},
    "export": dict.fromkeys(["-int8", "-keep_float", "-accept"], "the rounding to 8 bits depends on the processor"),
    "models": dict.fromkeys(
        "-data_path -budget -output -json -dataset -cfg -image_size -batch_size -epochs -device -amp -opts".split(),
        "the times of a choice differ; tests/runs/engine/choice tests it",
    ),
}


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return make_root(tmp_path_factory.mktemp("outputs") / "root")


@pytest.mark.parametrize("row", [pytest.param(row, marks=[] if row in QUICK else pytest.mark.slow) for row in ROWS])
def test_command_prints_and_writes_the_expected_outputs(root, tmp_path, signal_handlers, row):
    found = outputs_of(ROWS[row], root, tmp_path / "here")
    expected = (EXPECTED / f"{row}.txt").read_text(encoding="utf-8")
    changed = difference(expected, found, row)
    hint = f"if this change is intended: python scripts/maintenance/outputs.py -write {row}"
    assert not changed, f"{row} has other outputs; {hint}\n{changed}"


def test_every_row_has_a_file_of_expected_outputs():
    assert {path.stem for path in EXPECTED.iterdir()} == ROWS.keys()


@pytest.mark.parametrize("script", "predict report compare labels embed export models doctor sweep make_shards".split())
def test_every_flag_of_a_script_occurs_in_a_row(script):
    shown = [each for each in parser_of(script)._actions if each.help != argparse.SUPPRESS]
    flags = {each.option_strings[0] for each in shown if each.option_strings} - {"-h"}
    commands = [shlex.split(command) for commands in ROWS.values() for command in commands.split(" && ")]
    used = {word for name, *words in commands if name == f"{script}.py" for word in words}
    assert flags - used == WITHOUT_ROW.get(script, {}).keys()
