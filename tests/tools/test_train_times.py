"""The tables of `tamis bench train`."""

from tools.docs import train_times


def test_the_newest_row_of_each_measurement_is_shown() -> None:
    rows = train_times.read()
    keys = [tuple(row[column] for column in train_times.KEY) for row in rows]
    assert len(keys) == len(set(keys))
    assert {row["stage"] for row in rows} == set(train_times.STAGES)


def test_every_row_is_on_the_page_and_the_best_kernels_come_first() -> None:
    everything, headline = train_times.everything(), train_times.headline()
    assert everything.count("\n| ") == len(train_times.read()) + 2
    assert headline.index("CUDA C++") < headline.index("Triton")


def test_what_the_deterministic_mode_costs_is_said_of_each_stage() -> None:
    def row(stage: str, heads: str, milliseconds: str, peak: str, version: str = "tamis hopper") -> dict[str, str]:
        return {"stage": stage, "heads": heads, "median_ms": milliseconds, "peak_mb": peak, "version": version}

    rows = [
        row("forward", "16", "1", "1"),
        row("backward", "16", "4", "100"),
        row("backward", "64", "10", "200"),
        row("backward, deterministic", "16", "6", "1100"),
        row("backward, deterministic", "64", "12", "1640"),
        row("backward, deterministic", "64", "90", "9000", "tamis triton"),
        row("index loss", "16", "2", "70"),
        row("index loss, deterministic", "16", "4", "700"),
    ]
    assert train_times.deterministic(rows) == (
        "In the deterministic mode of the CUDA C++ kernels, backward takes 1.2 to 1.5 times as long and up to 1.6 GB, "
        "and index loss takes 2.0 times as long and up to 0.7 GB."
    )


def test_the_largest_error_of_each_pass_is_said() -> None:
    def row(stage: str, error: str, version: str = "tamis hopper") -> dict[str, str]:
        return {"stage": stage, "error": error, "version": version}

    rows = [
        row("forward", "0.00192"),
        row("forward", "0.00181", "tamis triton"),
        row("backward", "0.0021"),
        row("backward, deterministic", "0.00236"),
        row("backward", "0.9", "tilelang"),
        row("target", "0.5"),
        row("index loss", "0.0016"),
        row("index loss, deterministic", "0.0015"),
    ]
    assert train_times.errors(rows) == (
        "Relative errors against float64 were at most 1.9e-03 in the forward pass, 2.4e-03 in gradients of queries and "
        "rows, and 1.6e-03 in those of the indexer. `tamis bench train` refuses results with errors above 3e-03."
    )
