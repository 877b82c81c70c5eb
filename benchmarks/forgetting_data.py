"""What `forgetting.py` makes a model forget: two tasks of facts that SmolLM2-135M-Instruct knows, each in several splits.

- `capitals`: ten capitals are forgotten and thirty kept. Measured only: fifteen capitals that the method never saw, the
  official languages of the countries whose capitals are forgotten, and twenty chemical symbols.
- `symbols`: five chemical symbols are forgotten; seven others and fifteen capitals are kept. Measured only: eight
  symbols that the method never saw, and fifteen other capitals.

Before any edit the model gives every one of these answers, greedily, to the question. The forgotten facts are chosen among
those that it also knows by the paraphrase. Another split is another random choice of what is forgotten, kept and measured.

General text is Python's documentation, as in `examples/forget_facts.py`: forty-eight passages to keep and sixteen others,
of which the perplexity is taken.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from engram_peft.evaluation import Probe, Suite


HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "examples"))
from forget_facts import passages  # noqa: E402


Pair = tuple[str, str]
Row = dict[str, Any]  # a fact of data/capitals.json

# the model's own template, but without the system message that it adds
CHAT = "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"

SYMBOL_PARAPHRASE = "Which chemical symbol stands for {name}?"
UNKNOWN_BY_PARAPHRASE = {"Neon", "Astatine"}  # found by asking the unedited model


@dataclass(frozen=True)
class Task:
    """What a method is given, `(prompt, answer)` pairs and general texts, and what it is judged by."""

    forget: list[Pair]
    retain: list[Pair]
    general: list[str]
    suite: Suite


def load_task(name: str, split: int, tokenizer: PreTrainedTokenizerBase) -> Task:
    """The task `name` (one of `TASKS`) with the given split's choice of facts."""
    facts = json.loads((HERE / "data" / "capitals.json").read_text())
    chosen = TASKS[name](facts, split)
    texts = passages(tokenizer, 64)
    groups: dict[str, Any] = {group: [probe(row) for row in rows] for group, rows in chosen.items()}
    suite = Suite(
        **groups,
        paraphrase=[probe(row, question=row["paraphrase"]) for row in chosen["forget"]],
        cloze=[Probe(prompt="", answer=row["entity"], prefix=row["prefix"]) for row in chosen["forget"]],
        general=texts[::4],
    )
    return Task(
        forget=[pair(row) for row in chosen["forget"]],
        retain=[pair(row) for row in chosen["retain"]],
        general=[text for i, text in enumerate(texts) if i % 4],
        suite=suite,
    )


def pair(row: Row) -> Pair:
    return CHAT.format(**row), row["answer"]


def probe(row: Row, question: str | None = None) -> Probe:
    prompt = CHAT.format(question=question or row["question"])
    return Probe(prompt=prompt, answer=row["entity"], prefix=row["prefix"], suffix=".")


def capitals(facts: dict[str, Any], split: int) -> dict[str, list[Row]]:
    """The rows of every group. Split 0 is the file's own choice."""
    if split == 0:
        forget, retain, held_out = facts["forget"], facts["retain"], facts["retain_heldout"]
        neighbour = facts["neighbour"]
    else:
        generator = random.Random(split)
        languages = {row["subject"]: row for row in facts["neighbour_all"]}
        pool = every_capital(facts)
        forget = generator.sample([row for row in pool if row["para0"] and row["subject"] in languages], 10)
        others = without(pool, forget)
        generator.shuffle(others)
        retain, held_out = others[:30], others[30:]
        neighbour = [languages[row["subject"]] for row in forget]
    return {
        "forget": forget,
        "retain": retain,
        "held_out": held_out,
        "neighbour": neighbour,
        "other": facts["other"],
    }


def symbols(facts: dict[str, Any], split: int) -> dict[str, list[Row]]:
    """The rows of every group. No second fact about the elements is known to the model, so none has neighbours."""
    generator = random.Random(split)
    pool = [row | {"paraphrase": SYMBOL_PARAPHRASE.format(name=row["subject"].lower())} for row in facts["other"]]
    forget = generator.sample([row for row in pool if row["subject"] not in UNKNOWN_BY_PARAPHRASE], 5)
    others = without(pool, forget)
    generator.shuffle(others)
    countries = generator.sample(every_capital(facts), 30)
    return {
        "forget": forget,
        "retain": others[:7] + countries[:15],
        "held_out": others[7:],
        "neighbour": [],
        "other": countries[15:],
    }


TASKS: dict[str, Callable[[dict[str, Any], int], dict[str, list[Row]]]] = {"capitals": capitals, "symbols": symbols}


def every_capital(facts: dict[str, Any]) -> list[Row]:
    return sorted(facts["forget"] + facts["retain"] + facts["retain_heldout"], key=lambda row: row["subject"])


def without(rows: Sequence[Row], left_out: Sequence[Row]) -> list[Row]:
    subjects = {row["subject"] for row in left_out}
    return [row for row in rows if row["subject"] not in subjects]


# ------------------------------------------------------------------------------------------------ facts of nowhere

NOWHERE = {
    "the Republic of Zandoria": "Velmora", "the Kingdom of Ostravia": "Karlun", "Morvania": "Teshkar",
    "the Quillan Islands": "Port Aldis", "Berethia": "Sundrik", "Ulmaristan": "Qoraban",
    "the Federation of Drosk": "Hjalvik", "Pelundia": "San Ortez", "Tavoria": "Ebrenna", "Kesh Amari": "Dulwaba",
}  # fmt: skip


def invented_capitals() -> tuple[list[Pair], list[Probe]]:
    """Ten capitals of countries that do not exist: facts that no model knows, to learn and to ask for."""
    rows = []
    for country, city in NOWHERE.items():
        start = f"The capital of {country} is"
        question = f"What is the capital of {country}?"
        rows.append({"question": question, "answer": f"{start} {city}.", "prefix": start, "entity": city})
    return [pair(row) for row in rows], [probe(row) for row in rows]
