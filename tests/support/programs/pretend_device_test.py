"""Runs one test with the pretend device: python -m tests.support.programs.pretend_device_test MODULE NAME ARGUMENTS."""

import importlib
import pickle
import sys

from tests.support.pretend_device import pretend_device

if __name__ == "__main__":
    module, name, arguments = sys.argv[1:]
    with pretend_device():
        test = getattr(importlib.import_module(module), name)
        test.__wrapped__(**pickle.loads(bytes.fromhex(arguments)))
