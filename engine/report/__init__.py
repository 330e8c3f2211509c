"""Reports on a run: tables and pictures of its images, curves of its metrics, and report.html."""

from configs.values import flatten
from engine.plan import TrainPlan
from engine.record.saved_files import title_of
from engine.report.image_results import BestResults
from engine.report.plot import Plotter
from engine.session import Session
from engine.train.callback import Callback
from engine.train.trainer import Trainer


class RunReport:
    """Writes tables, pictures and curves of a training run, and report.html at its end.

    If REPORT is false, it writes neither pictures of images nor report.html.
    """

    def __init__(self, session: Session, plan: TrainPlan, trainer: Trainer):
        config = plan.config
        self._folder, self._log = session.path, session.log
        self._writes_page = config.REPORT and session.process.is_first
        self.curves = Plotter(session.path, title_of(flatten(config)), config.TRAIN.BEST_METRIC)
        self.results = BestResults(config, session.path, plan.eval_set, session.log, trainer)
        self.callbacks: list[Callback] = [self.results]
        if self._writes_page:
            from engine.report.image_sheets import TrainBatch

            self.callbacks.append(TrainBatch(config, session.path, plan.classes, session.log))

    def write_page(self) -> None:
        """Write report.html, in process 0."""
        if self._writes_page:
            from engine.report.report import write_at_end  # local: only the end of a run needs it

            write_at_end(self._folder, self._log)
