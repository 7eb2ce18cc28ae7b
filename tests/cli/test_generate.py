"""`tamis generate` end to end, on tiny models and on a checkpoint saved here."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from seeds import reseed

from tamis.cli import main
from tamis.integrations.hf import names

transformers = pytest.importorskip("transformers")

from tamis.lab import generation  # noqa: E402

SHORT = ("--device", "cpu", "--prompt-tokens", "90", "--max-new-tokens", "3")
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "first_k_dense_replace": 1,
    "intermediate_size": 32,
    "vocab_size": 12,
    "pad_token_id": None,
    "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in 16 bits with a tokenizer of ten words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("checkpoint")
    reseed(3)
    config = transformers.DeepseekV32Config(**TINY)
    transformers.DeepseekV32ForCausalLM(config).bfloat16().save_pretrained(folder)
    words = {word: number for number, word in enumerate("abcdefghijkl")}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("model", [known.short for known in names.MODELS.values()])
def test_random_models_stream_token_numbers(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", model, *SHORT]) == 0
    found = capsys.readouterr()
    assert len([int(number) for number in found.out.split()]) == 3
    assert "90 tokens of prompt" in found.err
    assert "tokens/s), fp8 pages" in found.err


@pytest.mark.parametrize("model", ["trained", "trained-v4"])
@pytest.mark.parametrize("cache", ["fp8", "bf16"])
def test_a_trained_model_answers(cache: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", model, "--prompt-tokens", "400", "--cache", cache, "--json"]
    assert main(["generate", "--device", "cpu", *given]) == 0
    found = json.loads(capsys.readouterr().out)
    # The value, then the end.
    assert found["generated"] == [found["answer"], 1]
    assert found["prompt"][found["needle"]] == found["answer"]
    assert found["prompt"][found["needle"] - 1] == found["prompt"][-1]
    value, end = found["text"].split()
    assert value.startswith("v")
    assert end == "</s>"


def test_the_trained_model_says_what_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--device", "cpu", "--prompt-tokens", "100", "--seed", "1"]) == 0
    found = capsys.readouterr()
    value = found.out.split()[0]
    assert re.search(rf"the prompt asks for k\d+; its value is {value}, \d+ tokens back \(position \d+\)", found.err)


def test_a_prompt_without_room_for_pairs_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for model, least in (("trained", 24), ("trained-v4", 96)):
        assert main(["generate", "--device", "cpu", "--model", model, "--prompt-tokens", str(least - 1)]) == 2
        assert f"--prompt-tokens must be at least {least}, got {least - 1}" in capsys.readouterr().err


def test_the_trained_model_reads_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--device", "cpu", "--prompt", "<s> w1 k7 v3 w2 k9 v5 w6 k7", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["text"] == "v3 </s>"
    assert (found["needle"], found["answer"]) == (None, None)


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", "v32", *SHORT, "--cache", "bf16", "--seed", "5", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert (len(first["prompt"]), len(first["generated"])) == (90, 3)
    assert (first["model"], first["cache"]) == ("DeepseekV32ForCausalLM", "bf16")
    assert (first["checkpoint"], first["revision"]) == (None, None)
    assert (first["command"], first["ok"]) == ("generate", True)
    assert first["text"] is None
    assert first["prefill_seconds"] > 0
    assert first["tokens_per_second"] > 0
    assert main(["generate", "--model", "v32", *SHORT, "--cache", "bf16", "--seed", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["generated"] == first["generated"]


def test_a_checkpoint_gives_what_transformers_gives(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "a c e g i k b d f h j l a b c"
    options = ["generate", "--checkpoint", str(checkpoint), "--device", "cpu", "--cache", "fp32", "--prompt", prompt]
    assert main([*options, "--max-new-tokens", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    model = transformers.DeepseekV32ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    ids = torch.tensor([found["prompt"]])
    assert found["prompt"][:4] == [0, 2, 4, 6]
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    assert found["generated"] == expected[0, ids.shape[1] :].tolist()
    assert found["text"].split() == ["abcdefghijkl"[number] for number in found["generated"]]
    assert main([*options, "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out.strip() == found["text"]


def test_the_same_checkpoint_can_be_inspected(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "a c e g i k b d f h j l a b c"
    (tmp_path / "prompt.txt").write_text(prompt)
    options = ["inspect", "--checkpoint", str(checkpoint), "--device", "cpu", "--json", "--query", "0"]
    found = []
    for given in (["--prompt", prompt], ["--prompt-file", str(tmp_path / "prompt.txt")]):
        assert main([*options, *given]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["prompt"] == ["abcdefghijkl".index(word) for word in prompt.split()]
    assert found[0]["layers"] == found[1]["layers"]
    assert found[0]["layers"][0]["selected"] == 8
    assert found[0]["queries"][0]["token"] == "a"
    assert [place["token"] for place in found[0]["queries"][0]["layers"][0]["selected"]] == ["a"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--checkpoint", "nowhere"], "a directory with a config.json"),
        (
            ["--model", "v32", "--prompt", "a word"],
            "--prompt needs a tokenizer, but the random model has none. Use --prompt-ids",
        ),
        (["--prompt-ids", "1,x"], "--prompt-ids must be numbers joined by commas"),
        (["--prompt-ids", "1,256"], "--prompt-ids: token id 256 is outside the vocabulary (0-255)."),
        (
            ["--prompt", "<s> k7 v3 Hello k7"],
            "--prompt must be of the words <s>, </s>, k0 to k95, v0 to v63 and w0 to w93 for the tiny trained model, "
            "got 'Hello'; name a model that knows text with --checkpoint",
        ),
        (["--prompt-tokens", "0"], "--prompt-tokens must be >= 1"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be >= 1"),
        (["--backend", "nonesuch"], "--backend must be one of auto, hopper, triton, reference; got 'nonesuch'."),
        (["--backend", "triton"], "backend 'triton' needs a CUDA device, but "),
        (["--cache", "int4"], "--cache must be one of fp8, bf16, fp32; got 'int4'."),
        (["--prompt", "a", "--prompt-ids", "1"], "not allowed with"),
    ],
)
def test_wrong_input(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--device", "cpu", *options]) == 2
    found = capsys.readouterr()
    assert found.err.splitlines()[-1].startswith("tamis: error: ")
    assert message in found.err


def test_other_models_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert main(["generate", "--device", "cpu", "--checkpoint", str(tmp_path)]) == 2
    assert f"of a model of type {', '.join(names.MODELS)}, got 'llama'" in capsys.readouterr().err


def test_a_model_that_an_older_transformers_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generation, "transformers", SimpleNamespace(__version__="5.18.0"))
    assert main(["generate", "--device", "cpu", "--model", "axk2"]) == 2
    expected = "--model must be a model of transformers 5.18.0, got A.X-K2; install a newer transformers"
    assert expected in capsys.readouterr().err


def test_a_checkpoint_with_a_vision_tower(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generation.make_model("mistral-large4", torch.device("cpu"), 0).save_pretrained(tmp_path)
    assert main(["generate", "--checkpoint", str(tmp_path), *SHORT, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "MistralLarge4ForConditionalGeneration"


def test_a_checkpoint_without_weights_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers.DeepseekV32Config(**TINY).save_pretrained(tmp_path)
    assert main(["generate", "--device", "cpu", "--checkpoint", str(tmp_path)]) == 2
    assert "cannot be loaded" in capsys.readouterr().err


def test_without_transformers_the_command_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("tamis.integrations.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["generate", "--device", "cpu"]) == 2
    assert "pip install 'transformers>=5.18'" in capsys.readouterr().err


def test_a_transformers_that_is_too_old_is_refused_with_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Models of transformers 5.17 look for their mask under another name, and would fail inside their layers."""
    for name in [name for name in sys.modules if name.startswith("tamis.integrations.")]:
        monkeypatch.delitem(sys.modules, name)
    # Tests before this one may have imported transformers anew.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.17.0")
    assert main(["generate", "--device", "cpu"]) == 2
    assert "another version of transformers than 5.17.0: pip install 'transformers>=5.18'" in capsys.readouterr().err
