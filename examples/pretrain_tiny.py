"""Trains a small language model with an n-gram memory from scratch, on the documentation that comes with Python.

    python examples/pretrain_tiny.py              # a few minutes on two cores
    python examples/pretrain_tiny.py --steps 50   # a quick look

Nothing is downloaded: the text is the language reference in `pydoc_data` and the docstrings of the standard library, and the
tokenizer is made from it. Prints the loss on documents held out, with and without the memory, a continuation, and how large
what was saved is.
"""

from __future__ import annotations

import argparse
import ast
import math
import pydoc_data.topics
import random
import sysconfig
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

from engram_peft.models.engram import EngramForCausalLM, EngramLMConfig
from engram_peft.training import create_optimizer


LENGTH = 128  # tokens in a training sequence
PROMPT = "The for statement is used to"


def python_documentation() -> list[str]:
    """Every topic of the language reference and every docstring of the standard library of some length, each once."""
    texts = list(pydoc_data.topics.topics.values())
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        if {"site-packages", "test", "tests"} & set(path.relative_to(library).parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue  # some files are there to be wrong
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                texts.append(ast.get_docstring(node) or "")
    return list(dict.fromkeys(text for text in texts if len(text) > 80))


def new_tokenizer(texts: list[str], vocab_size: int = 2048) -> PreTrainedTokenizerFast:
    """A byte-level BPE of these texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


def token_blocks(tokenizer: PreTrainedTokenizerBase, texts: list[str], length: int = LENGTH) -> torch.Tensor:
    """The texts one after the other, each ended by `<eos>`, cut into sequences `(sequences, length)`."""
    ids = [token for text in tokenizer(texts)["input_ids"] for token in (*text, tokenizer.eos_token_id)]
    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)


def split_documentation(held_out: int = 200) -> tuple[list[str], list[str]]:
    """Texts to train on, in random order, and others."""
    texts = python_documentation()
    random.Random(0).shuffle(texts)
    return texts[held_out:], texts[:held_out]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    set_seed(0)
    training_texts, other_texts = split_documentation()
    tokenizer = new_tokenizer(training_texts)
    training, others = (
        [{"input_ids": ids, "labels": ids} for ids in token_blocks(tokenizer, texts)]
        for texts in (training_texts, other_texts)
    )
    print(f"{len(training) * LENGTH:,} tokens to train on, {len(others) * LENGTH:,} held out")

    backbone = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=256, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    config = EngramLMConfig.from_backbone(
        backbone,
        tokenizer=tokenizer,
        engram_layer_ids=[1],
        engram_n_heads=4,
        engram_head_dim=16,
        engram_vocab_size=50_000,
    )
    model = EngramForCausalLM(config)
    tables = sum(memory.table.weight.numel() for memory in model.memories.values())
    print(f"{model.num_parameters() - tables:,} parameters that every token uses, {tables:,} in tables")

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=16, per_device_eval_batch_size=16, use_cpu=True,
            lr_scheduler_type="cosine", warmup_steps=min(20, steps // 10), logging_steps=50, save_strategy="no", report_to=[],
        )  # fmt: skip
        optimizer = create_optimizer(model, lr=4e-3, row_wise=True)
        trainer = Trainer(model, arguments, train_dataset=training, eval_dataset=others, optimizers=(optimizer, None))
        trainer.train()
        with_memory = trainer.evaluate()["eval_loss"]
        without = Trainer(model.backbone, arguments, eval_dataset=others).evaluate()["eval_loss"]
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        loaded = AutoModelForCausalLM.from_pretrained(folder)

    print(f"\nPerplexity held out: {math.exp(with_memory):.1f}; with the memory turned off, {math.exp(without):.1f}")
    touched = [memory.table.weight.ne(0).any(1).float().mean().item() for memory in model.memories.values()]
    print(f"{touched[0]:.0%} of the rows were read in training; {size / 2**20:.0f} MB saved")
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    continuation = loaded.generate(ids, max_new_tokens=40, do_sample=False)
    assert torch.equal(continuation, model.eval().generate(ids, max_new_tokens=40, do_sample=False))
    print(f"\n{tokenizer.decode(continuation[0])}")


if __name__ == "__main__":
    main()
