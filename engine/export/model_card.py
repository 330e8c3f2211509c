"""Writes the model card of a Hugging Face folder: figures, base model, data, licence and code to load the model."""

import html
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from configs.tables import METRICS
from datasets.image_set import ALL
from engine.evaluation.scores import format_value
from engine.export.subject import Subject
from engine.open_model import SavedModel
from engine.record.saved_files import read_object
from models.units import Scale
from models.weights.files import find_file
from models.weights.metadata import timm_name
from utils.text import counted, markdown_table, one_line, plural

if TYPE_CHECKING:
    from timm.models import PretrainedCfg

MOST_CLASSES = 50  # with more classes, the card has no table of classes
RATES = {
    "sensitivity": "sensitivity",
    "specificity": "specificity",
    "auc": "AUC",
    "average_precision": "average precision",
}
USE = """## Use

{meaning} `config.json` has the {names} and
the image preprocessing.

```python
{prepare}
{code}```

{reads}
"""
CODE_FOR_TIMM = """import timm

model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()  # or hf-hub:OWNER/NAME
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
logits = model(transform(prepare(image))[None])
"""
USE_IN_TRANSFORMERS = """
transformers reads the same folder:

```python
from transformers import AutoModelForImageClassification

model = AutoModelForImageClassification.from_pretrained("FOLDER").eval()
logits = model(pixel_values=transform(prepare(image))[None]).logits
```
"""


class Score(NamedTuple):
    """The score of the exported weights on their validation images."""

    metric: str  # TRAIN.BEST_METRIC
    value: float
    epoch: int
    classes: dict[str, dict[str, float | None]]  # {class: {rate: value}}; {} if unknown

    @classmethod
    def of(cls, saved: SavedModel) -> "Score | None":
        """Return the score that the run has measured for these weights, or None if the checkpoint does not have it."""
        metric, value, epoch = saved.config.TRAIN.BEST_METRIC, saved.facts.get("metric"), saved.facts.get("epoch")
        if metric not in METRICS or not isinstance(value, int | float) or epoch is None:
            return None
        results = read_object(saved.path.parent / "results.json")
        weights = "ema" if saved.key.endswith("_ema") else "raw"
        is_same = (results.get("epoch"), results.get("weights")) == (epoch, weights)
        return cls(metric, float(value), epoch, results.get("per_class", {}) if is_same else {})


def model_card(subject: Subject) -> str:
    """Return the model card, the text of README.md."""
    known, score = pretrained(subject), Score.of(subject.saved)
    base, num_images = base_model(known), subject.saved.facts.get("validation", {}).get("num_images")
    header = {"library_name": "timm", "pipeline_tag": "image-classification"}
    header |= {"base_model": base} if base else {}
    header |= {"model-index": [model_index(subject, score)]} if score else {}
    prepare, reads = subject.pixels.for_card()
    noun = subject.config.task.noun
    names = "class names" if subject.config.task.has_classes else f"names of the {plural(noun)}"
    use = USE.format(meaning=meaning(subject), names=names, prepare=prepare, code=CODE_FOR_TIMM, reads=reads)
    parts = [
        f"---\n{yaml.safe_dump(header, sort_keys=False, allow_unicode=True)}---",
        f"# {shown(subject.config.MODEL.NAME)}",
        "Trained with halfstep.",
        "\n".join(["## Figures", "", *figures(score, num_images, subject.config.DATA.FOLDS)]),
        "\n".join(["## Training", "", *training(subject, known, num_images)]),
        use + USE_IN_TRANSFORMERS,
    ]
    return "\n\n".join(parts)


def meaning(subject: Subject) -> str:
    """Return what the outputs of the model mean."""
    task, scale = subject.config.task, Scale.of(subject.config)
    if task.has_classes:
        return f"The probabilities of the {subject.model.num_classes} classes are the {task.activation} of the logits."
    if scale is None:
        return "The outputs are numbers, which are not standardized."
    scales = zip(subject.labels, *scale, strict=True)
    formulas = "; ".join(f"{shown(name)} = output x {std!r} + {mean!r}" for name, mean, std in scales)
    return f"The outputs are standardized numbers: {formulas}."


