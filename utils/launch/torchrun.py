"""Starts main_multi_gpu.py once per device through torchrun, and returns the exit code of the first that failed."""

import logging
import os
import signal
import sys
import uuid
from collections.abc import Collection


def launch(script: str, arguments: list[str], num_processes: int) -> int:
    """Run `num_processes` workers on this machine; return 0, or the exit code of the worker that caused the failure."""
    # The workers report what is wrong; torchrun's own report would bury it.
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    if num_processes > 1:
        # Unset, every process would use all cores; torchrun itself would set it to 1.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_processes)))
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,  # torchrun would restart after any failure, a mistake in the settings too
        monitor_interval=0.1,
        signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",  # forwarded to the workers, which save
    )
    try:
        elastic_launch(config, sys.executable)("-u", script, *arguments)
    except ChildFailedError as error:
        return root_cause(error.failures.values())
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0


def root_cause(failures: Collection) -> int:
    """The exit code of the process that took the others down, from torchrun's list of failures.

    When one dies, the others lose their connection and exit with 1, or torchrun ends them, often before it polls: it
    then gives all of them the same second.
    """
    first = min(failure.timestamp for failure in failures)
    codes = [failure.exitcode for failure in failures if failure.timestamp <= first + 1]  # whole seconds
    codes = [code if code > 0 else 128 - code for code in codes]
    consequences = [1, 128 + signal.SIGTERM]
    return min(codes, key=lambda code: consequences.index(code) if code in consequences else -1)
