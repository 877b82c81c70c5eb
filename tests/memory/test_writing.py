"""Facts written into rows are answered, leave the rest alone, and can be taken out again to the bit."""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from engram_peft import MemoryEdit, active_edits, erase_ngrams, write_facts
from engram_peft.memory import NgramMemory
from engram_peft.memory.writing import _ridge, _Sites

from ..conftest import WORDS
from ..models.engram.tiny import engram, fill, logits
from ..tuners.ngram_memory.adapters import adapted, same, tensors


def facts(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Random ones, of two tokens each, with different triggers."""
    rng = random.Random(seed)
    return [(" ".join(rng.sample(WORDS, 5)), " ".join(rng.sample(WORDS, 2))) for _ in range(count)]


def texts(count: int, seed: int = 1) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=10)) for _ in range(count)]


@pytest.fixture
def tokenizer(tiny_tokenizer):
    return tiny_tokenizer()


def empty(kind: str = "native", variant: str = "qwen_ple", **changes):
    """A model whose memories say nothing yet; rows are wide enough for any value."""
    if kind == "native":
        options = {"engram_head_dim": 16, "engram_vocab_size": 1000, **{f"engram_{k}": v for k, v in changes.items()}}
        model = engram("llama", variant, **options)
    else:
        model = adapted("llama", variant, **{"head_dim": 16, "vocab_size": 1000, **changes})
    for memory in memories_of(model).values():
        torch.nn.init.zeros_(memory.table.weight)
        if memory.conv is not None:
            memory.conv.reset_parameters()
    return model


def memories_of(model) -> dict[int, NgramMemory]:
    return {module.layer_id: module for module in model.modules() if isinstance(module, NgramMemory)}


def ids_of(tokenizer, text: str) -> torch.Tensor:
    return torch.tensor([tokenizer(text)["input_ids"]])


def rows_read(model, tokenizer, text: str, layer: int) -> torch.Tensor:
    """`(tokens, tables)`, from the hash itself."""
    memory, found = memories_of(model)[layer], []
    handle = memory.hash.register_forward_hook(lambda module, args, rows: found.append(rows[0] + memory.table.offsets))
    logits(model, ids_of(tokenizer, text))
    handle.remove()
    return found[0]


@pytest.mark.parametrize(
    ("kind", "variant"),
    [("native", "deepseek"), ("adapter", "qwen_ple"), ("adapter", "deepseek_v41"), ("native", "needle")],
)
def test_written_facts_are_answered_and_undone(kind, variant, tokenizer):
    model, asked = empty(kind, variant), facts(4)
    before = tensors(model)
    edit = write_facts(model, tokenizer, asked, target_probability=0.6, batch_size=3)
    written = tensors(model)
    for (prompt, answer), outcome in zip(asked, edit.report.facts, strict=True):
        ids, expected = ids_of(tokenizer, prompt), tokenizer(answer)["input_ids"]
        out = model.generate(input_ids=ids, max_new_tokens=2, do_sample=False, attention_mask=torch.ones_like(ids))
        assert outcome.success == (out[0, ids.shape[1] :].tolist() == expected)
        sequence = torch.cat([ids, torch.tensor([expected])], dim=1)
        chosen = logits(model, sequence).log_softmax(-1)[0, ids.shape[1] - 1 : -1].gather(1, sequence[0, -2:, None])
        assert outcome.probability == pytest.approx(float(chosen.sum().exp()), rel=1e-3)
        assert outcome.triggers == 2
    assert edit.report.success == 1.0

    edit.undo()
    assert same(tensors(model), before)
    edit.apply()
    assert same(tensors(model), written)


def test_only_rows_of_the_triggers_change(tokenizer):
    model = empty()
    (prompt, answer), *_ = asked = facts(1)
    before = tensors(model)
    edit = write_facts(model, tokenizer, asked, rounds=1, max_steps=5)
    ((layer, (rows, _)),) = edit.changes.items()
    memory = memories_of(model)[layer]
    assert layer == max(memories_of(model))
    longest = [i for i in range(memory.spec.n_tables) if i >= memory.spec.n_tables - memory.spec.n_heads]
    read = rows_read(model, tokenizer, f"{prompt} {answer}", layer)[len(prompt.split()) - 1 : -1, longest]
    assert set(rows.tolist()) == set(read.flatten().tolist())
    changed = {name for name, tensor in tensors(model).items() if not torch.equal(tensor, before[name])}
    assert len(changed) == 1
    (name,) = changed
    assert (tensors(model)[name] != before[name]).any(1).nonzero()[:, 0].tolist() == rows.tolist()


def test_texts_without_a_trigger_are_left_alone_to_the_bit(tokenizer):
    model, asked = empty(), facts(3)
    others = texts(12)
    before = [logits(model, ids_of(tokenizer, text)) for text in others]
    edit = write_facts(model, tokenizer, asked, reference_texts=others, rounds=1, max_steps=5)
    ((layer, (rows, _)),) = edit.changes.items()
    equal, tokens, readers = 0, 0, 0
    for text, expected in zip(others, before, strict=True):
        hit = torch.isin(rows_read(model, tokenizer, text, layer), rows).any(1)
        same_logits = (logits(model, ids_of(tokenizer, text)) == expected).all(-1)[0]
        first = int(hit.nonzero()[0]) if hit.any() else len(hit)
        assert bool(same_logits[:first].all())  # what comes later may attend to what changed
        equal, tokens, readers = equal + int(same_logits.sum()), tokens + len(hit), readers + int(hit.sum())
    locality = edit.report.locality
    assert (locality.tokens, locality.equal) == (tokens, pytest.approx(equal / tokens))
    assert (locality.kl == 0) == (readers == 0)


def test_what_the_memory_says_changes_as_wanted(tokenizer):
    """`alpha W_V (e + x) = u + delta` for the gate that belongs to `x`, also where another row was there before."""
    model = fill(engram("llama", "qwen_ple", engram_head_dim=16, engram_vocab_size=1000))
    memory = memories_of(model)[1]
    memory.conv.reset_parameters()
    (prompt, answer), *_ = asked = facts(1)
    ids = ids_of(tokenizer, f"{prompt} {answer}")
    said: list[torch.Tensor] = []
    memory.register_forward_hook(lambda module, args, output: said.append(output[0][0].double()))
    logits(model, ids)
    edit = write_facts(model, tokenizer, asked, rounds=1, max_steps=3, ridge=1e-12, layer=1)
    logits(model, ids)
    # the hook of a later layer sees what an earlier one said, so the first layer's memory is the same in both
    change = said[-1] - said[0]
    where = len(prompt.split()) - 1
    assert float(change[where].norm()) > 1e-2
    ((_, (rows, added)),) = edit.changes.items()
    value = memory.kv_proj.weight.detach().double()[memory.spec.hidden_size :]
    embedded = memory.table.weight.detach().double()[rows_read(model, tokenizer, f"{prompt} {answer}", 1)].flatten(1)
    gates = (said[-1] * (embedded @ value.T)).sum(1) / (embedded @ value.T).square().sum(1)
    torch.testing.assert_close(gates[:, None] * (embedded @ value.T), said[-1], rtol=0, atol=1e-4)
    assert (rows.diff() > 0).all() and added.shape == (len(rows), 16)


def test_the_solver_finds_the_least_squares_rows():
    """Against the normal equations in full, with rows that sites share."""
    generator = torch.Generator().manual_seed(0)
    sites_count, tables, dim, hidden, count = 7, 3, 4, 9, 11
    places = torch.randint(count, (sites_count, tables), generator=generator)
    mask = torch.rand(sites_count, tables, generator=generator) > 0.2
    fixed = torch.zeros(sites_count, tables, dim, dtype=torch.float64)
    sites = _Sites(torch.arange(count), places, mask, fixed, fixed[:, 0], list(range(tables)), None)
    value = torch.randn(hidden, tables * dim, generator=generator, dtype=torch.float64)
    gates = torch.rand(sites_count, 1, generator=generator, dtype=torch.float64)
    target = torch.randn(sites_count, hidden, generator=generator, dtype=torch.float64)
    design = torch.zeros(sites_count, hidden, count, dim, dtype=torch.float64)
    for s in range(sites_count):
        for j in range(tables):
            if mask[s, j]:
                design[s, :, places[s, j]] += gates[s] * value[:, j * dim : (j + 1) * dim]
    design = design.reshape(sites_count * hidden, count * dim)
    for ridge in (1e-3, 1.0):
        scale = ridge * float(gates.square().mean() * value.square().sum() / value.shape[1])
        normal = design.T @ design + scale * torch.eye(count * dim, dtype=torch.float64)
        expected = torch.linalg.solve(normal, design.T @ target.flatten()).view(count, dim)
        torch.testing.assert_close(_ridge(sites, value, gates, target, ridge), expected, rtol=0, atol=1e-7)


# ------------------------------------------------------------------------------------------------ edits


def test_edits_lie_on_top_of_each_other(tokenizer):
    model = empty("adapter")
    asked = facts(2)
    options = {"rounds": 1, "max_steps": 4}
    before = tensors(model)
    first = write_facts(model, tokenizer, asked[:1], **options)
    only_first = tensors(model)
    second = write_facts(model, tokenizer, [(asked[0][0], asked[1][1]), asked[1]], **options)  # and the same rows anew
    both = tensors(model)
    assert active_edits(model) == [first, second]
    second.undo()
    assert same(tensors(model), only_first)
    second.apply()
    assert same(tensors(model), both)
    first.undo()  # from below
    assert active_edits(model) == [second]
    ((layer, (rows, added)),) = second.changes.items()
    assert torch.equal(memories_of(model)[layer].table.weight[rows], added)  # nothing else lies on empty rows
    second.undo()
    assert same(tensors(model), before)
    assert active_edits(model) == []
    with pytest.raises(ValueError, match="not in force"):
        first.undo()
    first.apply()
    with pytest.raises(ValueError, match="in force already"):
        first.apply()


def test_a_saved_edit_comes_back(tokenizer, tmp_path):
    model = empty()
    before = tensors(model)
    edit = write_facts(model, tokenizer, facts(2), rounds=1, max_steps=4)
    written = tensors(model)
    edit.save(tmp_path / "edit.safetensors")
    assert (tmp_path / "edit.safetensors").stat().st_size < 4000
    edit.undo()
    loaded = MemoryEdit.load(tmp_path / "edit.safetensors", model)
    assert same(tensors(model), before)
    loaded.apply()
    assert same(tensors(model), written)

    with pytest.raises(ValueError, match="written for other memories: in front of layer 1"):
        MemoryEdit.load(tmp_path / "edit.safetensors", empty(seed=3))
    file = load_file(tmp_path / "edit.safetensors")
    save_file(file, tmp_path / "other.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="is not an edit of a memory: its format is 'pt'"):
        MemoryEdit.load(tmp_path / "other.safetensors", model)
    (tmp_path / "edit.safetensors").write_bytes((tmp_path / "edit.safetensors").read_bytes()[:-10])
    with pytest.raises(ValueError, match="truncated"):
        MemoryEdit.load(tmp_path / "edit.safetensors", model)


def test_training_in_between_is_noticed(tokenizer):
    model = empty()
    edit = write_facts(model, tokenizer, facts(1), rounds=1, max_steps=3)
    ((layer, (rows, _)),) = edit.changes.items()
    with torch.no_grad():
        memories_of(model)[layer].table.weight[rows[0]] += 1
    for act in (
        edit.undo,
        lambda: write_facts(model, tokenizer, facts(1)),
        lambda: erase_ngrams(model, tokenizer, ["a"]),
    ):
        with pytest.raises(ValueError, match="changed since they were edited"):
            act()


def test_an_edit_that_fails_leaves_the_model_as_it_was(tokenizer):
    model = empty().train()
    before = tensors(model)
    calls = []

    def fail(module, args, output):
        calls.append(module)
        if len(calls) == 5:
            raise RuntimeError("interrupted")

    memories_of(model)[1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="interrupted"):
        write_facts(model, tokenizer, facts(1))
    assert same(tensors(model), before)
    assert all(module.training for module in model.modules())
    assert active_edits(model) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"facts": []}, "`facts` is empty"),
        ({"facts": [("", "paris")]}, "needs a prompt and an answer"),
        ({"facts": [("paris is", "")]}, "needs a prompt and an answer"),
        ({"facts": [("a", "paris")]}, "No prompt ends in an n-gram of \\[3\\] tokens"),
        ({"layer": 7}, "`layer` 7 has no memory.*\\[0, 1\\]"),
        ({"orders": [4]}, "`orders` must be some of the memory's \\[2, 3\\], got \\[4\\]"),
        ({"orders": []}, "`orders` must be some"),
        ({"rounds": 0}, "`rounds` must be at least 1"),
        ({"max_steps": 0}, "`max_steps` must be at least 1"),
        ({"target_probability": 1.0}, "`target_probability` must lie between 0 and 1"),
        ({"ridge": -1.0}, "`ridge` must not be negative"),
    ],
)
def test_bad_arguments_are_named(arguments, message, tokenizer):
    with pytest.raises(ValueError, match=message):
        write_facts(empty(), tokenizer, **{"facts": [("the capital of", "paris")], **arguments})


def test_a_model_without_a_memory_in_use_is_refused(tokenizer, tiny_model):
    model = adapted()
    with model.disable_adapter(), pytest.raises(ValueError, match="no n-gram memory that is in use"):
        write_facts(model, tokenizer, facts(1))
    with pytest.raises(ValueError, match="no n-gram memory that is in use"):
        write_facts(tiny_model("llama"), tokenizer, facts(1))


# ------------------------------------------------------------------------------------------------ erasing


def test_rows_that_only_forgotten_texts_touch_become_zero(tokenizer):
    model = fill(engram("llama", "deepseek", engram_vocab_size=2000))
    forget, retain = texts(2, seed=5), texts(3, seed=6)
    before = tensors(model)
    kept = [logits(model, ids_of(tokenizer, text)) for text in retain]
    edit = erase_ngrams(model, tokenizer, forget)
    for layer, memory in memories_of(model).items():
        read = torch.cat([rows_read(model, tokenizer, text, layer) for text in forget]).unique()
        assert torch.equal(memory.table.weight[read], torch.zeros_like(memory.table.weight[read]))
        assert set(edit.changes[layer][0].tolist()) == set(read.tolist())
    edit.undo()
    assert same(tensors(model), before)
    assert all(torch.equal(logits(model, ids_of(tokenizer, t)), k) for t, k in zip(retain, kept, strict=True))


def test_shared_rows_are_solved_for(tokenizer):
    """Of two texts that share a bigram's rows: what is said about the one goes, about the other stays, as well as can be."""
    model = fill(engram("llama", "qwen_ple", engram_vocab_size=2000))
    forget, retain = ["red cat old bridge"], ["red cat new house"]
    said = {text: _values(model, tokenizer, text) for text in forget + retain}
    edit = erase_ngrams(model, tokenizer, forget, retain, ridge=1e-9)
    for layer, memory in memories_of(model).items():
        one, other = (rows_read(model, tokenizer, text, layer) for text in forget + retain)
        only = one[~torch.isin(one, other)]
        assert torch.equal(memory.table.weight[only], torch.zeros_like(memory.table.weight[only]))
        # no other choice of the shared rows would do better: the gradient of the squared error is zero
        shared = one[torch.isin(one, other)].unique()
        weight = memory.table.weight.detach().double().requires_grad_()
        value = memory.kv_proj.weight.detach().double()[memory.spec.hidden_size :]
        gone = weight[one.unique(dim=0)].flatten(1) @ value.T
        gone = gone[torch.isin(one.unique(dim=0), shared).any(1)]
        kept_rows = other.unique(dim=0)
        kept = weight[kept_rows].flatten(1) @ value.T - _of_rows(said[retain[0]][layer], other, kept_rows)
        loss = gone.square().sum() + kept.square().sum()
        (gradient,) = torch.autograd.grad(loss, weight)
        assert float(gradient[shared].abs().max()) < 1e-4 * float(value.square().sum())
    assert edit.report.locality.tokens == 4


def _values(model, tokenizer, text) -> dict[int, torch.Tensor]:
    return {
        layer: memory.table.weight.detach().double()[rows_read(model, tokenizer, text, layer)].flatten(1)
        @ memory.kv_proj.weight.detach().double()[memory.spec.hidden_size :].T
        for layer, memory in memories_of(model).items()
    }


def _of_rows(values: torch.Tensor, rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    places = [(rows == each).all(1).nonzero()[0, 0] for each in wanted]
    return values[torch.stack(places)]


def test_nothing_to_forget_is_an_error(tokenizer):
    with pytest.raises(ValueError, match="`forget_texts` is empty"):
        erase_ngrams(empty(), tokenizer, [])
