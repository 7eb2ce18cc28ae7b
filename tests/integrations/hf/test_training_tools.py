"""Attached models in the programs that people train with: PEFT, Trainer, accelerate, torch.compile and FSDP2."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bounds import relative_error
from hf_models import V4_KINDS, logits, tokens, transformers
from hf_training import SEPARATE, assert_agree, assert_same, batches, shared, step, trainable
from rank_processes import run_on_ranks
from ranks_training import CASES, DATA_PARALLEL, all_sharded, data_parallel

from tamis.integrations.hf.train_step import Sight
from tamis.integrations.transformers import (
    attach,
    detach,
    index_losses,
    indexer_parameters,
    is_attached,
    recording,
    replaying,
)
from tamis.layers.recording import Recording

peft = pytest.importorskip("peft")
accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.own_settings("the models' own")
IDS = tokens(2, 48)
ATTENTION = ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
INDEXER = ["wq_b", "wk", "weights_proj"]
V4 = ["q_a_proj", "kv_proj", "gate_proj", "o_b_proj"]


def adapted(name: str, targets: list[str], **options: Any) -> Any:
    """A model with adapters that change its results from the start."""
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **options)
    return peft.get_peft_model(trainable(name), config)  # the generator starts anew with every model


@pytest.mark.parametrize(
    ("name", "targets"),
    [("v32", ATTENTION), ("v4", V4), ("axk2", ["q_gate_proj", "kv_b_proj"]), ("mistral-large4", ["kv_b_proj"])],
)
def test_adapters_get_the_untouched_models_gradients(name: str, targets: list[str]) -> None:
    model = adapted(name, targets)
    loss, expected = step(model, input_ids=IDS, labels=IDS)
    model.eval()
    before = logits(model, IDS)
    attach(model, train=True, cache="fp32", deterministic=False)
    assert is_attached(model)
    found_loss, found = step(model, input_ids=IDS, labels=IDS)
    assert relative_error(found_loss, loss) < 1e-6
    assert {name for name, gradient in found.items() if gradient is not None} == {
        name for name in found if "lora_" in name and ".indexer." not in name
    }
    assert_agree(found, expected)
    assert relative_error(logits(model.eval(), IDS), before) < 1e-4  # pages serve the adapters too
    model.train()
    model.gradient_checkpointing_enable()
    assert_same(step(model, input_ids=IDS, labels=IDS)[1], found)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                parameter.mul_(2.0)
    served = logits(model.eval(), IDS)
    detach(model)
    assert relative_error(served, logits(model, IDS)) < 1e-4  # what is served follows an optimizer's step


def test_adapters_of_the_indexer_learn() -> None:
    model = adapted("v32", INDEXER)
    attach(model, train=True, indexer="sparse", deterministic=False)
    _, found = step(model, input_ids=IDS, labels=IDS)
    learnt = {name for name, gradient in found.items() if gradient is not None}
    assert learnt == {name for name in indexer_parameters(model) if "lora_" in name}
    assert len(learnt) == 2 * len(INDEXER) * 3


def test_adapters_may_come_after_attaching() -> None:
    expected = step(adapted("v32", ATTENTION), input_ids=IDS, labels=IDS)
    model = trainable("v32")
    attach(model, train=True, deterministic=False)
    config = peft.LoraConfig(r=4, target_modules=ATTENTION, init_lora_weights=False)
    found = step(peft.get_peft_model(model, config), input_ids=IDS, labels=IDS)
    assert relative_error(found[0], expected[0]) < 1e-6
    assert_agree(found[1], expected[1])


def test_dropout_on_absorbed_adapters_is_refused() -> None:
    model = adapted("v32", ATTENTION, lora_dropout=0.1)
    attach(model, train=True, deterministic=False)
    with pytest.raises(ValueError, match=r"kv_b_proj\.lora_dropout.*without dropout.*set lora_dropout=0"):
        step(model, input_ids=IDS, labels=IDS)
    model.eval()
    assert torch.isfinite(logits(model, IDS)).all()  # there is no dropout in evaluation
    other = adapted("v32", ["q_b_proj", "o_proj"], lora_dropout=0.1)
    attach(other, train=True, deterministic=False)
    step(other, input_ids=IDS, labels=IDS)  # dropout of tokens is no concern of attention


def trained(folder: Path, accumulation: int, **options: Any) -> dict[str, torch.Tensor]:
    """The parameters of a model after two steps of Trainer over eight rows."""
    model = trainable("v32", num_hidden_layers=2)
    attach(model, train=True, indexer="sparse", deterministic=False)
    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=8 // accumulation,
        gradient_accumulation_steps=accumulation,
        max_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    rows = [{"input_ids": row, "labels": row} for row in tokens(8, 40)]
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:2])
    trainer.train()
    assert index_losses(model).keys() == {0, 1}
    assert trainer.evaluate()["eval_loss"] > 0
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_trainer_accumulates_the_same_gradient(tmp_path: Path) -> None:
    start = dict(trainable("v32", num_hidden_layers=2).named_parameters())
    whole = trained(tmp_path, 1)
    parts = trained(tmp_path, 4, gradient_checkpointing=True)
    for name, value in whole.items():
        moved = value - start[name].detach()
        if bool(moved.any()):
            assert relative_error(parts[name] - start[name].detach(), moved) < 1e-3, name  # of the step, not the value
    assert all(bool((whole[name] != start[name]).any()) for name in whole if name.endswith("indexer.wq_b.weight"))


def test_accelerate_prepares_an_attached_model() -> None:
    model = trainable("v32", num_hidden_layers=1)
    attach(model, train=True, indexer="sparse", deterministic=False)
    loss, expected = step(model, input_ids=IDS, labels=IDS)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found_loss = prepared(IDS, labels=IDS).loss
    accelerator.backward(found_loss)
    assert torch.equal(found_loss.detach(), loss)
    assert_same({name: parameter.grad for name, parameter in model.named_parameters()}, expected)
    optimizer.step()
    with torch.autocast("cpu", torch.bfloat16):
        rounded, _ = step(model, input_ids=IDS, labels=IDS)
    assert relative_error(rounded, step(model, input_ids=IDS, labels=IDS)[0]) < 1e-2


def test_fullgraph_compilation_gives_the_same_bits() -> None:
    """Traced by Dynamo and AOTAutograd; the code that Inductor would generate is torch's own."""
    model = trainable("v32", num_hidden_layers=1, first_k_dense_replace=1)
    attach(model, train=True, indexer="sparse", deterministic=False)
    inputs = batches(48)["left"]
    loss, expected = step(model, **inputs)
    losses = index_losses(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found_loss = compiled(**inputs).loss
    found_loss.backward()
    assert torch.equal(found_loss.detach(), loss)
    assert_same({name: parameter.grad for name, parameter in model.named_parameters()}, expected)
    assert index_losses(model) == losses


def test_fullgraph_compilation_of_v4_finds_spans_on_the_device() -> None:
    """Packed sequences have fewer entries than a trace makes room for: only sums over all entries have other bits."""
    kinds = {"num_hidden_layers": 2, "layer_types": list(V4_KINDS[1:]), "mlp_layer_types": ["moe"] * 2}
    model = trainable("v4", **kinds)
    model.set_experts_implementation("batched_mm")  # torch cannot trace the backward pass of the default on a CPU
    attach(model, train=True, indexer="sparse", deterministic=False)
    inputs = batches(50)["packed"]
    loss, expected = step(model, **inputs)
    losses = index_losses(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found_loss = compiled(**inputs).loss
    found_loss.backward()
    assert relative_error(found_loss.detach(), loss) < 1e-6
    assert_agree({name: parameter.grad for name, parameter in model.named_parameters()}, expected, but="")
    assert index_losses(model) == {layer: pytest.approx(value, rel=1e-5) for layer, value in losses.items()}


@pytest.mark.parametrize("batch", ["whole", "left", "right", "packed", "both"])
def test_a_trace_finds_what_tokens_see_without_host_values(batch: str) -> None:
    given = batches(30)["packed" if batch == "both" else batch]
    mask, position_ids = given.get("attention_mask"), given.get("position_ids")
    if batch == "both":
        mask = (torch.arange(30) >= torch.tensor([[0], [4]])).long()
    host, traced = (make(2, 30, mask, position_ids, torch.device("cpu")) for make in (Sight.of, Sight._traced))
    seen = host.ends - host.starts
    assert torch.equal(traced.ends - traced.starts, seen)
    assert torch.equal(traced.starts[seen > 0], host.starts[seen > 0])
    assert int(traced.real) == host.real
    assert traced.longest >= host.longest


def test_memory_of_a_long_step() -> None:
    """At most an eighth of the untouched model's at 16384 tokens.

    The untouched model must hold its mask and the attention weights of 8 heads, all of tokens by tokens in float32. The
    attached one is measured at a size that a test can afford, and scaled in proportion.
    """
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("peaks are read from Linux's /proc")
    program = Path(__file__).parents[2] / "support" / "hf_memory.py"
    run = subprocess.run([sys.executable, str(program), "trained", "4096"], check=True, capture_output=True, text=True)
    assert int(run.stdout) * 16384 / 4096 < (1 + 8) * 4 * 16384**2 / 8


def test_fully_sharded_layers_have_the_whole_models_gradients(tmp_path: Path) -> None:
    for found, refused, evaluated in run_on_ranks(2, all_sharded, tmp_path):
        assert len(found) == len(CASES)
        assert max(found.values()) < SEPARATE, found
        assert "call model.gradient_checkpointing_enable()" in refused
        assert [one for one, _ in evaluated] == [other for _, other in evaluated]


def test_data_parallel_ranks_have_the_whole_models_gradients(tmp_path: Path) -> None:
    for found, names, refused in run_on_ranks(2, data_parallel, tmp_path):
        assert len(found) == len(DATA_PARALLEL)
        assert max(found.values()) < SEPARATE, found
        assert names == {0, 1}
        assert "model must be the model itself, got DistributedDataParallel; attach the model inside it" in refused


@pytest.fixture
def model() -> Iterator[Any]:
    found = shared("v32")
    yield found
    detach(found)
    found.gradient_checkpointing_disable()
    found.requires_grad_(True)


def test_wrong_calls_are_refused_by_name(model: Any) -> None:
    attach(model, train=True)
    model.train()
    for message, inputs in {
        "input_ids must be of at least one request and one token, got .2, 0.": {"input_ids": IDS[:, :0]},
        "input_ids must be of shape": {"input_ids": IDS[0]},
        "given one at a time, got both": {"input_ids": IDS, "inputs_embeds": torch.zeros(2, 48, 64)},
        "position_ids must be of shape": {"input_ids": IDS, "position_ids": torch.arange(47).unsqueeze(0)},
        "output_attentions must be False": {"input_ids": IDS, "output_attentions": True},
    }.items():
        with pytest.raises(ValueError, match=message):
            model(**inputs)
    kept = Recording(topk=32)
    with recording(model, kept, ["a", "b"]):
        with pytest.raises(ValueError, match=r"recording must be of .*, got one with gradients; .*torch.no_grad"):
            model(IDS)
        with torch.no_grad():
            model(IDS)
            with pytest.raises(ValueError, match="got one with packed sequences"):
                model(IDS, position_ids=torch.arange(48).remainder(24).expand(2, -1))
    with replaying(model, kept, ["a", "b"]), pytest.raises(ValueError, match="generate outside of replaying"):
        model.generate(IDS, max_new_tokens=2)


def test_who_learns_may_not_change_after_attaching() -> None:
    """PEFT freezes indexers too, which then would not learn without an error."""
    model = trainable("v32", num_hidden_layers=1)
    attach(model, train=True, indexer="sparse")
    adapted_later = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=ATTENTION))
    with pytest.raises(ValueError, match="one whose indexers require gradients for indexer='sparse', got none"):
        adapted_later.train()(IDS, labels=IDS)
    other = trainable("v32", num_hidden_layers=1)
    own = set(indexer_parameters(other))
    for name, parameter in other.named_parameters():
        parameter.requires_grad_(name in own)
    attach(other, train=True, indexer="warmup")
    other(IDS, labels=IDS)
    other.model.norm.requires_grad_(True)
    with pytest.raises(ValueError, match="indexers alone require gradients in the warm-up, got 1 other parameters"):
        other(IDS, labels=IDS)


