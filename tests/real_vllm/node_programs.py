"""What a node runs: the documented commands, through vLLM's own parser, configuration and multi-process executor.

Workers are vLLM's processes, with its groups over gloo. Only the worker class is ours: it has one layer instead of a
model, because vLLM's own worker needs a GPU.
"""

import os
import time
from pathlib import Path
from typing import Any

import torch
import vllm
from rank_cases import Case
from rank_programs import PAGE, Rank, pretend_hopper
from vllm.config import VllmConfig
from vllm.distributed import parallel_state
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment
from vllm.v1.worker.worker_base import WorkerBase


def configure(options: str, devices: int = 8) -> VllmConfig:
    """vLLM's configuration from what follows `vllm serve`, on a node with so many devices."""
    load_general_plugins()
    pretend_hopper(devices)
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(options.split())
    validate_parsed_serve_args(args)
    args.model = args.model_tag  # as the command does
    return vllm.AsyncEngineArgs.from_cli_args(args).create_engine_config(headless=args.headless)


def parallel_configs(rank: int, count: int, address: str, commands: list[str]) -> list[dict[str, Any]]:
    """What vLLM makes of commands, as far as it concerns the division of work."""
    found = []
    for command in commands:
        config = configure(command)
        parallel = config.parallel_config
        found.append(
            {
                "backend": config.attention_config.backend is AttentionBackendEnum.CUSTOM,
                "cache": config.cache_config.cache_dtype,
                "executor": parallel.distributed_executor_backend,
                "workers": (parallel.world_size, parallel.local_world_size),
                "nodes": (parallel.nnodes, parallel.node_rank, parallel.master_addr),
                "tensor and pipeline": (parallel.tensor_parallel_size, parallel.pipeline_parallel_size),
                "data": (parallel.data_parallel_size, parallel.data_parallel_size_local, parallel.data_parallel_rank),
                "address": (parallel.data_parallel_master_ip, parallel.data_parallel_rpc_port),
                "experts": parallel.enable_expert_parallel,
            }
        )
    return found


class Worker(WorkerBase):  # type: ignore[misc]
    """A worker of vLLM's executor with one layer."""

    def init_device(self) -> None:
        init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, "gloo"
        )

    def load_model(self) -> None:
        pass  # the layer is made with the step, whose context its cache holds

    def attend(self, case: Case) -> dict[str, Any]:
        """This worker's output of a step, and what it knows about itself."""
        self.vllm_config.cache_config.block_size = PAGE  # as the engine sets it for a model's layers
        here = Rank(case, self.vllm_config)
        return {
            "rank": self.rank,
            "process": os.getpid(),
            "backend": AttentionBackendEnum.CUSTOM.get_path(),
            "output": here.run(),
            "expected": here.expected(),
        }


def serve(rank: int, count: int, address: str, commands: list[str], case: Case) -> Any:
    """Run the command of one of two nodes, and on the first one a step on the workers of both."""
    os.environ.update(
        VLLM_WORKER_MULTIPROC_METHOD="fork", VLLM_HOST_IP="127.0.0.1", VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS="1"
    )
    config = configure(commands[rank], case.tensor)
    config.parallel_config.worker_cls = f"{Worker.__module__}.{Worker.__name__}"
    workers = config.parallel_config.local_world_size

    def on_the_same_node(group: Any, source_rank: int = 0) -> list[bool]:
        """vLLM asks shared memory, which has one answer on one machine."""
        ranks = torch.distributed.get_process_group_ranks(getattr(group, "group", group))
        return [other // workers == ranks[source_rank] // workers for other in ranks]

    parallel_state.in_the_same_node_as = on_the_same_node
    executor = MultiprocExecutor(config, monitor_workers=False)
    done = Path(address.removeprefix("file://"))
    try:
        if config.parallel_config.node_rank:
            while not done.exists():  # where the command would wait for its workers to end
                time.sleep(0.05)
            for worker in executor.workers:  # which would wait for the first node for seconds
                worker.proc.kill()
            return None
        return executor.collective_rpc("attend", args=(case,))
    finally:
        done.touch()
        executor.shutdown()
