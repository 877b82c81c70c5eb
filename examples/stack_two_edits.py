"""Forgets two kinds of facts in two adapters, one after the other, and makes one file of both.

    python examples/stack_two_edits.py        # SmolLM2-135M-Instruct, a few minutes on two cores

The first adapter takes out capitals; the second one is made beside it and takes out chemical symbols. Prints, for each set of
active adapters, how likely the model names the forgotten and the kept facts on average. `add_weighted_adapter` joins both
exactly; the sum is saved (`two-edits/`), loaded into a fresh model, and gives back a fact of either adapter by its name.
"""

from __future__ import annotations

from pathlib import Path

import torch
from common import Chat, command_line, load_model, load_tokenizer, messages
from forget_facts import KEEP, chat, passages, recall
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engram_peft import unlearn
from engram_peft.evaluation import Probe, score_probes


CAPITALS = {"Japan": "Tokyo", "Thailand": "Bangkok", "Uruguay": "Montevideo"}
SYMBOLS = {"gold": "Au", "iron": "Fe", "sodium": "Na"}
KEPT_SYMBOLS = {"silver": "Ag", "tin": "Sn", "copper": "Cu", "zinc": "Zn", "potassium": "K", "nitrogen": "N"}


def symbol_chat(element: str, symbol: str) -> Chat:
    return messages(f"What is the chemical symbol for {element}?", f"The chemical symbol for {element} is {symbol}.")


def symbol_recall(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, symbols: dict[str, str]) -> float:
    """How likely the model names chemical symbols, on average."""
    probes = [
        Probe(symbol_chat(element, "")[:1], symbol, prefix=f"The chemical symbol for {element} is", suffix=".")
        for element, symbol in symbols.items()
    ]
    return sum(score.probability for score in score_probes(model, tokenizer, probes)) / len(probes)


def print_row(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    means = [recall(model, tokenizer, facts).mean for facts in (CAPITALS, KEEP)]
    means += [symbol_recall(model, tokenizer, symbols) for symbols in (SYMBOLS, KEPT_SYMBOLS)]
    print(f"{name:36}" + "".join(f"{mean:12.3f}" for mean in means))


@torch.inference_mode()
def logits(model: PreTrainedModel) -> torch.Tensor:
    """What the model makes of some tokens, whatever they mean."""
    return model(input_ids=torch.arange(1000, 1032)[None]).logits


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, default=Path("two-edits"), help="folder of the joined adapter")
    args = parser.parse_args()
    tokenizer, model = load_tokenizer(args.model), load_model(args.model)
    retain = [
        *(chat(*fact) for fact in KEEP.items()),
        *(symbol_chat(*fact) for fact in KEPT_SYMBOLS.items()),
        *passages(tokenizer, 24),
    ]
    columns = ("capitals", "kept", "symbols", "kept")
    print("\n" + " " * 36 + "".join(f"{name:>12}" for name in columns))
    print_row("the model as it was", model, tokenizer)

    capitals = {country: chat(country, capital) for country, capital in CAPITALS.items()}
    model = unlearn(model, tokenizer, capitals, retain, adapter_name="no-capitals")
    print_row("no-capitals", model, tokenizer)
    # made with the first one in place, so that it fits beside it
    symbols = {element: symbol_chat(element, symbol) for element, symbol in SYMBOLS.items()}
    model = unlearn(model, tokenizer, symbols, retain, adapter_name="no-symbols")
    print_row("no-capitals and no-symbols", model, tokenizer)
    both = logits(model)

    model.add_weighted_adapter(["no-capitals", "no-symbols"], [1.0, 1.0], "joined")
    model.set_adapter("joined")
    model.save_pretrained(args.out, selected_adapters=["joined"])
    loaded = PeftModel.from_pretrained(load_model(args.model), args.out / "joined")
    print_row("both in one file, loaded", loaded, tokenizer)
    assert torch.allclose(logits(loaded), both, atol=2e-3)  # summed up in another order

    for item in ("Japan", "gold"):
        loaded.restore_item(item)
    print_row("Japan and gold given back", loaded, tokenizer)

    model.delete_adapter("joined")
    model.delete_adapter("no-symbols")
    model.set_adapter("no-capitals")
    print_row("no-symbols deleted", model, tokenizer)


if __name__ == "__main__":
    main()
