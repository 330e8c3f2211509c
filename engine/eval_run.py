"""A run of -eval, in the order of execution: no training, one evaluation of each set of weights."""

import time
from dataclasses import replace
from functools import partial

import torch

from configs.load import LoadedConfig
from datasets import BadImages, Normalize, build_eval_data
from engine.build import load_cached_data, make_model
from engine.evaluation.evaluate import Evaluation, evaluate, weights_to_score
from engine.evaluation.scores import Best, describe_scores
from engine.plan import Plan, begin, make_plan
from engine.plan_lines import describe_evaluation
from engine.precision.policy import set_matmul
from engine.record.next_steps import after_evaluation
from engine.record.result_files import ResultFiles
from engine.session import Session
from models import describe
from models.transforms import choose_transforms
from models.weights.files import find_file
from utils.host import keep_freed_memory
from utils.text import counted


def run_evaluation(session: Session, loaded: LoadedConfig) -> int:
    """Evaluate weights on the validation images: of a checkpoint both the raw and the EMA weights."""
    process, log = session.process, session.log
    begun = begin(loaded, process, log)
    session.open_folder("eval")
    plan = make_plan(begun, partial(load_cached_data, session=session))
    config, eval_set, precision = plan.config, plan.eval_set, plan.precision
    for line in eval_set.notes:
        log.say(line)
    data = build_eval_data(config, eval_set, process)
    log.say(f"data: {counted(data.num_samples, 'validation image')}, {counted(len(eval_set.classes), 'class')}")
    for line in describe_evaluation(plan):
        log.say(line)
    log.say(f"precision: {precision.describe()}")
    set_matmul(config.PRECISION.MATMUL)
    keep_freed_memory(process.device)
    normalize = Normalize(config.DATA, torch.float32).to(process.device)
    bad_images = BadImages(eval_set, config.DATA.MAX_BAD_FRACTION, log.warn)
    found, transforms = {}, choose_transforms(config, process.device, precision.half)
    for name, model in weights_to_score(plan, partial(make_model, session, plan)):
        if not found:
            log.say(f"model: {config.MODEL.NAME}, {describe(model)}")
        for line in transforms.apply(model.to(process.device)):
            log.say(line)
        if not found:  # the weights can be used
            session.begin(plan.loaded)
            session.status("evaluating")
        start = time.perf_counter()
        found[name] = evaluate(model, data, normalize, precision, process, bad_images)
        for line in describe_scores(found[name].scores, name, time.perf_counter() - start):
            log.say(line)
        transforms.revert(model)  # the next weights may be loaded into it
    leave_results(session, plan, found)
    session.status(
        "done", exit_code=0, **{name.strip().lower() or "raw": each.scores.figures() for name, each in found.items()}
    )
    weights = find_file(plan.source[1]) if plan.kept else None
    session.advise(after_evaluation(weights, session.path, eval_set))
    return 0


def leave_results(session: Session, plan: Plan, found: dict[str, Evaluation]) -> None:
    """Tables and pictures of the weights that score best. A collective."""
    metric = plan.config.TRAIN.BEST_METRIC
    scores = {name: replace(each.scores, metric=metric) for name, each in found.items()}
    name, best = max(scores.items(), key=lambda item: item[1].rank)
    images = found[name].images.gather(session.process)
    if session.process.is_first:
        files = ResultFiles(session.path, plan.eval_set, session.log)
        files.write(images, Best.of(best, 0, "_ema" if name else ""), plan.config.REPORT)
