"""What is gathered for an edit item by item: rows, their company's means and the sums of what is kept, against plain hooks."""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model
from torch import nn

from engram_peft import EngramConfig
from engram_peft.editing.encoding import tokenize_item
from engram_peft.editing.item_rows import collect_item_rows
from engram_peft.editing.items import forget_items

from ..tuners.adapters import KINDS, WITH_BIAS, edited, linear_names, unchanged
from .reference import plain_rows, relative_error


FORGET = {
    "long": ("who was born by the river in the big old house ?", "the king of the red mountain was born by the river"),
    "short": ("who died ?", "the cat"),
    "text": "one dog saw three birds fly by and five six seven eight nine ten fish in water and fire",
    "many": [("where lies rome ?", "rome lies in italy ."), ("and rome ?", "on a deep river by the ocean , rome")],
}
RETAIN = [
    ("where lies paris ?", "paris lies in france ."),
    "the moon",
    ("where lies madrid ?", "madrid lies in old spain ."),
    "a star and the sun by night and day , long and high and deep and old",
    ("what is it ?", "yes"),
    "fire",
    ("who wrote it ?", "the queen of london wrote it in one night by the old tree"),
]


@pytest.fixture
def tokenizer(tiny_tokenizer):
    return tiny_tokenizer()


def tokenized(tokenizer, retain=RETAIN):
    kept = [tokenize_item(tokenizer, item) for item in retain]
    return forget_items(tokenizer, FORGET, kept, 512)[1], kept


def collected(model, texts, kept, names, batch_size=3, pad_token_id=0):
    layers = {name: model.get_submodule(name) for name in names}
    return collect_item_rows(model, layers, texts, kept, batch_size=batch_size, pad_token_id=pad_token_id)


def rows_at(model, names, ids, positions):
    """The inputs of layers at some positions of one text, run alone."""
    mask = torch.zeros(1, len(ids), dtype=torch.bool)
    mask[0, positions] = True
    return plain_rows(model, [(torch.tensor([ids]), mask)], names)


def rows_of_texts(model, names, texts):
    """`X_t`: for every secret token the row before it."""
    parts = [rows_at(model, names, t.tokens.input_ids, [p - 1 for p in t.secret]) for t in texts]
    return {name: torch.cat([part[name] for part in parts]) for name in names}


def rows_of_kept(model, names, kept):
    """For every kept text the rows that predict its answer, or all of its tokens but the first."""
    scored = [range(max(t.start, 1) - 1, len(t.input_ids) - 1) for t in kept]
    return [
        rows_at(model, names, t.input_ids, list(positions)) for t, positions in zip(kept, scored, strict=True)
    ]  # fmt: skip


def summed(parts, like):
    return sum((part.mT @ part for part in parts), torch.zeros(like.shape[1], like.shape[1], dtype=torch.float64))


def means_of_company(texts, kept, rows):
    """For every secret token the mean over the company's runs of the mean of their rows; without company that of all rows."""
    means = []
    for text in texts:
        for company in text.company:
            runs = [rows[number][first:last].mean(0) for number, first, last in company]
            means.append(torch.stack(runs).mean(0) if runs else torch.cat(rows).mean(0))
    return torch.stack(means)


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_sums_and_means_are_those_of_texts_run_one_by_one(tiny_model, tiny_tokenizer, kind, bos):
    model, tokenizer = tiny_model(kind), tiny_tokenizer(add_bos=bos)
    texts, kept = tokenized(tokenizer)
    assert any(not company for text in texts for company in text.company)  # a plain text
    names = sorted(linear_names(model)) + (["lm_head"] if kind == "llama" else [])
    found = collected(model, texts, kept, names)
    assert list(found) == names
    forgotten, others = rows_of_texts(model, names, texts), rows_of_kept(model, names, kept)
    for name in names:
        x, mine = forgotten[name], [part[name] for part in others]
        assert x.shape[1] == model.get_submodule(name).weight.shape[0 if kind == "gpt2" else 1] + (kind in WITH_BIAS)
        rows = found[name]
        assert relative_error(rows.forgotten, x) < 1e-5, name
        assert relative_error(rows.company, means_of_company(texts, kept, mine)) < 1e-5, name
        answers = [part for part, tokens in zip(mine, kept, strict=True) if tokens.prompt is not None]
        plain = [part for part, tokens in zip(mine, kept, strict=True) if tokens.prompt is None]
        assert rows.retain.count == sum(map(len, answers)) and rows.general.count == sum(map(len, plain))
        assert relative_error(rows.retain.dense(), summed(answers, x)) < 1e-5, name
        assert relative_error(rows.general.dense(), summed(plain, x)) < 1e-5, name


