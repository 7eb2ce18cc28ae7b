"""The figures of a report, in the order of the page."""

from tamis.lab.bench.report.figures import FigureKind
from tamis.lab.bench.report.latency import latency_panels
from tamis.lab.bench.report.roofline import roofline_panels
from tamis.lab.bench.report.speedups import speedup_panels

FIGURES = (
    FigureKind(
        "roofline",
        "Roofline",
        "Each point is a measurement; the lines are the limits of memory bandwidth and arithmetic. Stages that only "
        "move data are left out there; the other panel shows every measurement's share of its own limit.",
        2,
        roofline_panels,
    ),
    FigureKind(
        "peers",
        "Speedup over baselines",
        "Each baseline ran in the same process on the same inputs, interleaved with tamis. Speedup is the baseline's "
        "time over tamis' time: above 1, tamis is faster.",
        2,
        speedup_panels,
    ),
    FigureKind(
        "latency",
        "Latency against batch and context",
        "Medians, with the 10th to 90th percentile as a band. Dashed lines are the baseline's medians.",
        3,
        latency_panels,
    ),
)
