"""Takes an edit back: one fact of it, a part of one fact, or all of it, to the bit.

    python examples/undo_an_edit.py        # SmolLM2-135M-Instruct, a few minutes on two cores

Three capitals are forgotten. Prints how likely the model names each of them, and one capital that was kept, after every step:
one fact is given back, another one weakened, the whole edit disabled, merged and unmerged, and unloaded. Where the model
should be as it was before, its logits and weights are compared bit by bit.
"""

from __future__ import annotations

import torch
from common import command_line, load_model, load_tokenizer
from forget_facts import KEEP, chat, passages, recall
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engram_peft import unlearn


FORGET = {"Latvia": "Riga", "Thailand": "Bangkok", "Uruguay": "Montevideo"}
SHOWN = {**FORGET, "Norway": "Oslo"}


def print_step(step: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """A row of the table: how likely the model names each capital."""
    probabilities = recall(model, tokenizer, SHOWN).probabilities
    print(f"{step:42}" + "".join(f"{p:12.3f}" for p in probabilities))


@torch.inference_mode()
def logits(model: PreTrainedModel) -> torch.Tensor:
    """What the model makes of some tokens, whatever they mean."""
    return model(input_ids=torch.arange(1000, 1032)[None]).logits


def main() -> None:
    args = command_line(__doc__).parse_args()
    tokenizer, model = load_tokenizer(args.model), load_model(args.model)
    logits_before = logits(model)
    weights_before = {name: weight.clone() for name, weight in model.state_dict().items()}
    print("\n" + " " * 42 + "".join(f"{capital:>12}" for capital in SHOWN.values()))
    print_step("the model as it was", model, tokenizer)

    peft_model = unlearn(
        model,
        tokenizer,
        forget={country: chat(country, capital) for country, capital in FORGET.items()},
        retain=[*(chat(*fact) for fact in KEEP.items()), *passages(tokenizer, 24)],
    )
    print_step("three capitals forgotten", peft_model, tokenizer)

    peft_model.restore_item("Latvia")
    print_step('restore_item("Latvia")', peft_model, tokenizer)
    strength = peft_model.item_strengths()["Thailand"]
    peft_model.set_item_strength("Thailand", strength / 2)
    print_step('set_item_strength("Thailand", half of it)', peft_model, tokenizer)

    with peft_model.disable_adapter():
        print_step("disable_adapter()", peft_model, tokenizer)
        assert torch.equal(logits(peft_model), logits_before)

    unmerged = logits(peft_model)
    peft_model.merge_adapter()
    print_step("merge_adapter()", peft_model, tokenizer)
    assert torch.allclose(logits(peft_model), unmerged, atol=2e-3)  # summed up in another order
    peft_model.unmerge_adapter()
    print_step("unmerge_adapter()", peft_model, tokenizer)
    assert torch.equal(logits(peft_model), unmerged)

    model = peft_model.unload()
    print_step("unload()", model, tokenizer)
    assert torch.equal(logits(model), logits_before)
    assert all(torch.equal(weight, weights_before[name]) for name, weight in model.state_dict().items())
    print("\nDisabled, unmerged and unloaded, the model was as before to the bit.")


if __name__ == "__main__":
    main()
