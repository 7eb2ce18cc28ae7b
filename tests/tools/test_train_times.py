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
