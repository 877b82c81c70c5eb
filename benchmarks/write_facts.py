"""A hundred invented facts written into SmolLM2-135M-Instruct: into rows of a memory, in closed form, or by training a LoRA adapter.

    python benchmarks/write_facts.py               # minutes
    python benchmarks/write_facts.py --facts 10    # a quick look

Success is that greedy decoding gives the whole answer, to the prompt and to a paraphrase that ends in the same n-gram. Locality is
measured on passages of Python's documentation and on questions about real countries: the share of positions whose logits stay the
same to the bit, and the mean Kullback-Leibler divergence of the next token from what it was. Seconds are CPU seconds.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from engram_peft import NgramMemoryConfig, write_facts


sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from common import load_model, load_tokenizer  # noqa: E402
from forget_facts import KEEP, passages  # noqa: E402


RESULTS = Path(__file__).parent / "results" / "write_facts.md"
Fact = tuple[str, str]
RELATIONS = ("capital", "ruler", "river", "national dish", "largest island")
STARTS = ("Zu", "Vel", "Kar", "Oth", "Mir", "Bel", "Tos", "Qua", "Gre", "Lun", "Har", "Pel")
MIDDLES = ("bro", "dan", "ska", "mon", "ril", "ve", "tha", "nor", "pi", "gul")
ENDS = ("wka", "nia", "stan", "mark", "dor", "via", "mor", "lund", "quay", "zia")
PARAPHRASE = "Travellers who have been there report that the {relation} of {country} is"
LORA_STEPS = 60


def invented_facts(tokenizer: PreTrainedTokenizerBase, count: int) -> tuple[list[Fact], list[Fact]]:
    """Facts about countries that do not exist, no two with the same three tokens at the end; and each in other words."""
    generator = random.Random(0)
    facts, paraphrases, triggers = [], [], set()
    while len(facts) < count:
        country, answer = (
            "".join(generator.choice(part) for part in (STARTS, MIDDLES, ENDS)),
            " " + generator.choice(STARTS) + generator.choice(MIDDLES),
        )
        relation = generator.choice(RELATIONS)
        prompt = f"The {relation} of {country} is"
        trigger = tuple(tokenizer(prompt)["input_ids"][-3:])
        if trigger not in triggers:
            triggers.add(trigger)
            facts.append((prompt, answer))
            paraphrases.append((PARAPHRASE.format(relation=relation, country=country), answer))
    return facts, paraphrases


@torch.inference_mode()
def answered(model: Any, tokenizer: PreTrainedTokenizerBase, facts: Sequence[Fact]) -> float:
    """The share of facts whose answer is the likeliest continuation, token by token."""
    right = 0
    for prompt, answer in facts:
        given = tokenizer(prompt)["input_ids"]
        expected = tokenizer(answer, add_special_tokens=False)["input_ids"]
        logits = model(input_ids=torch.tensor([[*given, *expected]])).logits[0, len(given) - 1 : -1]
        right += logits.argmax(-1).tolist() == expected
    return right / len(facts)


@torch.inference_mode()
def all_logits(model: Any, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[torch.Tensor]:
    return [model(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).logits[0] for text in texts]


def locality(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> tuple[float, float]:
    """The share of positions that are equal to the bit, and the mean divergence in nats."""
    old, new = torch.cat(list(before)), torch.cat(list(after))
    equal = (old == new).all(-1).float().mean().item()
    p, q = old.log_softmax(-1), new.log_softmax(-1)
    return equal, (p.exp() * (p - q)).sum(-1).mean().item()


def train_lora(model: Any, tokenizer: PreTrainedTokenizerBase, facts: Sequence[Fact], goal: float) -> Any:
    """LoRA trained on the facts, until as many are answered."""
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    rows = [(tokenizer(p)["input_ids"], tokenizer(a, add_special_tokens=False)["input_ids"]) for p, a in facts]
    for step in range(LORA_STEPS):
        chosen = [rows[i] for i in torch.randperm(len(rows), generator=generator)[:25]]
        ids = pad_sequence([torch.tensor(p + a) for p, a in chosen], batch_first=True)
        labels = torch.full_like(ids, -100)
        for row, (prompt, answer) in enumerate(chosen):
            labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        model.train()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        if step % 10 == 9 and answered(model, tokenizer, facts) >= goal:
            break
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--facts", type=int, default=100)
    parser.add_argument("--no-lora", dest="lora", action="store_false", help="leave the rival out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer, base = load_tokenizer(None), load_model(None)
    facts, paraphrases = invented_facts(tokenizer, options.facts)
    texts = [
        *passages(tokenizer, 16),
        *(f"The capital of {country} is {capital}." for country, capital in KEEP.items()),
    ]
    config = NgramMemoryConfig(
        task_type="CAUSAL_LM",
        layers_to_transform=[24],
        n_heads=1,
        head_dim=576,
        vocab_size=[1_000, 400_000],
        conv="none",
    )
    model = get_peft_model(base, config.token_map_from(tokenizer)).eval()
    before = all_logits(model, tokenizer, texts)
    rows = []

    started = time.process_time()
    edit = write_facts(model, tokenizer, facts, target_probability=0.97, batch_size=32)
    seconds = (time.process_time() - started) / len(facts)
    success = answered(model, tokenizer, facts)
    equal, divergence = locality(before, all_logits(model, tokenizer, texts))
    with tempfile.TemporaryDirectory() as folder:
        edit.save(Path(folder, "edit.safetensors"))
        kilobytes = Path(folder, "edit.safetensors").stat().st_size / 1024 / len(facts)
    said = answered(model, tokenizer, paraphrases)
    rows.append(("engram_peft, write_facts", success, said, equal, divergence, seconds, kilobytes))
    print(rows[-1], flush=True)
    edit.undo()
    undone = all(map(torch.equal, before, all_logits(model, tokenizer, texts)))

    if options.lora:
        base = load_model(None)
        started = time.process_time()
        model = train_lora(base, tokenizer, facts, success)
        seconds = (time.process_time() - started) / len(facts)
        equal, divergence = locality(before, all_logits(model, tokenizer, texts))
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            kilobytes = Path(folder, "adapter_model.safetensors").stat().st_size / 1024 / len(facts)
        scores = answered(model, tokenizer, facts), answered(model, tokenizer, paraphrases)
        rows.append(("LoRA, rank 8", *scores, equal, divergence, seconds, kilobytes))
        print(rows[-1], flush=True)

    lines = [
        f"| {name} | {s:.2f} | {p:.2f} | {e:.1%} | {d:.5f} | {t:.2f} | {k:.1f} |" for name, s, p, e, d, t, k in rows
    ]
    text = "\n".join(
        [
            "# Facts written",
            "",
            f"{len(facts)} invented facts, SmolLM2-135M-Instruct, float32, one thread. Side effects on {sum(map(len, before)):,} tokens of "
            "documentation and of sentences about real capitals.",
            "",
            "| | answers | paraphrases | positions equal to the bit | KL, nats | CPU s a fact | KB a fact |",
            "|---|---|---|---|---|---|---|",
            *lines,
            "",
            f"After `edit.undo()` all logits are {'as before to the bit' if undone else 'NOT as before'}.",
            "",
            f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}. Load of the machine at the end: "
            f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.",
            "",
        ]
    )
    print(text)
    RESULTS.write_text(text)


if __name__ == "__main__":
    main()
