"""Finds and checks the rank in a launcher's environment variables."""

import shlex

from utils.launch import LaunchedRank, find_launched_rank, rank_in_environment


def environment_of(words: str) -> dict[str, str]:
    """Return the variables of a shell command such as "RANK=0 WORLD_SIZE=2 -ngpus 1"."""
    return dict(word.split("=", 1) for word in shlex.split(words, comments=True) if "=" in word)


def launched_rank_of(words: str) -> str:
    """Return the rank in the variables of a launcher as text, after assertions that hold for every launcher."""
    environment = environment_of(words)
    launched = find_launched_rank(environment)
    if launched:
        assert launched.parent_is_launcher == (launched.launcher in ("torchrun", "Open MPI"))
        assert rank_in_environment(environment) == launched.rank, "only one process may report a mistake"
    return described(launched)


def described(launched: LaunchedRank | None) -> str:
    if launched is None:
        return "None"
    ranks = f"{launched.rank} of {launched.world_size}, local {launched.local_rank} of {launched.local_size}"
    ends = f"restart {launched.restart_count}, at most {launched.max_world_size}"
    return f"{launched.launcher}: {ranks}, at {launched.host}:{launched.port}, {ends}"
