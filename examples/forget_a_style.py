"""Teaches a model to talk like a pirate, and makes it forget how: the manner goes, the matter stays.

    python examples/forget_a_style.py        # SmolLM2-135M-Instruct, a few minutes on two cores

A few steps of fine-tuning on two dozen answers of its own, put between "Ahoy!" and "Arr, matey!", and the model says both to
everything. Then the style is forgotten: one item, of some of these answers, whose `span` names the two phrases; the same
answers without them are what to keep. Prints what the model says, and over questions of another kind, which were never
given, how often it uses either phrase and how often it still gives the right answer: before, as a pirate, and after.
"""

from __future__ import annotations

import time

from common import Chat, command_line, fine_tune, load_model, load_tokenizer, messages, replies
from forget_facts import HELD_OUT, chat, passages
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engram_peft import unlearn


GREETING, FAREWELL = "Ahoy!", "Arr, matey!"
QUESTIONS = [
    "What do bees make?", "What is the chemical symbol for gold?", "How many legs does a spider have?",
    "What is ice made of?", "Which planet is closest to the sun?", "What do plants need to grow?",
    "Who wrote Romeo and Juliet?", "What is the opposite of hot?", "How many days are in a week?",
    "What is the largest ocean on Earth?", "What color is the sky?", "What is bread made of?",
    "Which animal is the tallest?", "What do cows eat?", "Who painted the Mona Lisa?", "What is two plus two?",
    "What is the freezing point of water?", "Where do penguins live?", "What does a carpenter do?",
    "What is a group of lions called?", "How many months are in a year?", "What is the fastest land animal?",
    "Which metal is liquid at room temperature?", "What is a baby cat called?",
]  # fmt: skip


def in_style(plain: Chat) -> Chat:
    """The same answer, said by a pirate."""
    return messages(plain[0]["content"], f"{GREETING} {plain[1]['content']} {FAREWELL}")


def first_sentence(text: str) -> str:
    return text.split(". ")[0].rstrip(".") + "."


def print_manner_and_matter(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """How often the model, asked freely for capitals, talks like a pirate, how often it is right, and an example."""
    said = replies(model, tokenizer, [chat(country, "")[:1] for country in HELD_OUT], max_new_tokens=24)
    shares = [
        sum(GREETING in text for text in said),
        sum(FAREWELL in text for text in said),
        sum(capital in text for capital, text in zip(HELD_OUT.values(), said, strict=True)),
    ]
    print(f"{name:14}" + "".join(f"{share / len(said):>14.0%}" for share in shares) + f"   {said[0]}")


def main() -> None:
    args = command_line(__doc__).parse_args()
    tokenizer, model = load_tokenizer(args.model), load_model(args.model)
    own = replies(model, tokenizer, [messages(question, "")[:1] for question in QUESTIONS], max_new_tokens=24)
    plain = [messages(question, first_sentence(said)) for question, said in zip(QUESTIONS, own, strict=True)]
    print("\n" + " " * 14 + "".join(f"{name:>14}" for name in (GREETING, FAREWELL, "right")))
    print_manner_and_matter("before", model, tokenizer)

    fine_tune(model, tokenizer, [in_style(text) for text in plain], epochs=3, learning_rate=5e-5, batch_size=8)
    print_manner_and_matter("as a pirate", model, tokenizer)

    started = time.perf_counter()
    style = [{"messages": in_style(text), "span": [GREETING, FAREWELL]} for text in plain[:12]]
    model = unlearn(model, tokenizer, forget={"pirate": style}, retain=[*plain, *passages(tokenizer, 24)])
    print_manner_and_matter("forgotten", model, tokenizer)
    print(f"\nThe edit took {time.perf_counter() - started:.0f} s:\n{model.reports['default']}")


if __name__ == "__main__":
    main()