def pretrained(subject: Subject) -> "PretrainedCfg | None":
    """Return timm's metadata for the weights that the run started from, or None if they are not timm's."""
    import timm

    source = subject.config.MODEL.PRETRAINED
    if not source or find_file(source) or ("/" in source and "timm/" not in source):
        return None
    name = timm_name(source)
    return timm.get_pretrained_cfg(name) if timm.models.is_model_pretrained(name) else None


def base_model(known: "PretrainedCfg | None") -> str:
    """Return the name on the Hugging Face hub of these weights of timm, or '' if it is unknown."""
    if not (known and known.hf_hub_id):
        return ""
    full_name = ".".join(filter(None, (known.architecture, known.tag)))
    return f"{known.hf_hub_id}{full_name}" if known.hf_hub_id.endswith("/") else known.hf_hub_id


def figures(score: Score | None, num_images: int | None, num_folds: int | None = None) -> Iterator[str]:
    """Yield lines about the validation score, and a table of rates per class if the run recorded them.

    `num_folds`: DATA.FOLDS of the run.
    """
    if score is None:
        yield "The weights file does not say how accurate the weights are."
        return
    on = f" on {counted(num_images, 'validation image')}" if num_images else ""
    value = f"{METRICS[score.metric].title}: {format_value(score.metric, score.value)}"
    if num_folds:
        yield f"{value} on all {counted(num_images, 'image')}, each predicted by one of {num_folds} further models that"
        yield "had not learned it. This model has learned all of them."
    else:
        yield f"{value}{on}, after epoch {score.epoch}. The epoch was chosen on these images, so"
        yield "expect slightly worse results on other images."
    if 0 < len(score.classes) <= MOST_CLASSES:
        yield ""
        yield markdown_table(["class", *RATES.values()], [class_row(*each) for each in score.classes.items()])


def class_row(name: str, rates: dict[str, float | None]) -> list[str]:
    values = (rates.get(key) for key in RATES)
    return [shown(name), *(f"{value:.3f}" if isinstance(value, int | float) else "" for value in values)]


def shown(name: str) -> str:
    """Escape HTML and table separators in a name, so that Markdown shows them as text."""
    return html.escape(one_line(name), quote=False).replace("|", "\\|")


def training(subject: Subject, known: "PretrainedCfg | None", num_images: int | None) -> Iterator[str]:
    """Yield lines about the base model, the data and the licence. `known`: timm's metadata of the base model."""
    config, base = subject.config, base_model(known)
    source = config.MODEL.PRETRAINED
    yield f"- Base model: {base or (f'`{shown(Path(source).name)}`' if source else 'random weights')}"
    num_trained = subject.saved.facts["config"].get("NUM_IMAGES")
    numbers = {"training": num_trained, "validation": num_images}
    if subject.saved.facts.get("split", {}).get("rule") == ALL:
        numbers = {"training": num_trained}
    counts = [f"{counted(number, 'image')} for {part}" for part, number in numbers.items() if number]
    outputs = counted(len(subject.saved.classes), config.task.noun)
    yield f"- Data: {', '.join([config.DATA.DATASET, *counts, outputs])}"
    of_base = "the licence of the base model is unknown; " if source else ""
    if known and known.license:
        of_base = f"the base model has the licence `{known.license}`; "
    yield f"- Licence: {of_base}choose the licence of these weights, and add it to the header as `license:`"


def model_index(subject: Subject, score: Score) -> dict[str, Any]:
    """Return the score in the form that the Hugging Face hub displays."""
    data = subject.config.DATA.DATASET
    kind, row, value = score.metric, METRICS[score.metric], score.value
    if kind == "top1":
        kind = "accuracy"
    if row.unit == "%":
        value /= 100
    result = {
        "task": {"type": "image-classification"},
        "dataset": {"type": data, "name": data, "split": "validation"},
        "metrics": [{"type": kind, "name": row.title, "value": value}],
    }
    return {"name": subject.config.MODEL.NAME, "results": [result]}
