"""README.md of a folder for the Hugging Face hub."""

import json

from models.export.subject import Subject

CARD = """---
library_name: timm
pipeline_tag: image-classification
tags:
- image-classification
- timm{transformers_tag}
---

# {name}

A `{name}` with {num_classes} outputs, trained with halfstep{epoch}. Probabilities are the {activation} of its logits; the names
of the classes are in `config.json`.{score}

```python
import timm

model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()  # or hf-hub:OWNER/NAME
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
names = model.pretrained_cfg["label_names"]
```
{transformers}
| preparation of images | |
|---|---|
| channels, height, width | {input_size} |
| resized by | {interpolation}, {crop_mode}, crop fraction {crop_pct:g} |
| mean | {mean} |
| standard deviation | {std} |
"""
TRANSFORMERS = """
With transformers 4.53 or newer (an older one ignores `transformers_weights` in `config.json` and starts from random weights):

```python
from transformers import AutoModelForImageClassification

model = AutoModelForImageClassification.from_pretrained("FOLDER")
```
"""


def model_card(subject: Subject, has_transformers: bool) -> str:
    record = subject.record
    metric = record.get("config", {}).get("TRAIN.BEST_METRIC")
    has_score = metric and isinstance(record.get("metric"), int | float)
    return CARD.format(
        name=json.dumps(subject.name)[1:-1],
        num_classes=subject.num_classes,
        epoch=f" for {record['epoch']} epochs" if "epoch" in record else "",
        activation="sigmoid" if subject.has_several_labels else "softmax",
        score=f" On its validation images: {metric} {record['metric']:.4g}." if has_score else "",
        transformers_tag="\n- transformers" if has_transformers else "",
        transformers=TRANSFORMERS if has_transformers else "",
        **subject.data,
    )
