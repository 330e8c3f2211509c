"""The loader alone, into the device's memory: threads, processes and the cache, from JPEGs like ImageNet's."""

import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from scripts.benchmarks.parts.common import ROOT, StepWorker, spread
from scripts.benchmarks.parts.turns import Turns, take_turns
from scripts.benchmarks.session.plan import Context
from scripts.benchmarks.session.speed import start

CACHED = ("DATA.CACHE=disk", "DATA.CACHE_SIDE=256")
CASES = {
    **{f"{num} threads": (f"DATA.NUM_WORKERS={num}", "DATA.WORKERS=threads") for num in (8, 12, 16)},
    **{f"{num} processes": (f"DATA.NUM_WORKERS={num}", "DATA.WORKERS=processes") for num in (8, 16)},
    "16 threads, decoded cache": ("DATA.NUM_WORKERS=16", "DATA.WORKERS=threads", *CACHED),
}


def measure_loader(context: Context) -> None:
    photos = make_photos(context)
    flags = ["-cfg", ROOT / "configs/vit_small_patch16_224.yaml", "-dataset", "imagefolder", "-data_path", photos]
    flags += ["-batch_size", context.pick(256, 4), "-opts", f"DATA.CACHE_PATH={context.scratch / 'cache'}"]
    flags += [f"DEVICE={context.device}"]
    workers = {name: StepWorker([*flags, *options], role="loader") for name, options in CASES.items()}
    left_out = context.pick((), ("8 threads", "12 threads", "16 threads", "16 processes"))
    reasons = {name: "not in a dry run" for name in left_out if workers.pop(name)}
    reasons |= start(workers)
    measured, more = take_turns(workers, Turns(context.pick(2, 1), 3, context.pick(1.5, 0.0)))
    for name in CASES:
        rate = spread(measured[name].images_per_second, 0) if name in measured else "-"
        context.journal.row(loader=name, **{"images/s": rate, "note": (reasons | more).get(name, "")})


def make_photos(context: Context) -> Path:
    """A few different ones, each under many names: reading and decoding cost the same."""
    folder = context.scratch / "photos"
    num_photos, num_names = context.pick((512, 32), (4, 4))
    with ProcessPoolExecutor(min(os.cpu_count(), 16)) as pool:
        for number, content in enumerate(pool.map(make_photo, range(num_photos))):
            for part, names in (("train", range(num_names)), ("val", range(1))):
                for name in names:
                    path = folder / part / f"class{number % 10}" / f"{number:05d}-{name:02d}.jpg"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content)
    return folder


def make_photo(number: int) -> bytes:
    import numpy as np

    from scripts.benchmarks.photos import draw, encode

    return encode(draw(np.random.default_rng([0, number]), number % 10))