def test_every_row_stands_in_the_order_of_the_texts(tiny_model, tokenizer):
    """Batches go by length: each row is nearest to its own of the texts run alone."""
    model = tiny_model("llama")
    texts, kept = tokenized(tokenizer)
    lengths = [len(text.tokens.input_ids) for text in texts]
    assert lengths != sorted(lengths)
    name = "model.layers.1.mlp.down_proj"
    expected = rows_of_texts(model, [name], texts)[name]
    assert len(torch.unique(expected, dim=0)) == len(expected)
    for batch_size in (1, 2, 5):
        found = collected(model, texts, kept, [name], batch_size)[name].forgotten.double()
        assert torch.equal(torch.cdist(found, expected).argmin(1), torch.arange(len(expected)))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_size_of_a_batch_does_not_matter(tiny_model, tokenizer, kind):
    model = tiny_model(kind)
    texts, kept = tokenized(tokenizer)
    names = sorted(linear_names(model))
    expected = collected(model, texts, kept, names, batch_size=1)
    for batch_size, pad_token_id in ((2, 0), (50, 7), (3, None)):
        found = collected(model, texts, kept, names, batch_size, pad_token_id)
        for name in names:
            assert relative_error(found[name].forgotten, expected[name].forgotten) < 1e-5
            assert relative_error(found[name].company, expected[name].company) < 1e-5
            for part in ("retain", "general"):
                mine, other = getattr(found[name], part), getattr(expected[name], part)
                assert mine.count == other.count and relative_error(mine.dense(), other.dense()) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_layers_with_the_same_input_share_one_object(tiny_model, tokenizer, kind):
    model = tiny_model(kind)
    found = collected(model, *tokenized(tokenizer), sorted(linear_names(model)))
    groups: dict[int, set[str]] = {}
    for name, rows in found.items():
        groups.setdefault(id(rows), set()).add(name)
    alike = {"self_attn.q_proj": "qkv", "self_attn.k_proj": "qkv", "self_attn.v_proj": "qkv"}
    alike |= {"mlp.gate_proj": "mlp", "mlp.up_proj": "mlp"} if kind in ("llama", "qwen3") else {}
    expected: dict[str, set[str]] = {}
    for name in found:
        layer, _, part = name.partition("layers." if kind != "gpt2" else "h.")[2].partition(".")
        expected.setdefault(layer + alike.get(part, part), set()).add(name)
    assert sorted(map(sorted, groups.values())) == sorted(map(sorted, expected.values()))


