"""Chooses the strength of an edit by what it may cost, with the paper's closed form: one strength for everything.

    python examples/choose_alpha.py        # SmolLM2-135M-Instruct, a few minutes on two cores

The closed form finds what to take out, not how much of it. `tune_alpha` looks at the edited model at a few strengths: how
likely does it still say what is to be forgotten, and what share of their probability have the kept answers lost? It sets the
least strength that forgets, or the greatest one within a budget of damage. Prints the curve for a small and a large budget,
and what `unlearn(..., alpha="auto")` finds, which does the same in one call; draws the curve (`choose_alpha.png`).
"""

from __future__ import annotations

from pathlib import Path

from common import command_line, load_model, load_tokenizer
from forget_facts import FORGET, HELD_OUT, KEEP, chat, passages, recall

from engram_peft import EngramConfig, tune_alpha, unlearn


BUDGETS = [0.01, 0.05]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--plot", type=Path, default=Path("choose_alpha.png"), help="file of the plot")
    args = parser.parse_args()
    tokenizer, model = load_tokenizer(args.model), load_model(args.model)
    config = EngramConfig.paper(target_modules=["down_proj"], task_type="CAUSAL_LM")
    forget = {country: chat(country, capital) for country, capital in FORGET.items()}
    answers = [chat(*fact) for fact in KEEP.items()]
    # what is listed five times weighs five times: the answers are few beside the passages, and closest to what is forgotten
    retain = [*5 * answers, *passages(tokenizer, 24)]

    peft_model = unlearn(model, tokenizer, forget, retain, config, scale="adaptive")
    for budget in BUDGETS:
        curve = tune_alpha(peft_model, tokenizer, forget, answers, budget=budget)
        forgotten, held_out = (recall(peft_model, tokenizer, facts) for facts in (FORGET, HELD_OUT))
        print(f"\nwith a budget of {budget:g}:\n{curve}")
        print(f"forgotten capitals named: {forgotten.named:.0%}; never mentioned ones: {held_out.named:.0%}")

    axis = curve.plot()
    axis.set_title(f"Choosing the strength: a budget of {BUDGETS[-1]:g}")
    axis.figure.savefig(args.plot, dpi=120)
    print(f"\nThe curve is in {args.plot}.")

    model = peft_model.unload()
    peft_model = unlearn(model, tokenizer, forget, retain, config, scale="adaptive", alpha="auto")
    print(f'\nunlearn(..., alpha="auto"), which has a budget of 0.05:\n{peft_model.curves["default"]}')


if __name__ == "__main__":
    main()
