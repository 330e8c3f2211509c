"""Evaluates a run that learned features (-eval): its similarity to the teacher, and its k-NN accuracy."""

from copy import deepcopy
from dataclasses import replace

import torch

from datasets import BadImages, EvalData, Normalize, build_preparation
from engine.checkpoint.resume import is_run
from engine.plan import EvalPlan
from engine.session import Session
from engine.train.loss import build_loss
from extras.unlabelled.evaluation import evaluate_features
from extras.unlabelled.step import make_feature_training
from models import build_model, describe
from models.transforms import choose_transforms
from models.weights.load import load_exactly
from utils.errors import ConfigError, naming_damage


def evaluate_run(session: Session, plan: EvalPlan, data: EvalData) -> int:
    """Evaluate the raw and the EMA weights of a checkpoint, and return the exit code. Collective."""
    config, process, log, state = plan.config, session.process, session.log, plan.inputs.saved
    if not is_run(state):
        raise ConfigError(
            "-eval: these weights have no feature maps, without which the similarity to the teacher cannot be measured; "
            "name a run's checkpoint with -resume, or fine-tune the weights (TRAIN.OBJECTIVE=classes)"
        )
    wrapper = make_feature_training(config, process, log)
    model = build_model(config, plan.num_classes).to(process.device)
    wrapper.change_model(model)
    log.say(f"model: {config.MODEL.NAME}, {describe(model)}")
    prepare = build_preparation(config, Normalize(config.DATA, torch.float32).to(process.device), is_compiled=False)
    prepare, loss = wrapper.wrap(prepare, build_loss(config), plan.precision)
    transforms = choose_transforms(config, process.device, plan.precision.half)
    bad_images = BadImages(plan.eval_set, config.DATA.MAX_BAD_FRACTION, log.warn)
    figures = {}
    for key, name in (("state_dict", ""), ("state_dict_ema", "EMA ")):
        if not state.get(key):
            continue
        with naming_damage(plan.inputs.checkpoint):
            load_exactly(model, state[key], plan.inputs.checkpoint)
        scored = deepcopy(model)
        log.say(*transforms.apply(scored))
        if not figures:  # all checks have passed
            session.begin(plan.inputs.loaded)
            session.status("evaluating")
        (found,) = evaluate_features([scored], prepare, loss, data, bad_images, process)
        scores = replace(found.scores, metric=config.TRAIN.BEST_METRIC)
        log.detail(f"----- {scores.describe(f'{name}Validation')}")
        log.say(scores.describe_all(name))
        figures[name.strip().lower() or "raw"] = scores.figures()
    session.status("done", exit_code=0, **figures)
    return 0
