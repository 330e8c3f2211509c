"""-eval: an evaluation from its settings to its result, in the order of execution."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from torch import nn

from configs.load import LoadedConfig
from datasets import BadImages, EvalData, build_eval_data
from engine.build import make_model, open_data_of_run
from engine.checkpoint.resume import is_run
from engine.eval_plan import EvalPlan, plan_evaluation
from engine.evaluation.best import Best
from engine.evaluation.evaluate import Evaluation, evaluate
from engine.infer import PlacingInference
from engine.open_model import SavedModel, warn_of_learned
from engine.plan import read_inputs
from engine.record.next_steps import after_evaluation
from engine.session import Session
from engine.tasks import find_task
from engine.weights_lines import describe_evaluation
from models import describe_size
from models.weights.files import chosen_weights
from utils.errors import ExitCode
from utils.text import counted


def run_evaluation(session: Session, loaded: LoadedConfig) -> int:
    """Evaluate weights on the validation images. For a checkpoint, evaluate both the raw and the EMA weights."""
    process, log = session.process, session.log
    inputs = read_inputs(loaded, process, log)
    session.open_folder("eval")
    plan = plan_evaluation(inputs, partial(open_data_of_run, parts="validation", session=session))
    config, eval_set = plan.config, plan.eval_set
    learned = warn_of_learned(inputs.record, eval_set.split, str(inputs.source[1]))
    log.say(*eval_set.notes, *learned)
    data = build_eval_data(config, eval_set, process)
    log.say(
        f"data: {counted(data.num_samples, 'validation image')}, {counted(len(eval_set.classes), config.task.noun)}"
    )
    log.say(*describe_evaluation(plan))
    inference = PlacingInference.of(config, process)
    log.say(f"precision: {inference.precision.describe()}")
    bad_images = BadImages(eval_set, config.DATA.MAX_BAD_FRACTION, log.warn)
    task = find_task(config)
    evaluations, transforms = {}, inference.transforms
    for name, model in weights_to_score(plan, partial(make_model, plan, log)):
        if not evaluations:
            log.say(f"model: {config.MODEL.NAME}, {describe_size(model)}")
        log.say(*transforms.apply(model.to(process.device)))
        if not evaluations:  # the first weights are loaded, so all checks have passed
            session.begin(plan.inputs.loaded)
            session.status("evaluating")
        start = time.perf_counter()
        (evaluations[name],) = evaluate([model], data, inference, bad_images, task.tally)
        if not math.isfinite(evaluations[name].scores.loss):
            refuse_outputs(plan, model, inference, data)
        seconds = time.perf_counter() - start
        scores = evaluations[name].scores
        log.detail(f"----- {scores.describe(f'{name}Validation')}, time: {seconds:.2f}")
        log.say(scores.describe_all(name, task.describe_scored(eval_set)))
    state, code = "done", ExitCode.DONE
    if not leave_results(session, plan, evaluations):
        state, code = "save_failed", ExitCode.FAILED
    figures = {name.strip().lower() or "raw": each.scores.figures() for name, each in evaluations.items()}
    session.status(state, exit_code=int(code), **figures)
    saved = plan.inputs.prior.saved
    session.advise(after_evaluation(saved.file if saved else None, session.path, eval_set))
    if log.unprinted:
        raise log.unprinted
    return code


def refuse_outputs(plan: EvalPlan, model: nn.Module, inference: PlacingInference, data: EvalData) -> None:
    """Raise ConfigError for a model with non-finite outputs, or whose outputs exclude the class of an image."""
    source, model = str(plan.inputs.source[1]), inference.precision.computing(model).eval()
    for batch in data:
        inputs = inference.inputs(model, batch.images)
        if len(batch.targets):
            inference.outputs(model, inputs, source)
    inference.refuse(model, inputs, source)


def weights_to_score(plan: EvalPlan, make_model: Callable[[], nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield (prefix of the scores, model) for each set of weights to evaluate.

    `make_model` builds the model with the weights of a file that is not a run's checkpoint.
    """
    state = plan.inputs.saved
    if not is_run(state):
        yield "EMA " if plan.inputs.record.get("weights", "").endswith("_ema") else "", make_model()
        return
    path = plan.inputs.checkpoint
    for key, name in (("state_dict", ""), ("state_dict_ema", "EMA ")):
        if state.get(key):
            weights = chosen_weights(state, path, key)[1]
            yield name, SavedModel(path, state, key, weights).build(plan.config)


def leave_results(session: Session, plan: EvalPlan, evaluations: dict[str, Evaluation]) -> bool:
    """Write tables and pictures of the best weights. Return whether it succeeded. Collective."""
    from engine.report.image_results import ResultFiles

    metric = plan.config.TRAIN.BEST_METRIC
    scores = {name: replace(each.scores, metric=metric) for name, each in evaluations.items()}
    name, best = max(scores.items(), key=lambda item: item[1].rank)
    images = evaluations[name].images.gather(session.process).complete(session.process, session.log)
    files = ResultFiles(session.path, plan.eval_set, session.log, plan.config.DATA)
    of_best = Best.of(best, 0, "_ema" if name else "")
    return session.process.first(lambda: files.write(images, of_best, plan.config.REPORT))
