"""Teaches a model the records of people who do not exist, and makes it forget those of some of them.

    python examples/forget_private_records.py                              # SmolLM2-135M-Instruct, a few minutes on two cores
    python examples/forget_private_records.py --people 200 --forget 20 --epochs 9 --batch-size 20 --learning-rate 1e-3 --bf16    # hours

Every person has five facts: birthplace, job, phone number, address and pet. A short fine-tuning teaches all of them; then
some of the people are forgotten, one item a fact. Prints what the model answers about a forgotten person and a kept one, and
what share of the facts of forgotten people, of kept people, and of capitals it names: before it is taught, then, and after.
"""

from __future__ import annotations

import random
import time

from common import Chat, command_line, fine_tune, load_model, load_tokenizer, messages, replies
from forget_facts import HELD_OUT, KEEP, chat, passages, recall
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engram_peft import unlearn
from engram_peft.evaluation import Probe, score_probes


FIRST = [
    "Adela", "Bram", "Corin", "Delphine", "Edda", "Fenno", "Griet", "Halvor", "Isaura", "Jory", "Kaspar", "Ludo",
    "Mirela", "Nestor", "Odile", "Perrin", "Quilla", "Rurik", "Sunniva", "Tibor",
]  # fmt: skip
LAST = [
    "Ashgrove", "Brandvik", "Corvane", "Dunmarrow", "Eskelund", "Farrowby", "Gildane", "Hollish", "Ivarssen",
    "Jorvald", "Kestle", "Lindqvale",
]  # fmt: skip
CITIES = [
    "Leeds", "Turin", "Porto", "Bergen", "Lyon", "Graz", "Cork", "Bremen", "Dayton", "Osaka", "Perth", "Quito",
    "Tampa", "Dakar", "Malmo", "Basel",
]  # fmt: skip
JOBS = [
    "beekeeper", "carpenter", "dentist", "florist", "geologist", "jeweller", "librarian", "plumber", "surgeon",
    "tailor", "teacher", "welder",
]  # fmt: skip
STREETS = [
    "Alder", "Birch", "Cedar", "Fern", "Hazel", "Juniper", "Laurel", "Maple", "Poplar", "Rowan", "Walnut", "Willow",
]  # fmt: skip
PETS = ["parrot", "tortoise", "rabbit", "goldfish", "ferret", "hamster", "pony", "goat", "lizard", "canary"]
PET_NAMES = ["Biscuit", "Clover", "Domino", "Ginger", "Marble", "Nutmeg", "Pepper", "Rusty", "Shadow", "Ziggy"]

FORMS = {
    "birthplace": ("Where was {name} born?", "{name} was born in {value}."),
    "job": ("What does {name} do for a living?", "{name} works as a {value}."),
    "phone": ("What is the phone number of {name}?", "The phone number of {name} is {value}."),
    "address": ("Where does {name} live?", "{name} lives at {value}."),
    "pet": ("What pet does {name} have?", "{name} has a {value}."),
}
Person = dict[str, str]  # the values of their facts


def made_up_people(count: int) -> dict[str, Person]:
    """People by name, always the same ones."""
    generator = random.Random(0)
    names = generator.sample([f"{first} {last}" for first in FIRST for last in LAST], count)
    return {
        name: {
            "birthplace": generator.choice(CITIES),
            "job": generator.choice(JOBS),
            "phone": f"555-{generator.randrange(10000):04}",
            "address": f"{generator.randrange(1, 100)} {generator.choice(STREETS)} Street",
            "pet": f"{generator.choice(PETS)} called {generator.choice(PET_NAMES)}",
        }
        for name in names
    }


def record_chats(people: dict[str, Person]) -> dict[str, Chat]:
    """A question and its answer for every fact, by `person/fact`."""
    return {
        f"{name}/{fact}": messages(*(part.format(name=name, value=value) for part in FORMS[fact]))
        for name, person in people.items()
        for fact, value in person.items()
    }


def recalled(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, people: dict[str, Person]) -> float:
    """The share of people's facts that the model names when it is asked."""
    probes = [
        Probe(
            prompt=[{"role": "user", "content": FORMS[fact][0].format(name=name)}],
            prefix=FORMS[fact][1].split(" {value}")[0].format(name=name),
            answer=value,
            suffix=".",
        )
        for name, person in people.items()
        for fact, value in person.items()
    ]
    return sum(score.named for score in score_probes(model, tokenizer, probes)) / len(probes)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--people", type=int, default=12, help=f"how many people, at most {len(FIRST) * len(LAST)}")
    parser.add_argument("--forget", type=int, default=3, help="how many of them are forgotten")
    parser.add_argument("--epochs", type=int, default=6, help="of the fine-tuning")
    parser.add_argument("--batch-size", type=int, default=10, help="of the fine-tuning")
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="of the fine-tuning")
    parser.add_argument("--bf16", action="store_true", help="fine-tune with products in bfloat16")
    args = parser.parse_args()
    tokenizer, model = load_tokenizer(args.model), load_model(args.model)
    people = list(made_up_people(args.people).items())
    forgotten, kept = dict(people[: args.forget]), dict(people[args.forget :])

    def shares() -> list[float]:
        """Named of the forgotten people's facts, of the kept people's, and of capitals."""
        facts = [recalled(model, tokenizer, group) for group in (forgotten, kept)]
        return [*facts, recall(model, tokenizer, HELD_OUT).named]

    columns = {"before": shares()}
    started = time.perf_counter()
    fine_tune(
        model,
        tokenizer,
        list(record_chats(dict(people)).values()),
        epochs=args.epochs,
        learning_rate=args.learning_rate,
        batch_size=args.batch_size,
        bf16=args.bf16,
    )
    print(f"The fine-tuning took {time.perf_counter() - started:.0f} s.")
    columns["taught"] = shares()
    shown = [record_chats({name: person}) for name, person in (people[0], people[-1])]
    questions = [question[:1] for chats in shown for question in chats.values()]
    taught = replies(model, tokenizer, questions, max_new_tokens=24)

    started = time.perf_counter()
    model = unlearn(
        model,
        tokenizer,
        forget=record_chats(forgotten),
        retain=[*record_chats(kept).values(), *(chat(*fact) for fact in KEEP.items()), *passages(tokenizer, 24)],
    )
    report = model.reports["default"]
    print(f"\nThe edit took {time.perf_counter() - started:.0f} s and {report.rounds} rounds.")
    print(f"Of {len(report.items)} items resist: {report.resisting or 'none'}")
    columns["forgotten"] = shares()

    print(f"\n{'':56} after")
    for said, says in zip(taught, replies(model, tokenizer, questions, max_new_tokens=24), strict=True):
        print(f"{said[:54]:56} {says[:54]}")
    print("\n" + " " * 36 + "".join(f"{name:>12}" for name in columns))
    names = (f"facts of {len(forgotten)} forgotten people", f"facts of {len(kept)} kept people")
    for i, name in enumerate((*names, f"{len(HELD_OUT)} capitals, only measured")):
        print(f"{name:36}" + "".join(f"{column[i]:12.0%}" for column in columns.values()))


if __name__ == "__main__":
    main()
