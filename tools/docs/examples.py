"""The examples of the reference pages, and their way into the site.

In docs/reference, the blocks of code after a line `::: name` are the example of that name. Left there, they would come
after all methods of a class. So mkdocs takes them out of the page (`on_page_markdown`), and mkdocstrings adds them to
the name's docstring (`Examples`), where they follow the arguments. Nothing is added to the code itself.
"""

import re
from pathlib import Path
from textwrap import indent
from typing import Any

import griffe

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
DIRECTIVE = re.compile(r"^::: ([\w.]+)\n((?:\n*^```(?:python|text)\n.*?^```\n)*)", re.M | re.S)


def examples(text: str) -> dict[str, str]:
    """The example of each name of a reference page, as Markdown; empty for a name that has none."""
    return {found[1]: found[2].strip() for found in DIRECTIVE.finditer(text)}


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """For mkdocs: a reference page without its examples."""
    if not page.file.src_uri.startswith(f"{FOLDER.name}/"):
        return markdown
    return DIRECTIVE.sub(lambda found: f"::: {found[1]}\n", markdown)


class Examples(griffe.Extension):
    """For mkdocstrings: adds examples to docstrings."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called once, when all modules of the package have been read."""
        for page in sorted(FOLDER.glob("*.md")):
            for name, example in examples(page.read_text()).items():
                found = pkg[name.removeprefix(f"{pkg.name}.")]
                target = found.final_target if found.is_alias else found
                # The site joins the docstrings of a class and of its constructor, in this order.
                made = target.members.get("__init__", target)
                last = target if made.docstring is None else made
                if example and last.docstring is not None:
                    last.docstring.value += f"\n\nExamples:\n{indent(example, '    ')}"
