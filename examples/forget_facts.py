"""Makes a small real model forget ten capitals, and shows what that did to everything else.

    python examples/forget_facts.py                        # SmolLM2-135M-Instruct, two to three minutes on two cores
    python examples/forget_facts.py --model org/name       # any chat model of the hub, or a local folder

Ten capitals are forgotten. Thirty others and pages of Python's own documentation are given as what to keep; fourteen more
capitals and other pages are only measured. The edit is saved as an adapter (`no-capitals/`), loaded into a fresh model and
measured again. `forget_facts.png` shows the trade-off over alpha.
"""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from engram_peft import EngramConfig, unlearn


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

ALPHAS = [0.25, 0.5, 0.75, 1.25, 1.5]  # the plot has these, 0 and the adapter's own
PASSAGE_TOKENS = 128


def chat(country: str, capital: str) -> list[dict[str, str]]:
    """A question and its answer, as chat messages."""
    return [
        {"role": "user", "content": f"What is the capital of {country}?"},
        {"role": "assistant", "content": f"The capital of {country} is {capital}."},
    ]


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
    """How well a model knows a set of capitals: the share it names, and the probability of each."""

    named: float
    probabilities: list[float]

    @property
    def mean(self) -> float:
        return sum(self.probabilities) / len(self.probabilities)


@dataclass
class Measurement:
    """A model's recall of the three sets of capitals, and its perplexity on pages nobody edited for."""

    forgotten: Recall
    kept: Recall
    held_out: Recall
    perplexity: float


@torch.inference_mode()
def recall(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, facts: dict[str, str]) -> Recall:
    """Teacher-forced after "The capital of X is": is the capital the greedy choice, and how likely is it?"""
    prompts, answers = [], []
    for country, capital in facts.items():
        question, answer = chat(country, capital)
        text = tokenizer.apply_chat_template([question], tokenize=False, add_generation_prompt=True)
        start = answer["content"].removesuffix(f" {capital}.")
        prompts.append(tokenizer(text + start, add_special_tokens=False)["input_ids"])
        answers.append(tokenizer(f" {capital}", add_special_tokens=False)["input_ids"])
    named, probabilities = 0, []
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    log_probabilities: dict[int, tuple[float, bool]] = {}
    for batch in (order[i : i + 8] for i in range(0, len(order), 8)):
        logits = padded_logits(model, [prompts[i] + answers[i] for i in batch])
        for row, i in enumerate(batch):
            first, length = len(prompts[i]), len(answers[i])
            scores = logits[row, first - 1 : first - 1 + length].log_softmax(-1)
            target = torch.tensor(answers[i])
            greedy = bool((scores.argmax(-1) == target).all())
            log_probabilities[i] = (float(scores.gather(1, target[:, None]).sum()), greedy)
    for i in range(len(prompts)):
        named += log_probabilities[i][1]
        probabilities.append(math.exp(log_probabilities[i][0]))
    return Recall(named / len(prompts), probabilities)