def test_what_wraps_a_model_is_seen_through(model: Any) -> None:
    wrapped = torch.nn.DataParallel(model)
    for outside in (wrapped, torch.compile(model), torch.compile(wrapped)):
        with pytest.raises(ValueError, match=r"model must be the model itself, got .*; attach the model inside it"):
            attach(outside, train=True)
    attach(model, train=True, indexer="sparse")
    assert is_attached(wrapped)
    assert is_attached(torch.compile(wrapped))
    model(IDS, labels=IDS)
    assert index_losses(wrapped).keys() == {0, 1, 2}
    detach(wrapped)
    assert not is_attached(model)


def test_what_cannot_work_is_refused_by_name(model: Any) -> None:
    attach(model, train=True)
    model.train().gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="use_reentrant must be False"):
        model(IDS, labels=IDS)
    model.gradient_checkpointing_disable()
    with pytest.raises(ValueError, match="past_key_values must be None in training"):
        model(IDS, past_key_values=transformers.DynamicCache())
    with pytest.raises(ValueError, match=r"attention_mask must be of shape \[2, 48\]"):
        model(IDS, attention_mask=torch.ones(2, 1, 48, 48))
    with pytest.raises(ValueError, match="one run of real tokens per row"):
        model(IDS, attention_mask=torch.arange(48).expand(2, -1) % 3)
    weight = model.model.layers[1].self_attn.kv_b_proj.weight
    weight.ds_id = 7  # as DeepSpeed marks what it has partitioned
    try:
        with pytest.raises(ValueError, match=r"DeepSpeed ZeRO-3.*fully_shard"):
            model(IDS, labels=IDS)
        detach(model)
        with pytest.raises(ValueError, match="DeepSpeed ZeRO-3"):
            attach(model, train=True)
    finally:
        del weight.ds_id
    with pytest.raises(ValueError, match="indexer must be one of 'frozen', 'warmup', 'sparse'"):
        attach(model, train=True, indexer="dense")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="index_loss"):
        attach(model, train=True, indexer="sparse", index_loss=-1.0)
    with pytest.raises(ValueError, match="teachers must be one of 'own', 'readers'"):
        attach(model, train=True, teachers="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"indexers alone require gradients in the warm-up, got \d+ other parameters"):
        attach(model, train=True, indexer="warmup")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".indexer." not in name)
    with pytest.raises(ValueError, match="one whose indexers require gradients for indexer='sparse'"):
        attach(model, train=True, indexer="sparse")
    with pytest.raises(ValueError, match="attached for training"):
        index_losses(model)
    model.config.attention_dropout = 0.1
    try:
        with pytest.raises(ValueError, match="attention_dropout must be 0"):
            attach(model, train=True)
    finally:
        model.config.attention_dropout = 0.0
    assert not is_attached(model)
