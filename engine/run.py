"""A run from its settings to its exit code.

Read these files in this order: this one, stages.py, plan.py, build.py, train/trainer.py,
../datasets/loading/readers.py, evaluation/evaluate.py and saves.py. docs/architecture.md describes them.

-eval (eval_run.py) evaluates weights on the validation images and trains nothing. -check (check/) plans and
builds a run with the functions used here, makes a few updates, prints errors and warnings, and saves nothing.
"""

from configs.load import LoadedConfig
from engine.build import prepare_torch
from engine.record.next_steps import after_failure
from engine.session import Session
from engine.settings import chooses
from utils.distributed import Process
from utils.errors import LostProcess
from utils.program import exit_code_and_message


def run(loaded: LoadedConfig, process: Process) -> int:
    """Train, or evaluate with -eval. Return an ExitCode, or 128 + the number of the signal that stopped the run."""
    evaluates = loaded.config.EVAL
    if chooses(loaded.config.MODEL.PRETRAINED):
        from engine.choice.choose import settings_of_choice

        loaded = settings_of_choice(loaded, process)
    if evaluates:
        from configs.auto import without_auto

        loaded = without_auto(loaded)
    session = Session(loaded, process)
    if process.world_size > 1:
        session.log.say(process.describe())
    prepare_torch(loaded.config, process, session.log)
    try:
        if process.rendezvous:
            from engine.provenance import refuse_other_ranks, setting_facts, source_facts

            refuse_other_ranks(process, setting_facts(loaded.config) | source_facts())
        if evaluates:
            from engine.eval_run import run_evaluation

            code = run_evaluation(session, loaded)
        else:
            from engine.stages import run_training

            code = run_training(session, loaded)
    except BaseException as error:
        explained = process.name_lost_ranks(error)
        is_ours = isinstance(explained, LostProcess) or exit_code_and_message(explained)[1] is None
        if is_ours and session.path.name:
            session.advise(after_failure(process, session.path))
        session.end(explained)
        raise explained from (None if explained is error else error)
    session.end(None)
    return code
