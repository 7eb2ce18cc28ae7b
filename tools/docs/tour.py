"""The page and the pictures of the notebook docs/tour.ipynb, from the outputs that it is committed with.

`python -m tools.docs.tour` runs the notebook and saves its new outputs; `make generate` then writes the page.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[2] / "docs" / "tour.ipynb"
NOTE = "This page is a notebook: [download it](tour.ipynb) to run it and change things."
PICTURES = range(1, 6)
"""The numbers of the notebook's pictures."""
SVG = "image/svg+xml"


def read() -> dict[str, Any]:
    """The notebook as plain data."""
    found: dict[str, Any] = json.loads(NOTEBOOK.read_text())
    return found


def picture(number: int) -> str:
    """One of the notebook's pictures, counted from 1."""
    shown = [output["data"][SVG] for cell in read()["cells"] for output in _outputs(cell) if "data" in output]
    assert len(shown) == len(PICTURES)
    return _text(shown[number - 1]).rstrip() + "\n"


def page() -> str:
    """The notebook in Markdown: text, code, and what the code printed and drew."""
    parts, shown = [], 0
    for cell in read()["cells"]:
        source = _text(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in _outputs(cell):
            if "data" in output:
                shown += 1
                parts.append(f"![{cell['metadata']['alt']}](pictures/tour-{shown}.svg)")
            else:
                parts.append(f"```text\n{_text(output['text']).rstrip()}\n```")
    # The note comes after the title, which is the first line of the first cell.
    title, _, rest = parts[0].partition("\n\n")
    return "\n\n".join([title, NOTE, rest, *parts[1:]])


def run(source: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A copy of a notebook with the outputs of a new run, in a kernel of this interpreter; an error in a cell raises.

    The kernel talks over sockets in `folder`, so no port is opened.
    """
    import nbformat
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    notebook = nbformat.reads(json.dumps(source), as_version=4)
    # Without folders of kernels there is only the interpreter's own.
    kernels = KernelSpecManager(kernel_dirs=[])
    manager = AsyncKernelManager(
        kernel_name="python3", kernel_spec_manager=kernels, transport="ipc", ip=str(folder / "kernel")
    )
    NotebookClient(notebook, km=manager, timeout=300, record_timing=False).execute(cleanup_kc=True)
    found: dict[str, Any] = json.loads(nbformat.writes(notebook))
    return found


def _outputs(cell: dict[str, Any]) -> list[dict[str, Any]]:
    """What a cell printed and drew, without warnings, pictures last."""
    found = [output for output in cell.get("outputs", []) if output.get("name") != "stderr"]
    return sorted(found, key=lambda output: "data" in output)


def _text(lines: str | list[str]) -> str:
    return lines if isinstance(lines, str) else "".join(lines)


def main() -> None:
    """Run the notebook and save it with its new outputs."""
    # Pictures have no time of creation and the same names inside, so that they change only where they look different.
    os.environ["SOURCE_DATE_EPOCH"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        found = run(read(), Path(folder))
    for cell in found["cells"]:
        if cell["cell_type"] == "code":
            cell["execution_count"] = None
    NOTEBOOK.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
