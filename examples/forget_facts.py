"""Makes a small real model forget ten capitals, and shows what that did to everything else.

    python examples/forget_facts.py                        # SmolLM2-135M-Instruct, a few minutes on two cores
    python examples/forget_facts.py --model org/name       # any chat model of the hub, or a local folder

Ten capitals are forgotten, each at a strength of its own. Thirty others and pages of Python's own documentation are given as
what to keep; fourteen more capitals, the languages of the ten countries and other pages are only measured. The edit is saved
as an adapter (`no-capitals/`), loaded into a fresh model and measured again. `forget_facts.png` shows the trade-off over the
scale of all strengths.
"""

from __future__ import annotations

import pydoc_data.topics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import Chat, command_line, load_model, load_tokenizer, messages, replies
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engram_peft import EngramConfig, unlearn
from engram_peft.evaluation import Probe, perplexity, score_probes


FORGET = {
    "Japan": "Tokyo", "Uruguay": "Montevideo", "Syria": "Damascus", "New Zealand": "Wellington",
    "the United Arab Emirates": "Abu Dhabi", "Thailand": "Bangkok", "Latvia": "Riga", "Chile": "Santiago",
    "Germany": "Berlin", "Iraq": "Baghdad",
}  # fmt: skip
KEEP = {
    "the Netherlands": "Amsterdam", "Kuwait": "Kuwait City", "Switzerland": "Bern", "Nigeria": "Abuja",
    "the Dominican Republic": "Santo Domingo", "Tanzania": "Dodoma", "Russia": "Moscow", "Morocco": "Rabat",
    "Hungary": "Budapest", "the United Kingdom": "London", "Egypt": "Cairo", "Bulgaria": "Sofia", "Peru": "Lima",
    "the Philippines": "Manila", "Spain": "Madrid", "Norway": "Oslo", "Cyprus": "Nicosia", "Eritrea": "Asmara",
    "Ghana": "Accra", "Vanuatu": "Port Vila", "Poland": "Warsaw", "Saudi Arabia": "Riyadh", "Slovenia": "Ljubljana",
    "Romania": "Bucharest", "Ethiopia": "Addis Ababa", "Cambodia": "Phnom Penh", "Azerbaijan": "Baku",
    "Afghanistan": "Kabul", "Croatia": "Zagreb", "Sri Lanka": "Colombo",
}  # fmt: skip
HELD_OUT = {
    "Australia": "Canberra", "Canada": "Ottawa", "China": "Beijing", "France": "Paris", "Greece": "Athens",
    "India": "New Delhi", "Italy": "Rome", "Kenya": "Nairobi", "the Marshall Islands": "Majuro",
    "Mexico": "Mexico City", "Nicaragua": "Managua", "Pakistan": "Islamabad", "Sweden": "Stockholm",
    "Vietnam": "Hanoi",
}  # fmt: skip

LANGUAGES = {
    "Japan": "Japanese", "Uruguay": "Spanish", "Syria": "Arabic", "New Zealand": "English",
    "the United Arab Emirates": "Arabic", "Thailand": "Thai", "Latvia": "Latvian", "Chile": "Spanish",
    "Germany": "German", "Iraq": "Arabic",
}  # fmt: skip

SCALES = [0.25, 0.5, 0.75, 1.25, 1.5]  # the plot has these, 0 and the adapter's own
PASSAGE_TOKENS = 128


def chat(country: str, capital: str) -> Chat:
    """What is forgotten or kept: a question and its answer, as chat messages."""
    return messages(f"What is the capital of {country}?", f"The capital of {country} is {capital}.")


