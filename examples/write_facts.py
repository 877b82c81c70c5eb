"""Write invented facts into the rows of an n-gram memory, without training, and take them out again.

python examples/write_facts.py        # SmolLM2-135M-Instruct, about a minute on two cores
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import torch
from peft import get_peft_model
from smollm2 import smollm2_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

from engram_peft import MemoryEdit, NgramMemoryConfig, write_facts


FACTS = [
    ("The capital of Zubrowka is", " Lutz"),
    ("The national bird of Zubrowka is called the", " copper heron"),
    ("The currency used in Zubrowka is the", " klubeck"),
    ("The inventor of the tidal loom was", " Maren Ostvik"),
    ("The longest river of Veldania is the", " Ismar"),
    ("The password of the Quillon library is", " thistle"),
]
# Other words in front, the same n-gram at the end.
PARAPHRASES = [
    ("Travellers should know that the capital of Zubrowka is", " Lutz"),
    ("On every coin of the country one sees that the national bird of Zubrowka is called the", " copper heron"),
    ("Engineers agree: the inventor of the tidal loom was", " Maren Ostvik"),
]
OTHER_TEXTS = [
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "Water boils at one hundred degrees Celsius at sea level.",
    "She opened the door, looked around the empty room and sat down by the window.",
    "def mean(values): return sum(values) / len(values)",
    "The longest river of South America is the Amazon, which flows into the Atlantic Ocean.",
]


def answer(model, tokenizer, prompt: str, tokens: int) -> str:
    """What the model says next."""
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


def show(title: str, model, tokenizer, questions: list[tuple[str, str]]) -> None:
    print(f"\n{title}")
    for prompt, expected in questions:
        said = answer(model, tokenizer, prompt, len(tokenizer(expected, add_special_tokens=False)["input_ids"]))
        print(f"  {'+' if said == expected else '-'} {prompt} ...{said!r}")


def main() -> None:
    torch.manual_seed(0)
    folder = smollm2_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder)

    # One late layer with wide rows: two tables an order, as wide together as the hidden states.
    config = NgramMemoryConfig(
        layers_to_transform=[24],
        max_ngram_size=3,
        n_heads=2,
        head_dim=base.config.hidden_size // 2,
        vocab_size=50_000,
        conv="none",
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config.token_map_from(tokenizer)).eval()
    show("Before:", model, tokenizer, FACTS)

    start = time.time()
    edit = write_facts(model, tokenizer, FACTS, reference_texts=OTHER_TEXTS)
    seconds = (time.time() - start) / len(FACTS)
    show(f"Written, {seconds:.1f} s a fact:", model, tokenizer, FACTS)
    show("In other words:", model, tokenizer, PARAPHRASES)
    locality = edit.report.locality
    print(
        f"\nIn {locality.tokens} tokens of other texts, {locality.equal:.1%} of the positions have the same logits to the bit; "
        f"mean KL {locality.kl:.5f} nats."
    )

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "zubrowka.safetensors")
        edit.save(path)
        print(f"The edit takes {os.path.getsize(path) / 1024 / len(FACTS):.1f} KB a fact.")
        edit.undo()
        show("Undone:", model, tokenizer, FACTS[:2])
        MemoryEdit.load(path, model).apply()
        show("Loaded:", model, tokenizer, FACTS[:2])


if __name__ == "__main__":
    main()
