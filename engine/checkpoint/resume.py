"""Which checkpoint a run goes on from, whether it may, and taking it up."""

from pathlib import Path

from configs.schema import Config
from datasets.batch_order import Order
from engine.checkpoint.format import changes, find_newest, read_checkpoint
from engine.session import Session
from engine.train.trainer import Trainer
from models.weights import check_exactly, find_file
from utils.errors import ConfigError

WEIGHTS_ONLY = (".pdparams", ".safetensors", ".npz")


def find_checkpoint(session: Session) -> Path | None:
    """The file to go on from, if any."""
    config = session.config
    if config.MODEL.RESUME is None:
        return None
    if config.MODEL.RESUME != "auto":
        path = find_file(config.MODEL.RESUME)
        if path is None:
            raise ConfigError(
                f"-resume: no file at {config.MODEL.RESUME}; -resume auto looks for the newest run itself"
            )
        return path
    found = find_newest(config.SAVE, config.TAG, session.log.warn)
    if found is None:
        session.log.say(f"-resume auto: no run to go on with in {config.SAVE}, so this is a new one")
    return found


def run_folder_of(checkpoint: Path | None) -> Path | None:
    """A run goes on in its own folder; a checkpoint that lies elsewhere starts a new one."""
    return checkpoint.parent if checkpoint and (checkpoint.parent / "config.yaml").exists() else None


def read_saved(path: Path | None, lazily: bool = False) -> dict:
    """What is in the checkpoint; nothing where there is none, or a file of weights alone. `lazily` as in read_torch."""
    return {} if path is None or path.suffix in WEIGHTS_ONLY else read_checkpoint(path, lazily)


def batch_size_of(saved: dict) -> int | None:
    """DATA.BATCH_SIZE of the checkpoint's run, if it is one of ours."""
    return saved["config"].get("DATA.BATCH_SIZE") if "progress" in saved else None


def global_batch_to_keep(config: Config, saved: dict) -> int | None:
    """The images that an update of the checkpoint's run sees, if nothing but the number of processes may have changed.

    Whoever gives another batch size or accumulation has done the sum anew, and it is compared with the checkpoint's.
    """
    then = saved.get("config", {}) if "progress" in saved else {}
    as_then = (then.get("DATA.BATCH_SIZE"), then.get("TRAIN.ACCUM_ITER"))
    return then["GLOBAL_BATCH"] if as_then == (config.DATA.BATCH_SIZE, config.TRAIN.ACCUM_ITER) else None


def restore(session: Session, trainer: Trainer, path: Path, state: dict) -> None:
    """Take up a checkpoint: all of one of ours; of another system's the weights and the epoch."""
    config, log = session.config, session.log
    if "progress" not in state:
        trainer.epoch = config.TRAIN.LAST_EPOCH or state.get("epoch", -1) + 1
        trainer.step = trainer.epoch * trainer.data.steps_per_epoch
        log.say(f"resume: {path} has weights only; epoch {trainer.epoch + 1} starts with a fresh optimizer")
        return
    refuse_changes(session, state, path, trainer.data.order)
    check_exactly(trainer.model, state["state_dict"], path)
    trainer.load_state_dict(state)
    log.say(f"resume: {path}, after epoch {trainer.epoch} and step {trainer.step}")


def refuse_changes(session: Session, state: dict, path: Path, order: Order) -> None:
    """A checkpoint of ours goes with the settings that it was made with."""
    config = session.config
    different = changes(state["config"], comparable(session, order))
    if different and not config.RESUME.ALLOW_CHANGED:
        raise ConfigError(
            f"-resume: these settings are not those that {path} was made with:\n  "
            + "\n  ".join(different)
            + "\nput them back, or go on all the same with -opts RESUME.ALLOW_CHANGED=true"
        )
    if config.TRAIN.LAST_EPOCH not in (0, state["epoch"] + 1):
        raise ConfigError(
            f"-last_epoch is {config.TRAIN.LAST_EPOCH}, but {path} says that {state['epoch'] + 1} epochs are finished; "
            "leave -last_epoch out"
        )


def comparable(session: Session, order: Order) -> dict:
    """The settings as saved with a checkpoint, with what they come to for this number of processes."""
    return session.settings | {"GLOBAL_BATCH": order.global_batch, "NUM_IMAGES": order.num_images}
