"""Chromium without a window, driven through its DevTools protocol: https://chromedevtools.github.io/devtools-protocol"""

import fcntl
import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "chrome")
# The path of a browser, from the environment variable CHROMIUM or from PATH
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
HOW_TO_GET = "needs Chromium (apt-get install chromium-headless-shell, or its path in CHROMIUM)"


class Browser:
    """A browser with one page. It gets commands and answers in JSON, through two pipes."""

    def __init__(self, profile: Path):
        """`profile`: an empty folder for the browser's own files."""
        theirs, ours = self._pipes()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        # The browser reads from 3 and writes to 4. Its other flags keep it from asking its maker's servers.
        flags += ["--disable-background-networking", "--disable-component-update", "--no-first-run"]
        words = ["bash", "-c", f'exec "$0" "$@" 3<&{theirs[0]} 4>&{theirs[1]}', CHROMIUM, *flags, "about:blank"]
        log = open(profile / "log", "w")  # noqa: SIM115
        self.process = subprocess.Popen(words, pass_fds=theirs, stdout=log, stderr=log, start_new_session=True)
        log.close()
        for number in theirs:
            os.close(number)
        self.reader, self.writer = os.fdopen(ours[0], "rb"), os.fdopen(ours[1], "wb")
        self.numbers, self.session, self.events, self.rest = itertools.count(1), {}, [], b""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for name in ("Page", "Network", "DOM", "Runtime"):
            self.call(f"{name}.enable")

    @staticmethod
    def _pipes() -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the ends of two pipes: (to read, to write) of the browser and of this process, none of them 3 or 4."""
        ends = []
        for end in (*os.pipe(), *os.pipe()):
            ends.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10))
            os.close(end)
        return (ends[0], ends[3]), (ends[2], ends[1])

    def call(self, method: str, **values) -> dict:
        """Send a command and return its result."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": values} | self.session
        self.writer.write(json.dumps(message).encode() + b"\0")
        self.writer.flush()
        while (answer := self._next()).get("id") != number:
            self.events.append(answer)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def _next(self) -> dict:
        while b"\0" not in self.rest:
            more = os.read(self.reader.fileno(), 1 << 16)
            assert more, "the browser has ended"
            self.rest += more
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def value(self, expression: str):
        """Return the value of an expression in JavaScript, which may be a promise."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def choose_files(self, selector: str, files: list[Path]) -> None:
        """Choose files in an input of the page, as a person does."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path) for path in files])

    def requested(self) -> set[str]:
        """Return the addresses that the page has asked for."""
        return {
            each["params"]["request"]["url"] for each in self.events if each["method"] == "Network.requestWillBeSent"
        }

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.reader.close()
        self.writer.close()
