"""From settings to a finished run. Start reading at run.py, then trainer.py."""
