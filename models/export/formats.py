"""The formats by name, and how an export in one of them comes about."""

from pathlib import Path
from types import ModuleType

from models.export import hugging_face, onnx_file, paddle_weights, torch_program, torchvision_weights
from models.export.check import WrongExport, largest_difference
from models.export.staging import staged
from models.export.subject import Subject
from models.weights.files import RECORD_SUFFIX
from utils.errors import ConfigError

# Each module has SUFFIX, LOADED_BY, refuse(subject), which raises ConfigError before anything is written,
# write(subject, path), and load(subject, path), which loads what was written as its users do.
FORMATS: dict[str, ModuleType] = {
    "hf": hugging_face,
    "onnx": onnx_file,
    "torch": torch_program,
    "torchvision": torchvision_weights,
    "paddle": paddle_weights,
}


def export(subject: Subject, name: str, target: Path) -> str:
    """Write the model in the format of that name and compare it. Returns how that went, for the summary."""
    chosen = FORMATS[name]
    check_target(name, target)
    chosen.refuse(subject)
    with staged(target) as path:
        chosen.write(subject, path)
        try:
            difference, bound = largest_difference(subject, chosen.load(subject, path))
        except WrongExport as error:
            raise WrongExport(
                f"-to {name}: loaded again by {chosen.LOADED_BY}, {error}; {target} is not written. Choose another format"
            ) from None
    return f"loaded again by {chosen.LOADED_BY}, largest difference of logits {difference:.1e} (at most {bound:.1e})"


def check_target(name: str, target: Path) -> None:
    suffix = FORMATS[name].SUFFIX
    if suffix and target.suffix != suffix:
        raise ConfigError(f"-output: {target} must end in {suffix}, as files of -to {name} do")
    if suffix and target.is_dir():
        raise ConfigError(f"-output: {target} is a folder; name a file that ends in {suffix}")
    beside = target.with_suffix(RECORD_SUFFIX)
    if FORMATS[name] in (torchvision_weights, paddle_weights) and beside.exists() and not target.exists():
        raise ConfigError(
            f"-output: {beside} is there already, and what is written beside {target} has that name; name another"
        )
    if not suffix and target.suffix in {".safetensors", *(each.SUFFIX for each in FORMATS.values())} - {""}:
        raise ConfigError(f"-output: {target} has the name of a file; -to {name} writes a folder, name one")
    if not suffix and target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"-output: {target} is there already; -to {name} writes a new folder, name another")
