"""What is measured where no recipe is given: one that keeps this device busy."""

import argparse

from configs.load import load
from scripts.benchmarks.parts.common import ROOT
from utils.distributed import find_devices


def device_kind(arguments: argparse.Namespace) -> str:
    """Finds out without a CUDA context, which would take memory from what is measured."""
    options = ["-opts", *arguments.opts] if arguments.opts else []
    kind, _ = find_devices(load(["-cfg", settings(arguments, "cpu")[0], *options]).config.DEVICE)
    return kind


def settings(arguments: argparse.Namespace, kind: str) -> tuple[str, int]:
    """The recipe and the batch size, given or this device's own."""
    name, batch_size = ("vit_tiny", 32) if kind == "cpu" else ("vit_base", 128)
    return arguments.cfg or str(ROOT / f"configs/{name}_patch16_224.yaml"), arguments.batch_size or batch_size
