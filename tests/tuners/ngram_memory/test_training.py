"""Training an adapter: with Trainer and TRL, beside LoRA, on quantised backbones, in several processes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments, default_data_collator

from engram_peft.memory import NgramTable
from engram_peft.memory.collator import NgramRowsCollator
from engram_peft.training import create_optimizer

from ...models.engram.tiny import VOCAB_SIZE, backbone, logits, token_ids
from .adapters import memories_of, memory_config, same, tensors


def dataset() -> Dataset:
    ids = token_ids(8, 10).tolist()
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def arguments(folder, **changes) -> TrainingArguments:
    options = {"max_steps": 4, "per_device_train_batch_size": 2, "save_strategy": "no", "use_cpu": True, "seed": 1}
    return TrainingArguments(
        str(folder),
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        lr_scheduler_type="constant",
        **{**options, **changes},
    )


def fresh(**config) -> PeftModel:
    """An adapter that says nothing yet."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return get_peft_model(backbone("llama"), memory_config(**config))


def train(model, folder, data_collator=default_data_collator, resume=None, **changes) -> Trainer:
    optimizer = create_optimizer(model, lr=1e-2)
    trainer = Trainer(
        model,
        arguments(folder, **changes),
        train_dataset=dataset(),
        data_collator=data_collator,
        optimizers=(optimizer, None),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer_trains_the_memory_and_nothing_else(checkpointing, tmp_path):
    model = fresh()
    before = tensors(model)
    changes = {"gradient_checkpointing": True} if checkpointing else {}
    trainer = train(model, tmp_path, max_steps=8, **changes)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    after = tensors(model)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed and all("ngram_memory_layer" in name for name in changed)

    # a text that holds no n-gram of the training texts is as it was, to the bit
    strange = torch.arange(90, 98)[None]
    seen = {tuple(row[i : i + 2].tolist()) for row in token_ids(8, 10) for i in range(9)}
    assert not seen & {(i, i + 1) for i in range(90, 97)}
    read = [_rows(memory, model, strange) for memory in memories_of(model)]
    if not any(memory.table.weight[rows].any() for memory, rows in zip(memories_of(model), read, strict=True)):
        assert torch.equal(logits(model.eval(), strange), logits(backbone("llama"), strange))


def _rows(memory, model, ids) -> torch.Tensor:
    found = []
    handle = memory.hash.register_forward_hook(lambda module, args, rows: found.append(rows + memory.table.offsets))
    logits(model.eval(), ids)
    handle.remove()
    return found[0].flatten()


def test_rows_from_the_collator_train_alike(tmp_path):
    one, other = fresh(), fresh()
    train(one, tmp_path / "one")
    collator = NgramRowsCollator(default_data_collator, memories_of(other)[0].spec, VOCAB_SIZE)
    train(other, tmp_path / "other", data_collator=collator)
    assert same(tensors(other), tensors(one))


def test_a_resumed_run_is_the_run_that_was_not_interrupted(tmp_path):
    whole = fresh()
    train(whole, tmp_path / "whole", max_steps=4)
    train(fresh(), tmp_path / "part", max_steps=2, save_strategy="steps", save_steps=2)
    resumed = fresh()
    train(resumed, tmp_path / "part", max_steps=4, resume=str(tmp_path / "part" / "checkpoint-2"))
    assert same(tensors(resumed), tensors(whole))


@pytest.mark.filterwarnings(
    "ignore:You are trying to modify a model with PEFT", "ignore:Already found a `peft_config`"
)
def test_it_is_trained_beside_lora(tmp_path):
    lora = get_peft_model(
        backbone("llama"), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]), adapter_name="style"
    )
    model = get_peft_model(lora, memory_config(), adapter_name="facts")
    before = tensors(model)
    train(model, tmp_path)
    after = tensors(model)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert {"lora_" in name for name in changed} == {True, False}
    assert all("lora_" in name or "ngram_memory_layer" in name for name in changed)


def test_trl_trains_it_from_a_config(tmp_path, tiny_tokenizer):
    import trl

    tokenizer = tiny_tokenizer()
    texts = Dataset.from_dict(
        {"text": ["the capital of france is paris .", "the queen of england lived in london ."] * 4}
    )
    options = trl.SFTConfig(
        str(tmp_path), max_steps=3, per_device_train_batch_size=2, report_to=[], disable_tqdm=True, use_cpu=True,
        save_strategy="no", packing=False, max_length=16, learning_rate=1e-2, gradient_checkpointing=False,
    )  # fmt: skip
    config = memory_config("deepseek", compressed_vocab_size=None).token_map_from(tokenizer)
    trainer = trl.SFTTrainer(
        backbone("llama"), options, train_dataset=texts, processing_class=tokenizer, peft_config=config
    )
    trainer.train()
    (first, *_) = memories_of(trainer.model)
    assert first.table.weight.any()


@pytest.mark.parametrize("kind", ["8bit", "nf4"])
def test_a_quantised_backbone_is_trained_and_decodes(kind, tmp_path):
    backbone("llama", hidden_size=64, intermediate_size=64, head_dim=16).save_pretrained(tmp_path / "base")
    if kind == "8bit":
        quantisation = BitsAndBytesConfig(load_in_8bit=True)
    else:
        quantisation = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )

    def load():
        return AutoModelForCausalLM.from_pretrained(
            tmp_path / "base", quantization_config=quantisation, device_map="cpu"
        )

    ids = token_ids(2, 8)
    base = load()
    expected = logits(base.eval(), ids)
    model = get_peft_model(prepare_model_for_kbit_training(base, use_gradient_checkpointing=False), memory_config())
    assert torch.equal(logits(model.eval(), ids), expected)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        model.train()(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = logits(model.eval(), ids)
    assert not torch.equal(trained, expected)
    if kind == "nf4":  # in int8, activations are rounded too, and steps differ from one pass without any memory
        options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        out = model.generate(input_ids=ids, **options)
        full = logits(model, out.sequences)[:, ids.shape[1] - 1 : -1]
        torch.testing.assert_close(torch.stack(out.logits, dim=1), full, rtol=0, atol=1e-5)
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(prepare_model_for_kbit_training(load(), False), tmp_path / "adapter").eval()
    assert torch.equal(logits(again, ids), trained)


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    """Sparse gradients are averaged by DistributedDataParallel."""
    script = tmp_path / "worker.py"
    script.write_text(_WORKER)
    processes = [
        subprocess.Popen([sys.executable, str(script), str(rank), str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    sums = [json.loads(process.communicate(timeout=300)[0].splitlines()[-1]) for process in processes]
    assert sums[0] == sums[1]
    model, ids = fresh().train(), token_ids(4, 8)
    optimizer = create_optimizer(model, lr=1e-2)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tables = [module.weight.double().sum().item() for module in model.modules() if isinstance(module, NgramTable)]
    assert sums[0] == pytest.approx(tables, rel=1e-3)


_WORKER = """
import json, os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from engram_peft.memory import NgramTable
from engram_peft.training import create_optimizer
from tests.models.engram.tiny import token_ids
from tests.tuners.ngram_memory.test_training import fresh

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
model = fresh().train()
optimizer = create_optimizer(model, lr=1e-2)
parallel = DistributedDataParallel(model)
ids = token_ids(4, 8)[2 * rank : 2 * rank + 2]
for _ in range(2):
    parallel(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(json.dumps([module.weight.double().sum().item() for module in model.modules() if isinstance(module, NgramTable)]))
dist.destroy_process_group()
"""