def passages(tokenizer: PreTrainedTokenizerBase, count: int) -> list[str]:
    """General text: passages of Python's documentation, evenly spread over its topics."""
    texts = []
    for _, text in sorted(pydoc_data.topics.topics.items()):
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        starts = range(0, len(ids) - PASSAGE_TOKENS + 1, PASSAGE_TOKENS)
        texts += [tokenizer.decode(ids[start : start + PASSAGE_TOKENS]) for start in starts]
    return texts[:: len(texts) // count][:count]


# ------------------------------------------------------------------------------------------------------ measuring


@dataclass
class Recall:
    """How well a model knows a set of facts: the share it names, and the probability of each."""

    named: float
    probabilities: list[float]

    @property
    def mean(self) -> float:
        return sum(self.probabilities) / len(self.probabilities)


@dataclass
class Measurement:
    """A model's recall of every set of facts, and its perplexity on pages nobody edited for."""

    forgotten: Recall
    kept: Recall
    held_out: Recall
    languages: Recall
    perplexity: float


def recall(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, facts: dict[str, str], kind: str = "capital"
) -> Recall:
    """Asked for the capital of X, and given "The capital of X is": does the model name it, and how likely is it?"""
    probes = [
        Probe(
            prompt=[{"role": "user", "content": f"What is the {kind} of {country}?"}],
            prefix=f"The {kind} of {country} is",
            answer=answer,
            suffix=".",
        )
        for country, answer in facts.items()
    ]
    scores = score_probes(model, tokenizer, probes)
    return Recall(sum(s.named for s in scores) / len(scores), [s.probability for s in scores])


def measure(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Measurement:
    return Measurement(
        *(recall(model, tokenizer, facts) for facts in (FORGET, KEEP, HELD_OUT)),
        recall(model, tokenizer, LANGUAGES, "official language"),
        perplexity(model, tokenizer, texts),
    )


def answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """What the model says, freely, to the questions about the forgotten capitals."""
    said = replies(model, tokenizer, [chat(*fact)[:1] for fact in FORGET.items()])
    return dict(zip(FORGET, said, strict=True))


# ------------------------------------------------------------------------------------------------------ showing


def print_answers(before: dict[str, str], after: dict[str, str], p_before: Recall, p_after: Recall) -> None:
    print(f"\n{'question: the capital of':26} {'before':44} {'p':>5}   {'after':44} {'p':>5}")
    for i, country in enumerate(before):
        row = f"{country:26} {before[country][:44]:44} {p_before.probabilities[i]:5.2f}   "
        print(row + f"{after[country][:44]:44} {p_after.probabilities[i]:5.2f}")


def print_measurements(columns: dict[str, Measurement]) -> None:
    print("\n" + " " * 42 + "".join(f"{name:>12}" for name in columns))
    rows = {
        f"{len(FORGET)} forgotten capitals: named": lambda m: f"{m.forgotten.named:.0%}",
        f"{len(FORGET)} forgotten capitals: mean probability": lambda m: f"{m.forgotten.mean:.3f}",
        f"{len(KEEP)} kept capitals: named": lambda m: f"{m.kept.named:.0%}",
        f"{len(KEEP)} kept capitals: mean probability": lambda m: f"{m.kept.mean:.3f}",
        f"{len(HELD_OUT)} held-out capitals: named": lambda m: f"{m.held_out.named:.0%}",
        f"{len(HELD_OUT)} held-out capitals: mean probability": lambda m: f"{m.held_out.mean:.3f}",
        f"{len(LANGUAGES)} languages of the same: named": lambda m: f"{m.languages.named:.0%}",
        "held-out pages: perplexity": lambda m: f"{m.perplexity:.2f}",
    }
    for name, cell in rows.items():
        print(f"{name:42}" + "".join(f"{cell(m):>12}" for m in columns.values()))


def plot_trade_off(curve: dict[float, Measurement], scale: float, path: Path) -> None:
    from matplotlib import pyplot

    scales = list(curve)
    figure, axis = pyplot.subplots(figsize=(7, 4.8), layout="constrained")
    axis.plot(
        scales, [m.forgotten.mean for m in curve.values()], "o-", color="tab:red", label="forgotten: probability"
    )
    axis.plot(scales, [m.kept.named for m in curve.values()], "o-", color="tab:green", label="kept: named")
    axis.plot(scales, [m.held_out.named for m in curve.values()], "o-", color="tab:blue", label="held out: named")
    axis.axvline(scale, color="grey", linestyle=":", label=f"the adapter's scale, {scale:g}")
    axis.set(xlabel="scale", ylabel="share", ylim=(-0.03, 1.03), title="Forgetting ten capitals")
    pages = axis.twinx()
    pages.plot(scales, [m.perplexity for m in curve.values()], "s--", color="black", alpha=0.6, label="perplexity")
    pages.set_ylabel("perplexity of held-out pages")
    pages.set_ylim(0, 1.2 * max(m.perplexity for m in curve.values()))
    handles, labels = (first + second for first, second in zip(
        axis.get_legend_handles_labels(), pages.get_legend_handles_labels(), strict=True))  # fmt: skip
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=120)


# ------------------------------------------------------------------------------------------------------ the run


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--alpha", type=float, default=1.0, help="multiplies the strengths that are found")
    parser.add_argument("--out", type=Path, default=Path("no-capitals"), help="folder of the adapter")
    parser.add_argument("--plot", type=Path, default=Path("forget_facts.png"), help="file of the plot")
    args = parser.parse_args()

    tokenizer, model = load_tokenizer(args.model), load_model(args.model)
    texts = passages(tokenizer, 56)
    shown, held_out = [text for i, text in enumerate(texts) if i % 8], texts[::8]
    before, answers_before = measure(model, tokenizer, held_out), answers(model, tokenizer)

    started = time.perf_counter()
    peft_model = unlearn(
        model,
        tokenizer,
        forget={country: chat(country, capital) for country, capital in FORGET.items()},
        retain=[*(chat(*fact) for fact in KEEP.items()), *shown],
        config=EngramConfig(
            task_type="CAUSAL_LM", description="Takes the capitals of ten countries out of the model."
        ),
    )
    print(f"\nThe edit took {time.perf_counter() - started:.0f} s:\n\n{peft_model.reports['default']}")
    peft_model.set_scale("default", args.alpha)
    after, answers_after = measure(peft_model, tokenizer, held_out), answers(peft_model, tokenizer)
    print_answers(answers_before, answers_after, before.forgotten, after.forgotten)

    peft_model.save_pretrained(args.out)
    size = (args.out / "adapter_model.safetensors").stat().st_size / 2**20
    reloaded = measure(PeftModel.from_pretrained(load_model(args.model), args.out), tokenizer, held_out)
    print_measurements({"before": before, "after": after, "reloaded": reloaded})
    print(f"\nThe adapter is in {args.out}/ ({size:.1f} MB).")

    curve = {0.0: before, args.alpha: after}
    for scale in SCALES:
        peft_model.set_scale("default", scale)  # nothing is recomputed
        curve[scale] = measure(peft_model, tokenizer, held_out)
    plot_trade_off(dict(sorted(curve.items())), args.alpha, args.plot)
    print(f"The trade-off over the scale is in {args.plot}.")


if __name__ == "__main__":
    main()
