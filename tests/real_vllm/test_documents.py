"""What the documents say about vLLM's command line and messages, asked of vLLM itself."""

import argparse
import re
import shlex
from inspect import getsource
from pathlib import Path

import pytest
from vllm.v1.attention.backends import registry

from tamis.integrations.vllm.versions import divides_prompts

DOCUMENTS = Path(__file__).parents[2] / "docs"


def commands(start: str) -> list[list[str]]:
    """The arguments of every command that starts so, in the guide and in the tutorial."""
    found = []
    for page in ("vllm.md", "tutorials/vllm.md"):
        text = (DOCUMENTS / page).read_text().replace("\\\n", " ")
        found += [shlex.split(line) for line in re.findall(rf"^{start} (.*)$", text, flags=re.MULTILINE)]
    return found


@pytest.mark.skipif(not divides_prompts(), reason="written for the command line of vLLM 0.32")
def test_vllm_accepts_every_command(request: pytest.FixtureRequest) -> None:
    from vllm.benchmarks import serve
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    request.getfixturevalue("hopper")  # after these imports, which would ask its kernels
    served = [make_arg_parser(FlexibleArgumentParser()).parse_args(words) for words in commands("vllm serve")]
    assert len(served) == 9
    assert {args.model_tag for args in served} == {"deepseek-ai/DeepSeek-V3.2"}
    assert sum(args.attention_backend is not None for args in served) == 8, "one server is vLLM's own"
    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    (measured,) = (parser.parse_args(words) for words in commands("vllm bench serve"))
    assert (measured.random_input_len, measured.num_prompts, measured.ignore_eos) == (8000, 64, True)


def test_vllm_has_the_message_of_a_plugin_that_was_not_loaded() -> None:
    assert "must be registered before use" in getsource(registry)
