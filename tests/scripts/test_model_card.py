"""The model card that export.py -to hf writes: figures, base model, data and licence."""

import json

import pytest
import yaml

from tests.support.runs import run, run_folder, status_of, typed

pytestmark = pytest.mark.slow


def card_of(source, target, *flags) -> tuple[dict, str]:
    """Return the header and the text of the card in the exported folder."""
    typed("scripts/export.py", source, "-to", "hf", "-output", target, *flags).done()
    _, header, text = (target / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(header), text


def test_model_card_states_metrics_data_and_base_model_of_a_run(small_yaml, tmp_path):
    words = [
        "-opts",
        "TRAIN.MODEL_EMA=true",
        "TRAIN.MODEL_EMA_DECAY=0.5",
        "TRAIN.BEST_METRIC=macro_f1",
        "MODEL.TYPE=vit",
    ]
    run("main_single_gpu.py", "-cfg", str(small_yaml), "-output", str(tmp_path / "o"), "-epochs", "1", *words).done()
    folder = run_folder(tmp_path / "o")
    header, text = card_of(folder, tmp_path / "x")
    best, results = status_of(folder)["best"], json.loads((folder / "results.json").read_text())
    (result,) = header["model-index"][0]["results"]
    (metric,) = result["metrics"]
    assert metric == {"type": "macro_f1", "name": "macro F1", "value": pytest.approx(best["macro_f1"] / 100)}
    assert f"macro F1: {best['macro_f1']:.2f}% on {results['num_images']} validation images, after epoch 1." in text
    for name, rates in results["per_class"].items():
        cells = [name] + ["" if rate is None else f"{rate:.3f}" for rate in rates.values()]
        assert cells in [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert "- Base model: random weights" in text and "base_model" not in header
    assert "- Data: digits, " in text and " for training, " in text and "10 classes" in text

    worse = "-raw" if results["weights"] == "ema" else "-ema"
    header, text = card_of(folder, tmp_path / "worse", worse)
    assert "model-index" not in header and "does not say how accurate" in text
