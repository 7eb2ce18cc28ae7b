"""A browser for tests: Chromium through chromedriver's WebDriver interface, with the standard library alone."""

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
START_SECONDS = 600
FAULTS = (Path(__file__).parent / "faults.js").read_text(encoding="utf-8")
"""Code that lists the faults of a page's layout."""


def missing() -> str:
    """The reason why no browser can be used; empty if one can."""
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(absent)} not found: run `make browser`" if absent else ""


@contextmanager
def open_browser(profile: Path) -> Iterator["Browser"]:
    """A browser with an empty profile, closed again at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen(["chromedriver", f"--port={port}", "--silent"], stdout=subprocess.DEVNULL)
    browser = Browser(f"http://127.0.0.1:{port}")
    try:
        browser.start([*FLAGS, f"--user-data-dir={profile}", "--window-size=1360,1000"])
        yield browser
    finally:
        browser.quit()
        driver.terminate()
        driver.wait(timeout=600)


class Browser:
    """One browser window."""

    def __init__(self, address: str) -> None:
        self._base = address
        self._session = ""

    def start(self, arguments: list[str]) -> None:
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": shutil.which("chromium"), "args": arguments},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self._call("GET", "/status")
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        made = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{made['sessionId']}"

    def quit(self) -> None:
        if self._session:
            self._call("DELETE", self._session)

    def open(self, page: Path) -> None:
        self._call("POST", f"{self._session}/url", {"url": page.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """The result of JavaScript code."""
        return self._call("POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, condition: str, seconds: float = 600) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + seconds
        while not self.run(f"return Boolean({condition})"):
            assert time.monotonic() < deadline, f"never true: {condition}\n{self.console()}"
            time.sleep(0.03)

    def point(self, x: float, y: float, *, click: bool = False, wheel: int = 0) -> None:
        """Move the pointer there, in pixels of the window, and perhaps click or turn the wheel."""
        steps: list[dict[str, Any]] = [{"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y)}]
        if click:
            steps += [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        actions: list[dict[str, Any]] = [{"type": "pointer", "id": "mouse", "actions": steps}]
        self._call("POST", f"{self._session}/actions", {"actions": actions})
        if wheel:
            turn = {"type": "scroll", "x": round(x), "y": round(y), "deltaX": 0, "deltaY": wheel, "duration": 0}
            actions = [{"type": "wheel", "id": "wheel", "actions": [turn]}]
            self._call("POST", f"{self._session}/actions", {"actions": actions})

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        points = [{"type": "pointerMove", "duration": 40, "x": round(x), "y": round(y)} for x, y in (start, end)]
        steps = [points[0], {"type": "pointerDown", "button": 0}, points[1], {"type": "pointerUp", "button": 0}]
        self._call(
            "POST", f"{self._session}/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": steps}]}
        )

    def press(self, selector: str, keys: str) -> None:
        """Type into the element."""
        found = self._call("POST", f"{self._session}/element", {"using": "css selector", "value": selector})
        self._call("POST", f"{self._session}/element/{next(iter(found.values()))}/value", {"text": keys})

    def dark(self) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark"}
        self.devtools("Emulation.setEmulatedMedia", features=[scheme])

    def faults(self, width: int) -> list[str]:
        """`FAULTS` of the page in a window of this width."""
        self.devtools("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.run("return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        found: list[str] = self.run(FAULTS)
        return found

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self._call("POST", f"{self._session}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def console(self) -> list[str]:
        """The console messages since the last call: level and text."""
        found = self._call("POST", f"{self._session}/se/log", {"type": "browser"})
        return [f"{line['level']}: {line['message']}" for line in found]

    def screenshot(self, file: Path, *, whole: bool = True) -> None:
        """Save the whole page as PNG, or its visible part, for which the pointer keeps its place."""
        more: dict[str, Any] = {}
        if whole:
            size = self.devtools("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            more = {"captureBeyondViewport": True, "clip": clip}
        shot = self.devtools("Page.captureScreenshot", format="png", **more)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {json.load(error)['value'].get('message')}") from error
