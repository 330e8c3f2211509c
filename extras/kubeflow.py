"""Reports the progress of a TrainJob to Kubeflow's Trainer, whose server displays it."""

import contextlib
import http.client  # not urllib, which would send the token along when it follows a redirect
import json
import ssl
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engine.session import now


class KubeflowProgress:
    """Posts the facts of status.json to the server that a TrainJob names, in a thread, so that training never waits."""

    VARIABLES = ("KUBEFLOW_TRAINER_SERVER_URL", "KUBEFLOW_TRAINER_SERVER_CA_CERT", "KUBEFLOW_TRAINER_SERVER_TOKEN")
    SECONDS_BETWEEN = 5.0
    PATIENCE, LAST_PATIENCE = 5.0, 1.5  # seconds: timeout of a post; longest wait for the last post of a run

    def __init__(self, environment: Mapping[str, str], warn: Callable[[str], None], clock: Callable[[], float]):
        self._url, self._certificate, self._token = map(environment.get, self.VARIABLES)
        self._warn, self._clock, self._next, self._has_failed = warn, clock, 0.0, False
        self.thread = threading.Thread()

    def publish(self, facts: Mapping[str, Any]) -> None:
        """Post the facts, unless the last post is recent or unfinished. The last facts of a run are always posted."""
        if not facts.get("total_steps"):
            return
        is_last = "exit_code" in facts
        if not is_last and (self.thread.is_alive() or self._clock() < self._next):
            return
        self._next = self._clock() + self.SECONDS_BETWEEN
        self.thread = threading.Thread(target=self._post, args=(kubeflow_status(facts),), daemon=True)
        self.thread.start()
        if is_last:
            self.thread.join(self.LAST_PATIENCE)

    def _post(self, content: dict) -> None:
        try:
            address, token = urlsplit(self._url), Path(self._token).read_text().strip()  # the token changes every hour
            options = {"timeout": self.PATIENCE, "context": ssl.create_default_context(cafile=self._certificate)}
            connection = http.client.HTTPSConnection(address.hostname, address.port, **options)
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            with contextlib.closing(connection):
                connection.request("POST", address.path, json.dumps(content), headers)
                answer = connection.getresponse()
            if answer.status != 200:
                raise OSError(f"the server answers {answer.status}")
        except Exception as error:
            if not self._has_failed:
                self._warn(f"cannot report progress to Kubeflow ({type(error).__name__}: {error}); training continues")
            self._has_failed = True


def kubeflow_status(facts: Mapping[str, Any]) -> dict:
    """Return the status that Kubeflow displays for a TrainJob, from the facts of status.json."""
    step, total = facts.get("position", facts).get("step", 0), facts["total_steps"]
    names = [name for name in ("best_top1", "best_epoch") if facts.get(name) is not None]
    status = {
        "progressPercentage": min(100 * step // total, 100),
        "estimatedRemainingSeconds": facts.get("eta_seconds"),
        "metrics": [{"name": name, "value": f"{facts[name]:g}"} for name in names],
        "lastUpdatedTime": now(),
    }
    return {"trainerStatus": {name: value for name, value in status.items() if value is not None}}
