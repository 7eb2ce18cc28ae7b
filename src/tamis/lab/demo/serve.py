"""Serve a workload with a model of either kind."""

from tamis.lab.demo.mla_server import MLAServer
from tamis.lab.demo.outcome import Served
from tamis.lab.demo.server import ReportProgress, Server, run_server
from tamis.lab.demo.shape import ModelShape, V4Shape, Workload
from tamis.lab.demo.v4_server import V4Server


def serve(shape: ModelShape | V4Shape, workload: Workload, report: ReportProgress | None = None) -> Served:
    """Serve a workload with continuous batching and return the outcome. Only the times are not deterministic."""
    server: Server = V4Server(shape, workload) if isinstance(shape, V4Shape) else MLAServer(shape, workload)
    return run_server(server, report)
