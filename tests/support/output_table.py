"""The table of outputs: commands on small stored runs, and the text of everything that each of them prints and writes.

tests/commands/test_outputs.py compares the texts with the expected ones in tests/data/outputs, which
scripts/maintenance/outputs.py writes. describers.py describes the files.
"""

import argparse
import contextlib
import csv
import difflib
import importlib
import inspect
import json
import os
import re
import shlex
import shutil
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

import utils
from tests.support.describers import describe
from tests.support.forks import ROOT
from tests.support.output_runs import BASE, STORED, write_data
from tests.support.runs import rows_of, typed
from utils.commands import HALFSTEP

EXPECTED = ROOT / "tests/data/outputs"
# Small files that commands read, in addition to data and runs
FILES = {
    "base.yaml": BASE,
    "photos.txt": "new/10.png\n\n  new/in\nphotos/äpfel/3*.png\n",
    "names.txt": "one\ntwo, three\nfour\nfünf\nsix/seven\n八\n",
    "args.yaml": "model: vit_tiny_patch16_224\nlr: 0.001\nopt: adamw\nepochs: 30\nwarmup_epochs: 3\nsmoothing: 0.2\n"
    "train_interpolation: ''\nreprob: 0.25\ndata_dir: photos\n",
    "runtime/ort.wasm.bundle.min.mjs": "// a runtime\n",
    "runtime/ort-wasm-simd-threaded.wasm": "binary\n",
}
ABOUT = json.loads((STORED / "vit/status.json").read_text())["about"]
OF_RUNS = {name: ABOUT[name].partition(",")[0] for name in ("halfstep", "torch", "timm")}  # that wrote STORED
# Parts of the output that depend on the machine, the moment or the version: {pattern: placeholder}
VOLATILE = {
    **{
        rf"\b{re.escape(found.partition('+')[0])}(\+\w+)?\b": f"<{name}>"
        for name in ("torch", "timm", "onnxruntime")
        for found in {version(name), OF_RUNS.get(name, version(name))}
    },
    rf"\b({re.escape(utils.VERSION)}|{re.escape(OF_RUNS['halfstep'])})(, commit [\w-]+)?": "<halfstep>",
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?(\.\d+)?(\+\d\d:\d\d|Z)?( UTC)?": "DATE",
    r"train-\d{8}-\d\d-\d\d-\d\d": "train-DATE",
}
# The same for commands that measure times, memory and speed
OF_PROGRAMS = {
    r"\btime: \d+\.\d+( s)?$": "time: N",
    r"[\d,.]+ images/s, [\d,]+ MB": "N images/s, N MB",
    r"time: [\d.]+% waiting.*": "time: N% waiting",
    r"; [\d.]+ s;": "; N s;",
    r"^.*of the time is spent waiting for data.*\n": "",
    r"^.*time: about .*, until [\d:]+.*\n": "",  # only if a run takes long
    r"of [\d.,]+ [KMGT]iB free": "of N free",
    r"about .* until [\d:]+; .*": "about N",
    r"^((memory|half precision) +\w+ +).*": r"\1N",
    r"^/run/(id|began|saved): .*": r"/run/\1: N",
    r'"(host|pid|pid_ticks|python|device_name|id|validation_digest)": [^,}\n]*': r'"\1": N',
}
# {row: share by which all its numbers may differ}
LOOSE = {"doctor": 0.02}
# The rows that are tested after every edit: one for each command
QUICK = (
    "predict_vit report_labels compare labels_run embed_npz export_vit models sweep_table from_timm flags check".split()
)
COLOUR = re.compile(r"#([0-9a-f]{6})\b")
NUMBER = re.compile(r"(?<![\w.])([-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?)(?![\w])")

