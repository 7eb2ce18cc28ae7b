"""The counts of `python -m tools.statistics`, on a package of a few lines."""

from pathlib import Path

from tools.statistics import report, spread

MODULE = """class Pair:
    def first(self, a, *, b=0):
        return [x for x in a if x and b] if a else None


def outer(
    one,
    two,
):
    def inner():
        assert one or two
    return inner


@triton.jit
def kernel(a, b, c, d, e, f, g, h):
    pass
"""


def test_percentiles_by_nearest_rank() -> None:
    assert spread(range(1, 101), (50, 90, 99)) == "median 50.5, p90 90, p99 99, max 100"
    assert spread([7]) == "median 7, p90 7, max 7"
    assert spread([]) == "none"


def test_files_functions_and_folders(tmp_path: Path) -> None:
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "one.py").write_text(MODULE)
    (tmp_path / "two.cu").write_text("\n" * 9)
    told = report(tmp_path)
    assert told[0] == "Python: 1 files, 17 lines; lines of a file median 17, p90 17, max 17"
    assert told[1] == "CUDA: 1 files, 9 lines; lines of a file median 9, p90 9, max 9"
    assert told[2:4] == [
        "host functions: 3; lines median 2, p90 7, p99 7, max 7",
        "  parameters median 2, p90 2, max 2; 0 with >= 8, 0 with >= 10",
    ]
    assert told[4:6] == [
        "kernels: 1; lines median 3, p90 3, p99 3, max 3",
        "  parameters median 8, p90 8, max 8; 1 with >= 8, 0 with >= 10",
    ]
    assert "cyclomatic complexity > 10: 0 of 4" in told
    assert "signature lines of functions in ops: 7" in told
    assert told[-2:] == ["      17 ops", "       9 (root)"]
