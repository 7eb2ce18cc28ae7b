"""The program of the engines' tutorials, against a server that stands in for an engine."""

import json
import runpy
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

PROGRAM = Path(__file__).parents[2] / "docs" / "tutorials" / "ask.py"


class Engine(BaseHTTPRequestHandler):
    """Answers as `/v1/models` and `/v1/completions` do: finds the keys, all but one if `confused`."""

    asked: ClassVar[list[dict[str, Any]]] = []
    confused = False

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self.reply({"data": [{"id": "a model"}]})

    def do_POST(self) -> None:
        assert self.path == "/v1/completions"
        wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(wanted)
        choices = []
        for index, prompt in enumerate(wanted["prompt"]):
            *lines, question = prompt.split("\n")
            (line,) = (line for line in lines if line.startswith(f"{question} "))
            key = line.removeprefix(question).removesuffix(".")
            if self.confused and index == 3:
                key = f"{key[:-1]}x"
            choices.append({"index": index, "text": key, "logprobs": {"tokens": list(key)}})
        self.reply({"choices": choices[::-1]})

    def reply(self, data: dict[str, Any]) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(data).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Engine, "asked", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), Engine) as engine:
        thread = threading.Thread(target=engine.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{engine.server_port}"
        engine.shutdown()
        thread.join()


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["ask.py", *arguments])
    runpy.run_path(str(PROGRAM), run_name="__main__")


def test_answers_are_asked_for_judged_and_compared(
    server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run(monkeypatch, server, "own.json")
    assert capsys.readouterr().out == "8 of 8 keys are right; tokens are in own.json\n"
    (asked,) = Engine.asked
    assert asked["model"] == "a model"
    assert asked["temperature"] == 0
    # A line has more than five tokens in any tokenizer: far beyond the 2048 that V3.2 selects.
    assert all(5 * len(prompt.splitlines()) > 2048 for prompt in asked["prompt"])

    run(monkeypatch, server, "tamis.json")
    capsys.readouterr()
    run(monkeypatch, "compare", "own.json", "tamis.json")
    assert capsys.readouterr().out == "48 of 48 tokens are equal\n"

    monkeypatch.setattr(Engine, "confused", True)
    run(monkeypatch, server, "tamis.json")
    assert capsys.readouterr().out.startswith("7 of 8 keys are right")
    run(monkeypatch, "compare", "own.json", "tamis.json")
    assert capsys.readouterr().out == "answer 3 differs from token 5 on\n47 of 48 tokens are equal\n"
