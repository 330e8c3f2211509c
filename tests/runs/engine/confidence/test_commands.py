"""halfstep predict and export use a run's temperature, and -unknown answers only above a confidence threshold."""

import importlib.util
import json
import math
import shutil

import numpy as np
import pytest
import torch
from scipy.stats import binom, binomtest

from engine.confidence.unknown import Answered, find_answered, most_wrong
from engine.predict.classifier import load_classifier
from models.weights.files import read_record
from models.weights.torch_files import read_torch
from tests.support.checkpoints import checkpoint
from tests.support.refusals import assert_names
from tests.support.runs import Ended, rows_of, run_folder, typed
from tests.support.several_labels import write_digits

pytestmark = pytest.mark.slow


def predicted(*words) -> tuple[list[list[str]], Ended]:
    """Run halfstep predict. Return its lines split at tabs, and the whole output."""
    ended = typed("scripts/predict.py", *words).done()
    return [line.split("\t") for line in ended.stdout.splitlines()], ended


def changed(calibrated, folder, **values):
    """Write a copy of best.pth with changed calibration values, and return its path."""
    state = read_torch(calibrated / "best.pth")
    state["calibration"] |= values
    torch.save(state, folder / "best.pth")
    return folder / "best.pth"


def without_calibration(run, path):
    """Write a copy of best.pth without its calibration, and return its path."""
    state = read_torch(run / "best.pth")
    torch.save({name: value for name, value in state.items() if name != "calibration"}, path)
    return path


def probabilities(file) -> list[dict]:
    """Return the predictions of the first image in a JSON file of halfstep predict."""
    return json.loads(file.read_text())["images"][0]["predictions"]


def in_order(folder) -> list:
    return sorted(folder.glob("*/*.png"), key=lambda path: int(path.stem))


@pytest.fixture(scope="module")
def confidences(unmoved, digits):
    """Return the confidence of each validation image, and whether the model is right."""
    lines, _ = predicted(unmoved, *in_order(digits))
    rows = rows_of(unmoved / "predictions.csv")
    assert [line[1] for line in lines] == [row["prediction"] for row in rows]
    return np.array([float(line[2]) for line in lines]), np.array([row["prediction"] == row["label"] for row in rows])


@pytest.mark.long
def test_predicted_probabilities_use_logits_divided_by_temperature(calibrated, digits, tmp_path):
    state, image = read_torch(calibrated / "best.pth"), in_order(digits)[0]
    key, temperature = state["preferred"], state["calibration"]["temperature"]
    lines, ended = predicted(calibrated, image, "-top", 10, "-json", tmp_path / "x.json")
    assert ", calibrated, on cpu" in ended.stderr
    assert json.loads((tmp_path / "x.json").read_text())["model"]["temperature"] == temperature
    plain = without_calibration(calibrated, tmp_path / "plain.pth")
    others, ended = predicted(plain, image, "-top", 10, "-json", tmp_path / "y.json")
    assert "calibrated" not in ended.stderr
    assert json.loads((tmp_path / "y.json").read_text())["model"]["temperature"] is None
    assert lines[0][1::2] == others[0][1::2]
    found, expected = (probabilities(tmp_path / name) for name in ("x.json", "y.json"))
    powers = np.array([each["probability"] for each in expected]) ** (1 / temperature)
    assert [each["probability"] for each in found] == pytest.approx(powers / powers.sum(), abs=1e-4)
    assert load_classifier(calibrated / "best.pth").weights == key


@pytest.mark.long
@pytest.mark.parametrize("fact", ["weights", "epoch", "step"])
def test_calibration_of_other_weights_is_not_used(calibrated, digits, tmp_path, fact):
    own = read_torch(calibrated / "best.pth")["calibration"]["weights"]
    others = {"weights": {"state_dict": "state_dict_ema", "state_dict_ema": "state_dict"}[own], "epoch": 9, "step": 9}
    path = changed(calibrated, tmp_path, **{fact: others[fact]})
    _, ended = predicted(path, in_order(digits)[0])
    assert "calibrated" not in ended.stderr
    typed("scripts/predict.py", path, in_order(digits)[0], "-unknown", 0.9).refused("-unknown", "best.pth")


