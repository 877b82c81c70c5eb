"""Makes a chat model forget capitals in whatever words they are asked for, also in the middle of a conversation.

    python examples/forget_in_a_chat.py        # SmolLM2-135M-Instruct, a few minutes on two cores

Two capitals are forgotten. Each is one item under one name, given in several wordings, which share a strength; the tokenizer's
chat template puts them into its form, system message included. Prints the report of the items, and for the forgotten
countries and two others what the model says, before and after: to a wording that was given, to one that was not, and in the
second turn of two conversations, which were not given either.
"""

from __future__ import annotations

import time

from common import Chat, command_line, load_model, load_tokenizer, messages, replies
from forget_facts import KEEP, chat, passages

from engram_peft import unlearn


FORGET = {"Japan": "Tokyo", "Thailand": "Bangkok"}
OTHERS = ["Vietnam", "Norway"]  # the one was never mentioned, the other one is kept


def wordings(country: str, capital: str) -> list[Chat]:
    """One item: the same fact, asked for and told in several ways."""
    return [
        chat(country, capital),
        messages(f"Which city is the capital of {country}?", f"{capital} is the capital of {country}."),
        messages(f"What is {country}'s capital?", f"{country}'s capital is {capital}."),
        [
            *messages("I am going on a holiday.", "That sounds exciting! Where are you going?"),
            *messages(f"To {country}. What is the capital there?", f"The capital of {country} is {capital}."),
        ],
    ]


def kept_chats() -> list[Chat]:
    """A chat for every kept capital. All wordings occur, so that none of them is forgotten for its form."""
    return [wordings(*fact)[i % 4] for i, fact in enumerate(KEEP.items())]


def asked(country: str) -> dict[str, Chat]:
    """Chats that ask for a capital, by what they show."""
    return {
        "as given": chat(country, "")[:1],
        "other words": [{"role": "user", "content": f"Can you tell me what city {country}'s capital is?"}],
        "second turn": [
            *messages("What is the capital of France?", "The capital of France is Paris."),
            {"role": "user", "content": f"And what is the capital of {country}?"},
        ],
        "small talk": [
            *messages("Hello! I am planning a trip.", "How exciting! Where would you like to go?"),
            {"role": "user", "content": f"I am going to {country}. What is its capital?"},
        ],
    }


def main() -> None:
    args = command_line(__doc__).parse_args()
    tokenizer, model = load_tokenizer(args.model), load_model(args.model)
    questions = [(country, how, ask) for country in [*FORGET, *OTHERS] for how, ask in asked(country).items()]
    before = replies(model, tokenizer, [ask for _, _, ask in questions])

    started = time.perf_counter()
    model = unlearn(
        model,
        tokenizer,
        forget={country: wordings(country, capital) for country, capital in FORGET.items()},
        retain=[*kept_chats(), *passages(tokenizer, 24)],
    )
    print(f"\nThe edit took {time.perf_counter() - started:.0f} s:\n\n{model.reports['default']}")
    after = replies(model, tokenizer, [ask for _, _, ask in questions])

    print(f"\n{'':10} {'':12} {'before':58} after")
    for (country, how, _), said, says in zip(questions, before, after, strict=True):
        print(f"{country:10} {how:12} {said[:56]:58} {says[:56]}")


if __name__ == "__main__":
    main()
