"""Writes the model card of a Hugging Face folder: figures, base model, data, licence and code to load the model."""

import html
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from configs.tables import METRICS
from models.export.subject import Subject
from models.units import Scale
from models.weights.files import find_file
from models.weights.metadata import timm_name
from utils.text import counted, markdown_table, one_line

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


def model_card(subject: Subject) -> str:
    """Return the model card, the text of README.md."""
    known = pretrained(subject)
    base = base_model(known)
    header = {"library_name": "timm", "pipeline_tag": "image-classification"}
    header |= {"base_model": base} if base else {}
    header |= {"model-index": [model_index(subject)]} if subject.figures else {}
    code, more = CODE_FOR_TIMM, USE_IN_TRANSFORMERS
    if subject.config.DATA.sequences:
        from models.native_aspect import code_for_timm

        code, more = code_for_timm(subject.config), ""
    prepare, reads = subject.code_and_sentence
    names = "class names" if subject.config.task.has_classes else "names of the numbers"
    use = USE.format(meaning=meaning(subject), names=names, prepare=prepare, code=code, reads=reads)
    parts = [
        f"---\n{yaml.safe_dump(header, sort_keys=False, allow_unicode=True)}---",
        f"# {shown(subject.name)}",
        "Trained with halfstep.",
        "\n".join(["## Figures", "", *figures(subject)]),
        "\n".join(["## Training", "", *training(subject, base, (known.license or "") if known else "")]),
        use + more,
    ]
    return "\n\n".join(parts)


def meaning(subject: Subject) -> str:
    """Return what the outputs of the model mean."""
    task = subject.config.task
    if task.has_classes:
        return f"The probabilities of the {subject.model.num_classes} classes are the {task.activation} of the logits."
    scales = zip(subject.labels, *Scale.of(subject.config), strict=True)
    formulas = "; ".join(f"{shown(name)} = output x {std!r} + {mean!r}" for name, mean, std in scales)
    return f"The outputs are standardized numbers: {formulas}."


def pretrained(subject: Subject) -> Any:
    """Return timm's metadata for the weights that the run started from, or None if they are not timm's."""
    import timm

    source = subject.settings.get("MODEL.PRETRAINED")
    if not source or find_file(source) or ("/" in source and "timm/" not in source):
        return None
    name = timm_name(source)
    return timm.get_pretrained_cfg(name) if timm.models.is_model_pretrained(name) else None


def base_model(known: Any) -> str:
    """Return the name on the Hugging Face hub of these weights of timm, or '' if it is unknown."""
    if not (known and known.hf_hub_id):
        return ""
    full_name = ".".join(filter(None, (known.architecture, known.tag)))
    return f"{known.hf_hub_id}{full_name}" if known.hf_hub_id.endswith("/") else known.hf_hub_id


def figures(subject: Subject) -> Iterator[str]:
    """Yield lines about the validation score, and a table of rates per class if the run recorded them."""
    found, num_images = subject.figures, subject.num_validation_images
    if found is None:
        yield "The weights file does not say how accurate the weights are."
        return
    on = f" on {counted(num_images, 'validation image')}" if num_images else ""
    yield f"{found.title}: {found.text}{on}, after epoch {found.epoch}. The epoch was chosen on these images, so"
    yield "expect slightly worse results on other images."
    if 0 < len(found.classes) <= MOST_CLASSES:
        yield ""
        yield markdown_table(["class", *RATES.values()], [class_row(*each) for each in found.classes.items()])


def class_row(name: str, rates: dict[str, Any]) -> list[str]:
    values = (rates.get(key) for key in RATES)
    return [shown(name), *(f"{value:.3f}" if isinstance(value, int | float) else "" for value in values)]


def shown(name: str) -> str:
    """Escape HTML and table separators in a name, so that Markdown shows them as text."""
    return html.escape(one_line(name), quote=False).replace("|", "\\|")


def training(subject: Subject, base: str, licence: str) -> Iterator[str]:
    """Yield lines about the base model, the data and the licence. `base` and `licence`: '' if unknown."""
    given = subject.settings
    source = given.get("MODEL.PRETRAINED")
    yield f"- Base model: {base or (f'`{shown(Path(source).name)}`' if source else 'random weights')}"
    numbers = {"training": given.get("NUM_IMAGES"), "validation": subject.num_validation_images}
    counts = [f"{counted(number, 'image')} for {part}" for part, number in numbers.items() if number]
    yield f"- Data: {', '.join([given.get('DATA.DATASET', 'unknown'), *counts])}, {counted(len(subject.classes), subject.config.task.noun)}"
    of_base = "the licence of the base model is unknown; " if source else ""
    if licence:
        of_base = f"the base model has the licence `{licence}`; "
    yield f"- Licence: {of_base}choose the licence of these weights, and add it to the header as `license:`"


def model_index(subject: Subject) -> dict[str, Any]:
    """Return the score in the form that the Hugging Face hub displays."""
    found, data = subject.figures, subject.settings.get("DATA.DATASET", "unknown")
    kind = "accuracy" if found.metric == "top1" else found.metric
    value = found.value / 100 if METRICS[found.metric].unit == "%" else found.value
    result = {
        "task": {"type": "image-classification"},
        "dataset": {"type": data, "name": data, "split": "validation"},
        "metrics": [{"type": kind, "name": found.title, "value": value}],
    }
    return {"name": subject.name, "results": [result]}