SCRIPTS = "compare doctor embed export from_timm labels make_shards models predict report sweep"
MODELS = "vit convnet lora labels".split()
# {row: commands, separated by &&}. A flag occurs at least once, most together with another one.
ROWS = {
    # predict.py
    **{
        f"predict_{name}": f"predict.py runs/{name} new -top 3 -csv out.csv -json out.json -sheet out.png"
        for name in MODELS
    },
    "predict_plain": "predict.py runs/vit/last photos/猫 'new/*.png' 'new/in/[23].png' @photos.txt -raw -into sorted",
    "predict_raw": "predict.py runs/labels new -raw -flip -json out.json -batch_size 3 -top 2",
    "predict_flip": "predict.py runs/convnet new -flip -csv out.csv -classes names.txt -unsure 0.4 -into sorted",
    "predict_unknown": "predict.py runs/lora new photos/zebra -unknown 0.8 -csv out.csv -json out.json -into sorted "
    "-sheet a.jpg",
    "predict_unknown_run": "predict.py runs/vit new -unknown 0.6 -top 2 -device cpu",
    "predict_attention": "predict.py runs/vit new/in new/4.png -attention maps -unsure 0.5 -sheet out.png",
    "predict_attention_labels": "predict.py runs/labels new/in -attention maps -flip -raw",
    "predict_settings": "predict.py runs/vit -list photos.txt -opts DATA.CROP_PCT=1.0 DATA.CROP_MODE=squash -amp false "
    "-top 6 -ngpus 1 -image_size 24",
    "predict_cfg": "predict.py runs/vit -cfg base.yaml -opts DATA.EXIF=ignore -list photos.txt -json out.json",
    "predict_all_labels": "predict.py runs/labels/best.pth photos/Apple new/5.png -csv out.csv -sheet out.png",
    # report.py
    **{f"report_{name}": f"report.py runs/{name} -output page.html" for name in MODELS},
    "report_sweep": "report.py runs/sweep/trial-001 -output page.html",
    # compare.py
    "compare": "compare.py runs/vit runs/vit2",
    "compare_sweep": "compare.py runs/sweep",
    "compare_all": "compare.py runs/vit runs/convnet runs/lora",
    "compare_metric": "compare.py runs/vit runs/vit2 runs/convnet -metric macro_f1",
    "compare_loss": "compare.py runs/sweep -metric loss",
    "compare_json": "compare.py runs/vit runs/vit2 -json",
    "compare_json_metric": "compare.py runs/vit runs/vit2 -json -metric macro_f1",
    "compare_json_loss": "compare.py 'runs/sweep/trial-00[012]' 'runs/sweep/trial-00[345]' -json -metric loss",
    "compare_any_data": "compare.py runs/labels runs/vit -any_data -metric top1",
    # labels.py
    "labels_run": "labels.py runs/vit -output found",
    "labels_sweep": "labels.py runs/sweep -output found && confirm found/labels.csv && labels.py runs/sweep -apply "
    "found/labels.csv -output lists",
    "labels_lora": "labels.py runs/lora -output found -no_copies",
    "labels_weights": "labels.py runs/vit/best.pth -data_path photos -dataset imagefolder -raw -output found "
    "-batch_size 7",
    "labels_next": "labels.py runs/vit -next 5 new -output next -into chosen",
    "labels_next_raw": "labels.py runs/convnet -next 3 new -output next -strangers -raw -no_copies",
    "labels_next_settings": "labels.py runs/vit -next 4 new -device cpu -opts DATA.CROP_PCT=1.0 -cfg base.yaml -output "
    "next -image_size 24",
    "labels_next_moved": "labels.py runs/lora -next 14 new -strangers -data_path photos -output next -amp false",
    # embed.py
    "embed_npz": "embed.py runs/vit new -output features.npz",
    "embed_parquet": "embed.py runs/labels new -output features.parquet -batch_size 4 -raw",
    "embed_examples": "embed.py runs/convnet new -examples photos -top 2 -csv out.csv -json out.json -sheet out.png",
    "embed_into": "embed.py runs/lora new -examples photos -into sorted -unsure 0.5 -device cpu",
    "embed_near": "embed.py runs/vit photos -near new/3.png -top 5 -sheet near.jpg",
    "embed_settings": "embed.py runs/vit photos -near new/in/2.png -opts DATA.CROP_MODE=squash -cfg base.yaml -amp "
    "false -image_size 24",
    # export.py
    **{f"export_{name}": f"export.py runs/{name} -output out.safetensors" for name in MODELS},
    "export_checkpoint": "export.py runs/vit/last -output whole.pth",
    "export_mean": "export.py runs/vit/best runs/vit/last runs/vit/last -output mean.safetensors -ema",
    "export_raw": "export.py runs/lora -to safetensors -output raw.bin -raw && predict.py raw.bin new/1.png -top 6",
    "export_hf": "export.py runs/lora -to hf -output hub",
    "export_hf_worse": "export.py runs/labels -to hf -output hub -raw",
    "export_onnx": "export.py runs/lora -output out.onnx -calibrated",
    "export_torch": "export.py runs/convnet -output out.pt2 -photo -data_path photos",
    "export_web": "export.py runs/vit -to web -output page -runtime runtime && predict.py page/model.onnx new -top 2 "
    "-json out.json",
    # the others
    "models": "models.py && models.py convnextv2_atto && models.py 'vit_*' tinyclip -all",
    "sweep_table": "sweep.py -output runs/sweep -table && sweep.py -output runs/sweep -trial 4",
    "sweep_plan": "sweep.py -cfg base.yaml -over MODEL.DEPTH=2,4 TRAIN.BASE_LR=1e-3,3e-3 -seeds 0,2 -folds 2 -output "
    "grid -table",
    "from_timm": "from_timm.py -- train.py photos --model test_vit --opt lamb -b 64 --lr-base 0.01 --epochs 7 --mixup "
    "0.2 --aa rand-m7 --val-split val",
    "from_timm_file": "from_timm.py -- args.yaml --bce-loss --model-ema --drop-path 0.1 --amp",
    "make_shards": "make_shards.py -dataset imagefolder -data_path photos -output shards -samples_per_shard 9 "
    "-shuffle_seed 3 -opts DATA.VAL_FRACTION=0.3 && main_single_gpu.py -check -cfg base.yaml -dataset shards "
    "-data_path shards",
    "doctor": "doctor.py runs/vit/last.pth -amp_dtype float16 -cfg base.yaml",
    "flags": f"flags {SCRIPTS}",
    # the programs themselves
    **{
        f"eval_{name}": f"main_single_gpu.py -eval -resume runs/{name} -output runs/evaluated -name {name}"
        for name in MODELS
    },
    "eval_pretrained": "main_single_gpu.py -eval -pretrained runs/lora -output runs/evaluated -name new",
    "check": "main_single_gpu.py -cfg base.yaml -check -check_images 20",
    "check_labels": "main_single_gpu.py -check -resume runs/labels",
    # A few updates with SGD, whose rounding errors stay small
    "train": "main_single_gpu.py -pretrained runs/vit -name new -epochs 2 -opts TRAIN.OPTIMIZER.NAME=SGD "
    "TRAIN.BASE_LR=0.3 && predict.py output/new new -unknown 0.8",
}