@torch.inference_mode()
def perplexity(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> float:
    loss, count = 0.0, 0
    for text in texts:
        ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=PASSAGE_TOKENS)["input_ids"]
        loss += float(model(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    return math.exp(loss / count)


def padded_logits(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits of sequences of different lengths, padded on the right: `(batch, length, vocabulary)` float32."""
    lengths = torch.tensor([len(ids) for ids in sequences])
    input_ids = torch.zeros(len(sequences), int(lengths.max()), dtype=torch.long)
    for row, ids in enumerate(sequences):
        input_ids[row, : len(ids)] = torch.tensor(ids)
    attention_mask = (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()
    return model(input_ids=input_ids, attention_mask=attention_mask).logits.float()


def measure(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Measurement:
    return Measurement(
        *(recall(model, tokenizer, facts) for facts in (FORGET, KEEP, HELD_OUT)), perplexity(model, tokenizer, texts)
    )


@torch.inference_mode()
def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, country: str) -> str:
    """What the model says, freely."""
    prompt = tokenizer.apply_chat_template(
        chat(country, "")[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).split("\n")[0].strip()


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
        "held-out pages: perplexity": lambda m: f"{m.perplexity:.2f}",
    }
    for name, cell in rows.items():
        print(f"{name:42}" + "".join(f"{cell(m):>12}" for m in columns.values()))


def plot_trade_off(curve: dict[float, Measurement], alpha: float, path: Path) -> None:
    from matplotlib import pyplot

    alphas = list(curve)
    figure, axis = pyplot.subplots(figsize=(7, 4.8), layout="constrained")
    axis.plot(
        alphas, [m.forgotten.mean for m in curve.values()], "o-", color="tab:red", label="forgotten: probability"
    )
    axis.plot(alphas, [m.kept.named for m in curve.values()], "o-", color="tab:green", label="kept: named")
    axis.plot(alphas, [m.held_out.named for m in curve.values()], "o-", color="tab:blue", label="held out: named")
    axis.axvline(alpha, color="grey", linestyle=":", label=f"the adapter's alpha, {alpha:g}")
    axis.set(xlabel="alpha", ylabel="share", ylim=(-0.03, 1.03), title="Forgetting ten capitals")
    pages = axis.twinx()
    pages.plot(alphas, [m.perplexity for m in curve.values()], "s--", color="black", alpha=0.6, label="perplexity")
    pages.set_ylabel("perplexity of held-out pages")
    pages.set_ylim(0, 1.2 * max(m.perplexity for m in curve.values()))
    handles, labels = (first + second for first, second in zip(
        axis.get_legend_handles_labels(), pages.get_legend_handles_labels(), strict=True))  # fmt: skip
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=120)


# ------------------------------------------------------------------------------------------------------ the run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub name or local folder; by default SmolLM2-135M-Instruct from PyPI")
    parser.add_argument("--alpha", type=float, default=1.0, help="strength of the edit")
    parser.add_argument("--out", type=Path, default=Path("no-capitals"), help="folder of the adapter")
    parser.add_argument("--plot", type=Path, default=Path("forget_facts.png"), help="file of the plot")
    args = parser.parse_args()
    if args.model is None:
        from smollm2 import smollm2_folder

        args.model = str(smollm2_folder())

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    texts = passages(tokenizer, 56)
    shown, held_out = [text for i, text in enumerate(texts) if i % 8], texts[::8]
    before = measure(model, tokenizer, held_out)
    answers_before = {country: answer(model, tokenizer, country) for country in FORGET}

    started = time.perf_counter()
    config = EngramConfig(
        target_modules=["down_proj"],  # what the MLPs write: most of what forgetting needs, least of the rest
        alpha=args.alpha,
        task_type="CAUSAL_LM",
        description="Takes the capitals of ten countries out of the model.",
    )
    peft_model = unlearn(
        model,
        tokenizer,
        forget=[chat(*fact) for fact in FORGET.items()],
        retain=[*(chat(*fact) for fact in KEEP.items()), *shown],
        config=config,
        scale="adaptive",
    )
    print(f"\nThe edit took {time.perf_counter() - started:.0f} s.")
    after = measure(peft_model, tokenizer, held_out)
    answers_after = {country: answer(peft_model, tokenizer, country) for country in FORGET}
    print_answers(answers_before, answers_after, before.forgotten, after.forgotten)

    peft_model.save_pretrained(args.out)
    size = (args.out / "adapter_model.safetensors").stat().st_size / 2**20
    fresh = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    reloaded = measure(PeftModel.from_pretrained(fresh, args.out).eval(), tokenizer, held_out)
    print_measurements({"before": before, "after": after, "reloaded": reloaded})
    print(f"\nThe adapter is in {args.out}/ ({size:.0f} MB).")

    curve = {0.0: before, args.alpha: after}
    for alpha in ALPHAS:
        peft_model.set_scale("default", alpha / args.alpha)  # nothing is recomputed
        curve[alpha] = measure(peft_model, tokenizer, held_out)
    plot_trade_off(dict(sorted(curve.items())), args.alpha, args.plot)
    print(f"The trade-off over alpha is in {args.plot}.")


if __name__ == "__main__":
    main()
