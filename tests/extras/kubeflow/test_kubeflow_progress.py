"""The progress that a run reports to a TrainJob's server, which can neither end nor delay the run."""

import json
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from extras.kubeflow import KubeflowProgress, kubeflow_status
from tests.support.forks import DEADLINE

FACTS = {"total_steps": 200, "position": {"epoch": 1, "step": 90}, "eta_seconds": 120}
FACTS |= {"best_top1": 71.25, "best_epoch": 1}


class TrainJobServer(ThreadingHTTPServer):
    """Answers each post with a status, "hang" (no answer until `goes_on`) or "close". Records tokens and bodies."""

    daemon_threads = True

    def __init__(self, folder, answers):
        self.answers, self.tokens, self.bodies = iter(answers), [], []
        self.goes_on = threading.Event()
        key, certificate = str(folder / "key.pem"), str(folder / "ca.crt")
        names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate]
        subprocess.run([*made, *names], check=True, capture_output=True)
        super().__init__(("127.0.0.1", 0), _Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        (folder / "token").write_text("first\n")
        values = f"https://127.0.0.1:{self.server_port}/status", certificate, str(folder / "token")
        self.environment = dict(zip(KubeflowProgress.VARIABLES, values, strict=True))
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request, client_address) -> None:
        """Ignore errors: clients close their connections after their timeout."""


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        answer = next(self.server.answers)
        self.server.tokens.append(self.headers["Authorization"])
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if answer == "hang":
            self.server.goes_on.wait(DEADLINE)
        if isinstance(answer, int):
            self.send_response(answer)
            self.send_header("Location", "https://127.0.0.1:1/elsewhere")
            self.end_headers()

    def log_message(self, *arguments) -> None:
        pass


@pytest.fixture
def started(tmp_path):
    """Return a function that starts a server with these answers. It returns server, progress, warnings and clock."""
    servers = []

    def start(*answers):
        server, warned, clock = TrainJobServer(tmp_path, answers), [], [0.0]
        servers.append(server)
        return server, KubeflowProgress(server.environment, warned.append, lambda: clock[0]), warned, clock

    yield start
    for server in servers:
        server.goes_on.set()
        server.shutdown()
        server.server_close()


def test_kubeflow_reports_are_throttled_and_use_current_token(tmp_path, started, monkeypatch):
    for name in ("PATIENCE", "LAST_PATIENCE"):
        monkeypatch.setattr(KubeflowProgress, name, DEADLINE)
    server, progress, warned, clock = started(200, 200, 200)
    progress.publish({"state": "starting"})  # no progress is known yet
    for seconds, token in ((0.0, "first"), (4.9, "first"), (5.0, "second")):
        (tmp_path / "token").write_text(token)
        clock[0] = seconds
        progress.publish(FACTS)
        progress.thread.join(DEADLINE)
    progress.publish(FACTS | {"exit_code": 0, "position": {"epoch": 2, "step": 200}, "eta_seconds": None})
    assert server.tokens == ["Bearer first", "Bearer second", "Bearer second"] and not warned
    status = server.bodies[0]["trainerStatus"]
    assert (status["progressPercentage"], status["estimatedRemainingSeconds"]) == (45, 120)
    assert status["metrics"] == [{"name": "best_top1", "value": "71.25"}, {"name": "best_epoch", "value": "1"}]
    last = server.bodies[-1]["trainerStatus"]
    assert last["progressPercentage"] == 100 and "estimatedRemainingSeconds" not in last


def test_kubeflow_progress_percentage_follows_steps_up_to_100():
    places = ({}, {"step": 2}, {"step": 2, "position": {"step": 9}}, {"step": 22})
    found = [kubeflow_status({"total_steps": 20} | each)["trainerStatus"]["progressPercentage"] for each in places]
    assert found == [0, 10, 45, 100]


@pytest.mark.slow
@pytest.mark.parametrize("answer", [401, 500, 302, "hang", "close"])
def test_failing_kubeflow_server_causes_one_warning_and_no_delay(started, monkeypatch, answer):
    server, progress, warned, clock = started(*[answer] * 3)
    monkeypatch.setattr(KubeflowProgress, "PATIENCE", 1.0)
    progress.publish(FACTS)
    progress.thread.join(DEADLINE)
    monkeypatch.setattr(KubeflowProgress, "PATIENCE", DEADLINE)
    clock[0] = 10.0
    progress.publish(FACTS)
    assert answer != "hang" or progress.thread.is_alive() and progress.thread.daemon, "the run must not wait"
    server.goes_on.set()
    progress.thread.join(DEADLINE)
    server.goes_on.clear()
    progress.publish(FACTS | {"exit_code": 0})
    assert answer != "hang" or progress.thread.is_alive(), "the end of the run waits briefly"
    assert len(warned) == 1 and "Kubeflow" in warned[0] and "first" not in warned[0]
