"""The parts of gpu_session.py: each is a function in a process of its own, with a limit of time."""