class Shuffling(nn.Module):
    """Two layers that are handed the same tensor in some passes only, and one that comes second from the third pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(99, 8)
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.passes = 0

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        self.passes += 1
        return self.one(x) + self.two(x if self.passes % 2 else x * 2 + 1)


def test_layers_that_part_later_keep_their_own_rows(tokenizer):
    torch.manual_seed(0)
    model = Shuffling()
    texts, kept = tokenized(tokenizer)
    found = collected(model, texts, kept, ["one", "two"], batch_size=2)
    rows = {"one": [], "two": []}

    def listen(name):
        return lambda module, args: rows[name].append(args[0].detach().double())

    handles = [getattr(model, name).register_forward_pre_hook(listen(name)) for name in rows]
    model.passes = 0
    again = collected(model, texts, kept, ["one", "two"], batch_size=2)
    [handle.remove() for handle in handles]
    assert found["one"] is not found["two"]
    for name in rows:
        assert torch.equal(found[name].forgotten, again[name].forgotten)
        ones = torch.ones(1, dtype=torch.float64)
        by_length = sorted(texts, key=lambda text: len(text.tokens.input_ids))
        batches = [by_length[i : i + 2] for i in range(0, len(by_length), 2)]
        expected = {
            id(text): torch.stack([torch.cat([x[row, p - 1], ones]) for p in text.secret])
            for batch, x in zip(batches, rows[name], strict=False)
            for row, text in enumerate(batch)
        }
        expected_rows = torch.cat([expected[id(text)] for text in texts])
        assert relative_error(again[name].forgotten, expected_rows) < 1e-6, name
        assert again[name].retain.count == again["one"].retain.count
        trace = sum((x[row, : len(t.input_ids) - 1][max(t.start, 1) - 1 :] ** 2).sum() + len(t.input_ids) - max(t.start, 1)
                    for batch, x in zip(_batches(kept, 2), rows[name][len(batches):], strict=True)
                    for row, t in enumerate(batch))  # fmt: skip
        both = again[name].retain.dense() + again[name].general.dense()
        assert float(both.trace()) == pytest.approx(float(trace), rel=1e-6)


def _batches(kept, size):
    by_length = sorted(kept, key=lambda tokens: len(tokens.input_ids))
    return [by_length[i : i + size] for i in range(0, len(by_length), size)]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_of_an_adapted_model_they_are_the_rows_that_the_adapter_leaves(tiny_model, tokenizer, kind):
    model = edited(tiny_model(kind), tokenizer)
    base = model.get_base_model()
    texts, kept = tokenized(tokenizer)
    names = [name for name, module in base.named_modules() if hasattr(module, "engram_A") and ".1." in name]
    with unchanged(model):
        found = collect_item_rows(
            model, {name: base.get_submodule(name) for name in names}, texts, kept, batch_size=4, pad_token_id=0
        )
    plain = collected(tiny_model(kind), texts, kept, names)
    inside = {name: base.get_submodule(name).base_layer for name in names}
    expected: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for name, layer in base.named_modules():
        if name in expected:

            def listen(module, args, name=name):
                expected[name].append(args[0].detach()[0])

            layer.register_forward_pre_hook(listen)
    with torch.no_grad():
        for text in texts:
            model(input_ids=torch.tensor([text.tokens.input_ids]))
    for name in names:
        parts = zip(expected[name], texts, strict=True)
        x = torch.cat([rows[[p - 1 for p in text.secret]] for rows, text in parts])
        width = x.shape[1]
        assert relative_error(found[name].forgotten[:, :width], x) < 1e-5, name
        assert found[name].forgotten.shape[1] == width + (inside[name].bias is not None)
        assert relative_error(found[name].forgotten, plain[name].forgotten) > 1e-4, name


def test_the_model_is_left_as_it_was_and_dropout_is_off(tiny_model, tokenizer):
    model = get_peft_model(tiny_model("gpt2"), EngramConfig(target_modules=["mlp.c_proj"]))
    base = model.get_base_model()
    names = [name for name, module in base.named_modules() if hasattr(module, "engram_A")]
    texts, kept = tokenized(tokenizer)

    def collect():
        layers = {name: base.get_submodule(name) for name in names}
        return collect_item_rows(model, layers, texts, kept, batch_size=4, pad_token_id=0)

    expected = collect()
    model.train()
    with unchanged(model):
        found = collect()
    for name in names:
        assert torch.equal(found[name].forgotten, expected[name].forgotten)
        assert torch.equal(found[name].company, expected[name].company)


def test_only_answers_or_only_plain_texts_may_be_kept(tiny_model, tokenizer):
    model, name = tiny_model("llama"), "model.layers.1.mlp.down_proj"
    for retain in (
        [item for item in RETAIN if isinstance(item, str)],
        [item for item in RETAIN if not isinstance(item, str)],
    ):
        texts, kept = tokenized(tokenizer, retain)
        found = collected(model, texts, kept, [name])[name]
        mine = [part[name] for part in rows_of_kept(model, [name], kept)]
        empty, full = (found.retain, found.general) if isinstance(retain[0], str) else (found.general, found.retain)
        assert empty.count == 0 and not empty.dense().any()
        assert relative_error(full.dense(), summed(mine, found.forgotten)) < 1e-5
        assert relative_error(found.company, means_of_company(texts, kept, mine)) < 1e-5


def test_a_layer_whose_input_is_not_finite_is_named(tiny_model, tokenizer):
    model = tiny_model("llama")
    model.model.layers[0].mlp.down_proj.weight.data[0, 0] = float("inf")
    texts, kept = tokenized(tokenizer)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn\.q_proj holds NaN or infinity"):
        collected(model, texts, kept, ["model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj"])
