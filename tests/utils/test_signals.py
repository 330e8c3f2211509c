"""Signals that stop a run: noted, and a second one ends the process at once, unless it is the first one passed on."""

import os
import signal
import time

import pytest

from utils.program import StopSignal


@pytest.mark.usefixtures("signal_handlers")
def test_a_signal_that_arrives_twice_within_seconds_is_one_and_a_later_one_ends_the_process(monkeypatch):
    now, codes = [100.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(os, "_exit", codes.append)
    stop = StopSignal()
    assert stop.number == 0
    os.kill(os.getpid(), signal.SIGTERM)
    assert (stop.number, codes) == (signal.SIGTERM, [])
    for now[0], number in ((100.0, signal.SIGTERM), (102.9, signal.SIGINT)):
        os.kill(os.getpid(), number)
    assert (stop.number, codes) == (signal.SIGTERM, []), "Ctrl-C that torchrun passes on as well"
    now[0] = 103.1
    os.kill(os.getpid(), signal.SIGINT)
    assert codes == [128 + signal.SIGINT]
