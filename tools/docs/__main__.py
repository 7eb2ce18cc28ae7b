"""`python -m tools.docs` regenerates the parts of the documents that come from code and results (`make generate`).

Pictures are whole files. In Markdown, the text between `<!-- generated: name -->` and `<!-- end -->` is replaced.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tools.docs import (
    backends,
    badges,
    bounds,
    commands,
    doors,
    engines,
    flow,
    glance,
    hardware,
    install,
    layouts,
    models,
    open_bars,
    parallelism,
    planning,
    results,
    selecting,
    slower,
    speed,
    tour,
    train_times,
    training,
    vllm,
)

ROOT = Path(__file__).parents[2]


def program(name: str) -> str:
    """The program of a tutorial, whole."""
    return f"```python\n{(ROOT / f'docs/tutorials/{name}.py').read_text()}```"


PICTURES: dict[str, Callable[[], str]] = {
    "badges": badges.draw,
    "layer": flow.draw_layer,
    "pages": flow.draw_pages,
    "entries": flow.draw_entries,
    "step": planning.draw,
    "selecting": selecting.draw,
    "selecting-speed": selecting.draw_speed,
    "speed": speed.draw,
    "training": training.draw,
    **{f"layout-{name}": partial(layouts.draw, name) for name in layouts.NAMES},
    **{f"tour-{number}": partial(tour.picture, number) for number in tour.PICTURES},
}
TEXTS: dict[str, Callable[[], str]] = {
    **{name: partial(program, name) for name in ("ask", "ranks")},
    "backend fields": backends.fields,
    "backend functions": backends.functions,
    "bounds": bounds.bounds,
    "by heads": parallelism.by_heads,
    "commands": commands.commands,
    "cpu step": results.cpu_step,
    "engines": engines.engines,
    "engine turns": engines.spread,
    "indexer engines": engines.indexers,
    "exit codes": commands.exit_codes,
    "glance": glance.glance,
    "hardware": hardware.hardware,
    "install": install.first,
    "install cpu": install.cpu,
    "install extras": install.extras,
    "install offline": install.offline,
    "install requirements": install.requirements,
    "install sizes": install.sizes,
    "install ways": install.ways,
    **{f"install {name}": partial(install.extra, name) for name in install.PURPOSES},
    "losses": speed.losses,
    "heads per gpu": parallelism.heads_per_gpu,
    "highlights": results.highlights,
    "models": models.models,
    "supported models": models.supported,
    "doors": doors.headline,
    "open bars": open_bars.open_bars,
    "parallel decodes": parallelism.decodes,
    "parallel memory": parallelism.memory,
    "parallel prompts": parallelism.prompts,
    "prompts": speed.prompts,
    "score": glance.score,
    "results": lambda: "\n\n".join(
        text for text in (doors.everything(), results.everything(), train_times.everything()) if text
    ),
    "selecting": selecting.costs,
    "slower": slower.slower,
    "tested versions": install.tested,
    "tour": tour.page,
    "train demo": training.measures,
    "train demo v4": training.measures_v4,
    "train times": train_times.headline,
    "vllm releases": vllm.releases,
}
PLACE = re.compile(r"(<!-- generated: ([\w ]+) -->\n).*?(<!-- end -->)", re.S)


def outputs() -> dict[Path, str]:
    """Every file that is generated, wholly or partly, with its new text."""
    pictures = {ROOT / "docs" / "pictures" / f"{name}.svg": draw() for name, draw in PICTURES.items()}
    pages = [ROOT / "README.md", ROOT / "benchmarks" / "NOTES.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return pictures | {page: _filled(page.read_text()) for page in pages}


def _filled(text: str) -> str:
    return PLACE.sub(lambda found: f"{found[1]}\n{TEXTS[found[2]]()}\n\n{found[3]}", text)


def main() -> None:
    """Write the files that have changed and print their names."""
    for path, text in outputs().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
