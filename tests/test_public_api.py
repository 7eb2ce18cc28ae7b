"""What `import tamis` promises."""

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


def test_imports_stay_light() -> None:
    code = (
        "import sys, tamis\n"
        "assert 'torch' not in sys.modules\n"
        "from tamis import SparseMLA, Planner, ops\n"
        "import tamis.integrations.flash_mla\n"
        "heavy = {'triton', 'transformers', 'vllm', 'flash_mla'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
