"""TRAIN.EARLY_STOP ends a run that gets no better, in all its processes, and a resumed one where it would have ended."""

from tests.support.refusals import assert_names
from tests.support.runs import run, run_folder, status_of


def test_a_run_that_gets_no_better_ends_and_is_over_until_the_limit_is_lifted(tmp_path, small_yaml):
    flags = ["-cfg", str(small_yaml), "-output", str(tmp_path / "run"), "-resume", "auto", "-opts"]
    # With a rate of zero no evaluation is better than the first.
    flags += ["TRAIN.BASE_LR=0", "TRAIN.WARMUP_START_LR=0", "TRAIN.EARLY_STOP=2", "DATA.BATCH_SIZE=160"]

    def start(*options: str, processes: int = 1) -> tuple[str, str | None, int, int]:
        """Goes on with the run; returns its state, the reason, its epochs and the best one."""
        ended = run(f"main_{'multi' if processes > 1 else 'single'}_gpu.py", *flags, *options, processes=processes)
        assert set(ended.codes) == {0}, ended.printed
        said.append(ended.stdout)
        status = status_of(run_folder(tmp_path / "run"))
        return status["state"], status.get("reason"), status["epoch"], status["best_epoch"]

    said: list[str] = []
    assert start("TRAIN.NUM_EPOCHS=2") == ("done", None, 2, 1)
    assert start("TRAIN.NUM_EPOCHS=6", processes=2) == ("done", "early stop", 3, 1)
    assert start("TRAIN.NUM_EPOCHS=6") == ("done", "early stop", 3, 1)
    assert_names(said[-1], "TRAIN.EARLY_STOP=none")
    assert start("TRAIN.NUM_EPOCHS=4", "TRAIN.EARLY_STOP=none") == ("done", None, 4, 1)
