"""HTML reports: the content security policy, escaping of untrusted texts, and writes that fail."""

import base64
import errno
import hashlib
import json
import os
import re
import stat
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import browser
import pytest

from tamis.lab.bench.record import COLUMNS, CsvFile
from tamis.lab.bench.report.data import read_rows
from tamis.lab.html import document, write_whole
from tamis.lab.html import files as report_files

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
HOSTILE = (
    "</script><script>document.title='ran'</script><!--<script>\"'&<img src=x onerror=\"document.title='ran'\">$x$"
)


class Page(HTMLParser):
    """The policy of a page, its scripts and styles, and attributes that would run or load something."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.policy: dict[str, list[str]] = {}
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.data: list[str] = []
        self.elements: set[str] = set()
        self.attributes: set[str] = set()
        self._into: list[str] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.elements.add(tag)
        self.attributes |= set(given)
        if given.get("http-equiv") == "Content-Security-Policy":
            parts = [part.split() for part in (given["content"] or "").split(";")]
            self.policy = {words[0]: words[1:] for words in parts}
        if tag == "script":
            self._into = self.data if given.get("type") else self.scripts
        elif tag == "style":
            self._into = self.styles
        if self._into is not None and tag in ("script", "style"):
            self._into.append("")

    def handle_endtag(self, tag: str) -> None:
        self._into = None

    def handle_data(self, data: str) -> None:
        if self._into is not None:
            self._into[-1] += data


def hashed(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def check(text: str, *, scripts: int, styled: bool) -> Page:
    page = Page(text)
    assert len(page.scripts) == scripts
    assert page.policy == {
        "default-src": ["'none'"],
        "script-src": [hashed(script) for script in page.scripts] or ["'none'"],
        "style-src": [hashed(style) for style in page.styles],
        "style-src-attr": ["'unsafe-inline'" if styled else "'none'"],
        "img-src": ["data:"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
    }
    assert styled or "style" not in page.attributes
    assert not {name for name in page.attributes if name.startswith("on")}
    assert not page.elements & {"base", "form", "iframe", "object", "embed", "img"}
    return page


def test_the_policy_names_what_is_in_the_page() -> None:
    page = check(
        document("title", "<p>body</p>", style="p { color: red; }", script="'a' < 'b' && 1", data=[HOSTILE]),
        scripts=1,
        styled=False,
    )
    assert page.scripts == ["\n'a' < 'b' && 1"]
    assert "<" not in page.data[0]
    assert json.loads(page.data[0]) == [HOSTILE]


def test_untrusted_texts_stay_texts_in_a_bench_report(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from tamis.lab.bench.report import write_report

    plain = read_rows([RESULTS / "h200_write.csv"])
    names = ("gpu", "driver", "torch", "tamis", "commit", "stage", "layout", "backend", "peer")
    texts = dict.fromkeys(names, HOSTILE)
    write_report([replace(row, **texts, time=HOSTILE, ratio=0.5, peer_us=1.0) for row in plain], tmp_path)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = check(text, scripts=0, styled=True)
    assert page.elements >= {"svg", "table"}
    if not browser.missing():
        with browser.open_browser(tmp_path / "profile") as window:
            window.open(tmp_path / "report.html")
            assert window.run("return document.title") != "ran"
            assert window.console() == []


def test_a_script_that_slipped_into_a_page_would_not_run(tmp_path: Path) -> None:
    if browser.missing():
        pytest.skip(browser.missing())
    page = document("title", "<p>body</p><script>document.title = 'ran'</script>", script="document.body.id = 'ours'")
    (tmp_path / "page.html").write_text(page)
    with browser.open_browser(tmp_path / "profile") as window:
        window.open(tmp_path / "page.html")
        assert window.run("return [document.title, document.body.id]") == ["title", "ours"]
        (line,) = window.console()
        assert "Content Security Policy" in line


def test_the_page_of_inspect_has_one_script(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from cli.test_inspect_cli import made_up

    from tamis.lab.inspection import render_page

    text = render_page(made_up(64, 8, 2), title=HOSTILE, text=lambda token: HOSTILE, parameters={HOSTILE: HOSTILE})
    check(text, scripts=1, styled=False)


@pytest.mark.parametrize("fails", ["write", "flush", "fsync", "replace"])
@pytest.mark.parametrize("there", [True, False])
def test_a_failed_write_leaves_what_was_there(
    fails: str, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "report.html"
    if there:
        path.write_text("before")
    with monkeypatch.context() as patch:
        if fails in ("fsync", "replace"):
            patch.setattr(report_files.os, fails, full)
        else:
            real = open

            def opened(*arguments: object):
                file = real(*arguments)

                class File:
                    def __getattr__(self, name: str):
                        return full if name == fails else getattr(file, name)

                    def __enter__(self):
                        return self

                    def __exit__(self, *error: object) -> None:
                        file.close()

                return File()

            patch.setattr(report_files, "open", opened, raising=False)
        with pytest.raises(OSError, match="No space left"):
            write_whole(path, "after")
    assert [file.read_text() for file in tmp_path.iterdir()] == (["before"] if there else [])


def test_a_written_file_has_the_usual_mode_or_the_one_it_had(tmp_path: Path) -> None:
    path = tmp_path / "page"
    before = os.umask(0o027)
    try:
        write_whole(path, "a")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o604)
    write_whole(path, "\udcff")
    assert stat.S_IMODE(path.stat().st_mode) == 0o604
    assert path.read_text() == "\\udcff"


def test_links_lead_to_their_files_and_pipes_are_written_to(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("before")
    (tmp_path / "link").symlink_to("real")
    write_whole(tmp_path / "link", b"after")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "after"
    read, write = os.pipe()
    write_whole(Path(f"/proc/self/fd/{write}"), b"through a pipe")
    os.close(write)
    assert os.read(read, 100) == b"through a pipe"
    os.close(read)


def test_rows_are_added_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = read_rows([RESULTS / "h200_write.csv"])
    path = tmp_path / "rows.csv"
    CsvFile(path).add(rows[:2])
    file = CsvFile(path)
    before = path.read_bytes()

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(report_files.os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            file.add(rows[2:])
    assert path.read_bytes() == before
    file.add(rows[2:])
    assert read_rows([path]) == rows
    assert re.findall("^time", path.read_text(), flags=re.M) == ["time"]
    assert path.read_text().startswith(",".join(COLUMNS))
