"""A run, from its settings to its result. Start reading at run.py, then trainer.py."""