def make_root(root: Path) -> Path:
    """Write the data and the stored runs into a folder, which each row gets a copy of."""
    write_data(root)
    shutil.copytree(STORED, root / "runs")
    for name, text in FILES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def confirm(table: Path) -> None:
    """Confirm every second suggestion of a labels.csv, as a user does, and change the last one."""
    rows = rows_of(table)
    for row in rows[::2]:
        row["confirmed"] = "yes"
    next(row for row in rows[::-2] if row["suggestion"])["suggestion"] = "猫"
    with open(table, "w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def outputs_of(commands: str, root: Path, folder: Path) -> str:
    """Run the commands of a row in a copy of `root`, and return what they print and the files that they write."""
    shutil.copytree(root, folder, copy_function=shutil.copyfile)
    before = {path: path.stat().st_mtime_ns for path in files_in(folder)}
    given = {path.read_bytes(): path.relative_to(folder) for path in before}
    texts, place = [], Path.cwd()
    os.chdir(folder)
    try:
        for command in commands.split(" && "):
            script, *words = shlex.split(command)
            if script == "confirm":
                confirm(Path(*words))
                continue
            if script == "flags":
                texts += [f"$ {command}", flags_of(words)]
                continue
            program = script if script.startswith("main_") else f"scripts/{script}"
            ended = typed(program, *words, faults={"draw_curves": []})
            texts += [f"$ {command}", f"exit code {ended.returncode}", ended.stdout, "--- stderr", ended.stderr]
        for path in files_in(folder):
            if before.get(path) != path.stat().st_mtime_ns and not path.name.startswith("."):
                original = given.setdefault(path.read_bytes(), path.relative_to(folder))
                is_copy = original != path.relative_to(folder) and original.parts[0] != "runs"
                name = f"=== {path.relative_to(folder)}"
                texts += [f"{name} is a copy of {original}"] if is_copy else [name, describe(path)]
    finally:
        os.chdir(place)
    return without_volatile("\n".join(texts), folder, VOLATILE | (OF_PROGRAMS if "main_" in commands else {}))


def parser_of(script: str) -> argparse.ArgumentParser:
    # Every way of parsing begins with parse_known_args.
    stopped = patch.object(argparse.ArgumentParser, "parse_known_args", autospec=True, side_effect=KeyboardInterrupt)
    with contextlib.suppress(KeyboardInterrupt), stopped as parse:
        importlib.import_module(f"scripts.{script}").main([])
    return parse.call_args.args[0]


def flags_of(scripts: Sequence[str]) -> str:
    """Return the flags of each script in their order, and then what the parsers know of them, equal facts once.

    The layout of -h depends on Python.
    """
    lines, owners = [], {}  # owners: {facts: {flag: its scripts}}
    for script in scripts:
        parser = parser_of(script)
        for action in parser._actions:
            owners.setdefault(facts_of(action), {}).setdefault(name_of(action), []).append(script)
        lines.append(f"{script}: {' '.join(map(name_of, parser._actions))}; {parser.usage}; {parser.epilog}")
    for facts, flags in owners.items():
        owned = (f"{flag} of {' '.join(names)}" for flag, names in flags.items())
        lines.append(f"{', '.join(owned)}: {facts}")
    # A page is named by its path from the folder in which the script was imported first.
    return "\n".join(lines).replace(f"{HALFSTEP}/docs/", "docs/")


def name_of(action: argparse.Action) -> str:
    return ",".join(action.option_strings) or "(words)"


def facts_of(action: argparse.Action) -> str:
    """Return everything that argparse knows of a flag except for its name."""
    facts = {name: getattr(action, name) for name in "nargs const default choices required metavar help".split()}
    if action.type:
        bounds = inspect.getclosurevars(action.type).nonlocals if inspect.isfunction(action.type) else {}
        facts["type"] = (action.type.__name__, bounds)
    return " ".join(f"{name}={value!r}" for name, value in facts.items() if value not in (None, False))


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def without_volatile(text: str, folder: Path, volatile: dict[str, str]) -> str:
    """Return the text with placeholders for everything volatile, and for the folders of the row and of the program."""
    text = text.replace(str(folder), "HERE").replace(str(Path(utils.__file__).parents[1]), "PROGRAM")
    for pattern, placeholder in volatile.items():
        text = re.sub(pattern, placeholder, text, flags=re.MULTILINE)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def difference(expected: str, found: str, row: str = "") -> str:
    """Return the lines that differ by more than rounding as a readable diff, or an empty text."""
    tolerance = LOOSE.get(row, 0.0)
    old, new = expected.splitlines(), found.splitlines()
    shapes = [[_without_values(line, tolerance) for line in lines] for lines in (old, new)]
    lines = []
    for kind, start, end, new_start, new_end in difflib.SequenceMatcher(None, *shapes, autojunk=False).get_opcodes():
        if kind == "equal":
            pairs = zip(old[start:end], new[new_start:new_end], strict=True)
            lines += [
                line for pair in pairs if not _close(*pair, tolerance) for line in (f"- {pair[0]}", f"+ {pair[1]}")
            ]
        else:
            lines += [f"- {line}" for line in old[start:end]] + [f"+ {line}" for line in new[new_start:new_end]]
    return "\n".join(lines)


def _without_values(line: str, tolerance: float) -> str:
    """Return the line without its fractional numbers and colours, and with a tolerance without any numbers."""
    line = COLOUR.sub("#", line)
    line = NUMBER.sub(lambda found: "0." if tolerance or not found[0].lstrip("+-").isdigit() else found[0], line)
    return re.sub(r" +", " ", line)


def _close(one: str, two: str, tolerance: float) -> bool:
    """Return whether all numbers agree within 2e-4 or one unit of their last digit, and all colours within 6 of 255."""
    numbers = (NUMBER.findall(COLOUR.sub("#", line)) for line in (one, two))
    for mine, other in zip(*numbers, strict=True):
        places = len(mine.partition(".")[2]) if "e" not in mine else 9
        unit = 10.0**-places if places else 0
        allowed = max(2e-4, max(2e-4, tolerance) * abs(float(mine)), 1.01 * unit)
        if abs(float(mine) - float(other)) > allowed:
            return False
    mine, other = (bytes.fromhex("".join(COLOUR.findall(line))) for line in (one, two))
    return all(abs(a - b) <= 6 for a, b in zip(mine, other, strict=True))