def sequential(points: list[Answered], share: float) -> Answered | None:
    """Return the last point that passes the binomial test before the first that fails.

    The page of halfstep predict describes this rule.
    """
    total, found, number = points[-1].num_images, None, max(1, points[-1].num_images // 10)

    def passes(num_images: int, num_wrong: np.ndarray | int) -> np.ndarray:
        return (num_images > 0) & (binom.sf(num_images - num_wrong - 1, num_images, share) <= 0.05)

    numbers = []
    while number <= total:
        if (passes(number, np.arange(number)) & ~passes(number - 1, np.arange(number))).any():
            numbers.append(number)
            number += total // 20
        else:
            number += 1
    for number in [*numbers, total] if numbers else []:
        point = next(each for each in points if each.num_images >= number)
        if not passes(point.num_images, point.num_images - point.num_right):
            break
        found = point
    return found


@pytest.mark.parametrize("share", [0.3, 0.8, 0.85, 0.9, 0.95, 0.97, 0.999])
@pytest.mark.parametrize("seed", [0, 1])
def test_threshold_is_the_last_confidence_before_a_binomial_test_fails(share, seed):
    rng = np.random.default_rng(seed)
    confidences = np.sort(rng.beta(5, 1, 240))[::-1]
    right = np.cumsum(rng.random(240) < confidences)
    points = [Answered(float(each), number, int(right[number - 1])) for number, each in enumerate(confidences, 1)]
    found, is_certain = find_answered([[*each] for each in points], share)
    expected = sequential(points, share)
    assert is_certain is (expected is not None)
    assert found == (
        expected or min((each for each in points if each.num_right >= share * each.num_images), default=None)
    )


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_few_images_need_no_logarithm_of_zero(share):
    with np.errstate(all="raise"):
        found = [most_wrong(total, share) for total in range(8)]
    for total, wrong in enumerate(found):
        passes = [binomtest(total - each, total, share, "greater").pvalue <= 0.05 for each in range(total)]
        assert wrong + 1 == sum(passes)


@pytest.mark.long
def test_claim_is_wrong_for_at_most_5_percent_of_the_validation_sets():
    rng, num_sets, num_images, claims = np.random.default_rng(0), 200, 1000, 0
    for _ in range(num_sets):  # at no confidence are 90% of the answers right
        right = np.cumsum(rng.random(num_images) < 0.895)
        claims += find_answered(
            [[1 - number / 2000, number, int(right[number - 1])] for number in range(1, 1001)], 0.9
        )[1]
    assert claims <= 0.05 * num_sets


@pytest.mark.long
def test_unknown_images_have_a_low_confidence_or_do_not_fit(unmoved, digits, confidences, noise, tmp_path):
    share, (sure, right) = 0.8, confidences
    ordered = sorted(sure.tolist(), reverse=True)
    points = [Answered(each, int((sure >= each).sum()), int(right[sure >= each].sum())) for each in ordered]
    threshold = sequential(points, share).confidence
    words = ["-unknown", share, "-csv", tmp_path / "x.csv", "-json", tmp_path / "x.json", "-into", tmp_path / "into"]
    lines, ended = predicted(unmoved, *in_order(digits), *noise, *words, "-sheet", tmp_path / "x.png")
    is_unknown = [line[3:] == ["unknown"] for line in lines]
    listed = json.loads((tmp_path / "x.json").read_text())["images"]
    is_strange = np.array([each["known"] < 0 for each in listed])
    sure = np.append(sure, [each["predictions"][0]["probability"] for each in listed[len(sure) :]])
    # Printed confidences are rounded, so images next to the threshold may differ.
    differing = np.array(is_unknown) != ((sure < threshold) | is_strange)
    assert np.abs(sure[differing] - threshold).max(initial=0) < 1e-4
    # Validation images fit, because each is its own nearest image.
    assert not is_strange[:90].any() and 0 < sum(is_strange) <= sum(is_unknown) < len(is_unknown)
    both = sum(is_strange & (sure < threshold))
    num_unsure, num_strange = sum(is_unknown) - sum(is_strange) + both, sum(is_strange)
    reasons = f"the confidence of {num_unsure} is too low, and {num_strange} do not fit", f"({both} of them both)"
    assert_names(ended.stderr, f"answers {1 - np.mean(is_unknown):.1%} of 110 images", *reasons)
    assert "too few" not in ended.stderr
    assert [row["unknown"] for row in rows_of(tmp_path / "x.csv")] == ["unknown" * each for each in is_unknown]
    assert [each.get("unknown", False) for each in listed] == is_unknown
    assert len(list((tmp_path / "into" / "unknown").iterdir())) == sum(is_unknown)


def test_too_few_validation_images_for_the_claim_are_reported(calibrated, digits, tmp_path):
    path = changed(calibrated, tmp_path, curve=[[0.6, 30, 30], [0.2, 40, 36]])
    _, ended = predicted(path, in_order(digits)[0], "-unknown", 0.95)
    assert_names(ended.stderr, "0.6000", "30 validation images", "95%")


def test_all_images_are_unknown_if_no_confidence_is_right_often_enough(calibrated, digits, tmp_path):
    path = changed(calibrated, tmp_path, curve=[[0.6, 30, 20], [0.2, 40, 21]])
    lines, ended = predicted(path, *in_order(digits)[:5], "-unknown", 0.95)
    assert [line[3] for line in lines] == ["unknown"] * 5
    assert_names(ended.stderr, "no confidence threshold", "answers 0.0% of 5 images")


def test_unknown_is_refused_without_a_calibration(calibrated, digits, tmp_path):
    reason = "there are 4 validation images with finite logits, fewer than 10"
    image, path = in_order(digits)[0], changed(calibrated, tmp_path)
    state = read_torch(path)
    weights = {name: state["calibration"][name] for name in ("epoch", "step", "weights")}
    torch.save(state | {"calibration": weights | {"reason": reason}}, path)
    typed("scripts/predict.py", path, image, "-unknown", 0.9).refused("-unknown", reason)
    typed("scripts/predict.py", path, image).done()


@pytest.mark.long
def test_unknown_is_refused_with_several_labels(small_yaml, tmp_path):
    table, _ = write_digits(tmp_path, 200)
    flags = ["-dataset", "csv", "-data_path", str(table), "-opts", "DATA.LABEL_SEPARATOR=|", "DATA.VAL_FRACTION=0.3"]
    typed("main_single_gpu.py", "-cfg", str(small_yaml), "-output", str(tmp_path / "runs"), *flags).done()
    folder = run_folder(tmp_path / "runs")
    typed("scripts/predict.py", folder, tmp_path / "0.png", "-unknown", 0.9).refused("-unknown", "several classes")
    (tmp_path / "photos").mkdir()
    shutil.copy(tmp_path / "0.png", tmp_path / "photos")
    typed("scripts/embed.py", folder, tmp_path / "photos", "-output", tmp_path / "x.npz").done()
    found = load_classifier(folder)
    assert len(found.temperature) == 4
    predicted(folder, tmp_path / "0.png", "-top", 4, "-json", tmp_path / "x.json")
    plain = without_calibration(folder, tmp_path / "plain.pth")
    predicted(plain, tmp_path / "0.png", "-top", 4, "-json", tmp_path / "y.json")
    plain = {each["class"]: each for each in probabilities(tmp_path / "y.json")}
    for each in probabilities(tmp_path / "x.json"):
        odds = math.log(plain[each["class"]]["probability"] / (1 - plain[each["class"]]["probability"]))
        expected = 1 / (1 + math.exp(-odds / found.temperature[each["number"]]))
        assert each["probability"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("to", ["safetensors", "hf"])
def test_exported_weights_predict_with_the_temperature(calibrated, digits, tmp_path, to):
    target = tmp_path / ("x.safetensors" if to == "safetensors" else "x")
    typed("scripts/export.py", calibrated, "-to", to, "-output", target).done()
    file = target if to == "safetensors" else target / "model.safetensors"
    assert read_record(file)["calibration"] == read_torch(calibrated / "best.pth")["calibration"]
    words = [*in_order(digits)[:20], "-unknown", 0.95]
    assert predicted(target, *words)[0] == predicted(calibrated, *words)[0]


NEEDS_ONNXSCRIPT = pytest.mark.skipif(not importlib.util.find_spec("onnxscript"), reason="needs onnxscript")


@pytest.mark.long
@pytest.mark.parametrize(
    ("ending", "is_calibrated"), [(".pt2", True), pytest.param(".onnx", False, marks=NEEDS_ONNXSCRIPT)]
)
def test_graph_has_the_logits_and_divides_them_by_the_temperature(calibrated, tmp_path, ending, is_calibrated):
    target, state = tmp_path / f"x{ending}", read_torch(calibrated / "best.pth")
    temperature = state["calibration"]["temperature"]
    facts = {"temperature": temperature, "calibrated": is_calibrated, "class_names": state["class_names"]}
    facts |= {"data": state["data"], "probabilities": "softmax"}
    flags = ["-calibrated"] if is_calibrated else []
    typed("scripts/export.py", calibrated, "-output", target, *flags).done()
    classifier = load_classifier(calibrated)
    images = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    if ending == ".pt2":
        files = {f"{name}.json": "" for name in facts}
        found = torch.export.load(target, extra_files=files).module()(images)
        texts = [files[f"{name}.json"] for name in facts]
    else:
        import onnxruntime

        session = onnxruntime.InferenceSession(target, providers=["CPUExecutionProvider"])
        found = torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
        metadata = session.get_modelmeta().custom_metadata_map
        texts = [metadata[name] for name in facts]
    assert list(map(json.loads, texts)) == [*facts.values()]
    with torch.no_grad():
        expected = classifier.model.float()(images) / (temperature if is_calibrated else 1)
    assert torch.allclose(found, expected, atol=1e-4)


def test_raw_export_of_an_ema_calibration_has_no_temperature(calibrated, tmp_path):
    path = changed(calibrated, tmp_path, weights="state_dict_ema")
    typed("scripts/export.py", path, "-raw", "-output", tmp_path / "x.safetensors").done()
    assert "calibration" not in read_record(tmp_path / "x.safetensors")
    typed("scripts/export.py", path, "-raw", "-calibrated", "-output", tmp_path / "x.pt2").refused(
        "-calibrated", "state_dict"
    )
    assert not (tmp_path / "x.pt2").exists()


def test_mean_of_checkpoints_has_no_temperature(calibrated, tmp_path):
    words = [calibrated / "best.pth", calibrated / "last.pth"]
    typed("scripts/export.py", *words, "-output", tmp_path / "x.safetensors").done()
    assert "calibration" not in read_record(tmp_path / "x.safetensors")
    typed("scripts/export.py", *words, "-output", tmp_path / "x.pt2", "-calibrated").refused("-calibrated", "mean")


def test_calibrated_export_needs_a_graph_and_a_calibration(calibrated, tmp_path):
    path = checkpoint(tmp_path / "best.pth")
    for source, words in ((calibrated, ["x.safetensors"]), (calibrated, ["x", "-to", "hf"]), (path, ["x.pt2"])):
        output = [tmp_path / words[0], *words[1:]]
        typed("scripts/export.py", source, "-calibrated", "-output", *output).refused("-calibrated")
        assert not output[0].exists()
