"""plant.py reports the mistakes that no test detects, and those that can no longer be planted."""

import json

import pytest

from tests.mistakes import plant


@pytest.mark.slow
def test_planted_mistakes_that_tests_miss_are_reported(tmp_path, monkeypatch, capsys):
    (tmp_path / "coded.py").write_text("VALUE = 1\nOTHER = 2\n")
    (tmp_path / "test_code.py").write_text("from coded import VALUE\n\n\ndef test_value():\n    assert VALUE == 1\n")
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\n')
    rows = [("A", "VALUE = 1", "VALUE = 2"), ("B", "OTHER = 2", "OTHER = 3"), ("C", "GONE = 1", "GONE = 2")]
    about = {"file": "coded.py", "claim": "a claim", "tests": ["test_code.py"]}
    lines = [json.dumps({"id": name, "old": old, "new": new} | about) for name, old, new in rows]
    (tmp_path / "catalogue.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(plant, "ROOT", tmp_path)
    monkeypatch.setattr(plant, "CATALOGUE", tmp_path / "catalogue.jsonl")
    monkeypatch.setattr(
        plant, "copy_project", lambda target: plant.shutil.copytree(tmp_path, target, dirs_exist_ok=True)
    )
    assert plant.main([]) == 1
    told = capsys.readouterr().out.splitlines()
    assert told == [
        "C: its text is not in coded.py, or not once",
        "A noticed: a claim",
        "B LIVES: a claim",
        "3 mistakes: 1 cannot be planted, 1 live",
    ]
    assert plant.main(["A"]) == 0 and plant.main(["-places", "C"]) == 1
