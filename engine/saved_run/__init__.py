"""What a run's folder says about the run, as plain values; needs no torch."""

from engine.saved_run.saved_run import SavedRun

__all__ = ["SavedRun"]
