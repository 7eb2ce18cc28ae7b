"""The public names of `tamis`, and what importing it loads."""

import subprocess
import sys

import pytest

import tamis


@pytest.mark.parametrize("name", tamis.__all__)
def test_every_promised_name_is_there(name: str) -> None:
    assert getattr(tamis, name) is not None
    assert name in dir(tamis)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Flash'; it offers Batch, Caches"):
        _ = tamis.Flash


def test_importing_costs_little_on_top_of_torch() -> None:
    """No other package but numpy, and a bounded number of our own lines: 9,375 before modules were sorted into folders,
    450 to remember calls, 250 to plan steps in one copy, 80 to select into a given tensor, 165 to select over ranks,
    150 for the backends of other packages, 215 that training shares with inference, 300 for pooled index keys and other
    relatives of V3.2, 735 for DeepSeek-V4.1, and 90 to score prompts in few columns. Seconds depend on the machine, and
    the number of modules on how finely they are cut."""
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "from tamis import *\n"
        "new = set(sys.modules) - before\n"
        "ours = {name for name in new if name.split('.')[0] == 'tamis'}\n"
        "others = {name.split('.')[0] for name in new - ours} - sys.stdlib_module_names\n"
        "assert others <= {'numpy'}, others\n"
        "lines = sum(len(open(sys.modules[name].__file__).readlines()) for name in ours)\n"
        "assert lines <= 11_780, (lines, sorted(ours))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_imports_stay_light() -> None:
    code = (
        "import sys, tamis\n"
        "assert 'torch' not in sys.modules\n"
        "from tamis import *\n"
        "import tamis.integrations.flash_mla\n"
        "heavy = {'triton', 'transformers', 'vllm', 'flash_mla', 'torch._dynamo'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
