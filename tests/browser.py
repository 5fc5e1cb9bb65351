"""Opens pages in headless Chromium, through its DevTools protocol on a pipe; the standard library is enough.

A machine without Chromium skips these tests: `apt-get install chromium`, or set CHROMIUM to its program.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def program() -> str | None:
    """The path of Chromium or Chrome, if there is one."""
    return next(filter(None, (shutil.which(name) for name in (os.environ.get("CHROMIUM", ""), *NAMES) if name)), None)


class Browser:
    """A headless Chromium; a context manager that ends it."""

    def __init__(self, seconds: float = 60) -> None:
        self.seconds, self._number, self._events, self._left = seconds, 0, [], b""

    def __enter__(self) -> Browser:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        given = [fcntl.fcntl(each, fcntl.F_DUPFD, 10) for each in (theirs_in, theirs_out)]
        log = os.open(f"{self._folder.name}/log", os.O_CREAT | os.O_WRONLY)
        words = [
            program(), "--headless=new", "--remote-debugging-pipe", f"--user-data-dir={self._folder.name}/user",
            "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--disable-extensions",
            "--disable-background-networking", "--disable-component-update", "about:blank",
        ]  # fmt: skip
        if not os.geteuid():
            words.insert(1, "--no-sandbox")  # which Chromium's sandbox needs for root
        actions = [(os.POSIX_SPAWN_DUP2, given[0], 3), (os.POSIX_SPAWN_DUP2, given[1], 4),
                   (os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]  # fmt: skip
        self._process = os.posix_spawn(words[0], words, os.environ, file_actions=actions, setsid=False, setpgroup=0)
        for each in (theirs_in, theirs_out, *given, log):
            os.close(each)
        return self

    def __exit__(self, *exception: Any) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self.call("Browser.close")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        os.write(self._out, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        until = time.monotonic() + self.seconds
        while True:
            found = self._read(until)
            if found.get("id") == self._number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                return found["result"]
            self._events.append(found)

    def _read(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._left:
            if not select.select([self._in], [], [], max(0, until - time.monotonic()))[0]:
                raise TimeoutError(f"Chromium did not answer for {self.seconds} s: {self._log()}")
            if not (data := os.read(self._in, 1 << 20)):
                raise RuntimeError(f"Chromium ended: {self._log()}")
            self._left += data
        message, _, self._left = self._left.partition(b"\0")
        return json.loads(message)

    def _log(self) -> str:
        return Path(self._folder.name, "log").read_text(errors="replace")[-2000:]

    def open(self, path: Path, width: int = 1280, height: int = 900, dark: bool = False, touch: bool = False) -> Page:
        """Load a file in a window of this size; returns after its scripts ran."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, target, session)
        for domain in ("Runtime", "Log", "Page"):
            page.call(f"{domain}.enable")
        page.resize(width, height, touch)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Page.navigate", url=path.resolve().as_uri())
        page.wait("document.readyState === 'complete' && location.protocol === 'file:'")
        page.settle()
        return page


class Page:
    """A page in its own tab."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self.browser, self.target, self.session = browser, target, session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **parameters)

    def resize(self, width: int, height: int = 900, touch: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=touch)
        self.call("Emulation.setTouchEmulationEnabled", enabled=touch)

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait(self, condition: str) -> None:
        until = time.monotonic() + self.browser.seconds
        while not self.run(condition):
            if time.monotonic() > until:
                raise TimeoutError(f"never true: {condition}")
            time.sleep(0.02)

    def settle(self) -> None:
        """Wait until the page has painted what was asked for."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def errors(self) -> list[str]:
        """Uncaught exceptions, and errors that the page or the browser logged."""
        self.settle()
        found = []
        for event in self.browser._events:
            if event.get("sessionId") != self.session:
                continue
            method, values = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                found.append(str(values["exceptionDetails"].get("exception", values)))
            elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "assert", "warning"):
                found.append(str(values["args"]))
            elif method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
                found.append(str(values["entry"]))
        return found

    def mouse(self, kind: str, x: float, y: float, **parameters: Any) -> None:
        """Send a mouse event: mouseMoved, mousePressed, mouseReleased or mouseWheel."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **parameters)
        self.settle()

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", buttons=1, clickCount=1)

    def area(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height of an element, which is scrolled into view."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{found}.scrollIntoView({{block: 'center'}})")
        self.settle()
        return tuple(self.run(f"(({{x, y, width, height}}) => [x, y, width, height])({found}.getBoundingClientRect())"))

    def picture(self, path: Path, whole: bool = True) -> None:
        """Save a screenshot."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        self.browser.call("Target.closeTarget", targetId=self.target)
