"""The rendezvous backend with which torchrun starts the processes of one machine, and opens no port."""

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "one machine"


class OneMachine(RendezvousHandler):
    """Tells torchrun that no other machine takes part. torchrun's own store stays in its memory."""

    def __init__(self, parameters: RendezvousParameters):
        self._run_id, self._store = parameters.run_id, dist.HashStore()

    def next_rendezvous(self) -> RendezvousInfo:
        nowhere = RendezvousStoreInfo("", 0)  # the processes meet in a file instead (LaunchedRank.file)
        return RendezvousInfo(self._store, rank=0, world_size=1, bootstrap_store_info=nowhere)

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


rendezvous_handler_registry.register(BACKEND, OneMachine)
