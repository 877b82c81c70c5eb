"""Mixtures whose experts are modules of their own: masks reach the rows of every expert by their tokens."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel, get_peft_model
from torch import nn

from engram_peft import EngramConfig, collect_statistics, extract_engram, merge_statistics

from .reference import covariance_of, relative_error


WIDTH, HIDDEN, EXPERTS, TOP_K = 8, 6, 3, 2


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(torch.relu(self.w1(x)))


class Mixture(nn.Module):
    """A router and experts; `gather` hands every expert its rows, in one of the ways that are in use."""

    def __init__(self, gather) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])
        self.gather = gather

    def chosen(self, x: torch.Tensor) -> torch.Tensor:
        """The experts of every token, `(T, k)`."""
        return self.gate(x.reshape(-1, WIDTH)).topk(TOP_K, dim=-1).indices

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = [self.experts[e](rows).sum(0) for e, rows in self.gather(x, self.chosen(x)) if len(rows)]
        return torch.stack(outputs)


def by_where(x, chosen):
    x = x.view(-1, WIDTH)
    for e in range(EXPERTS):
        yield e, x[torch.where((chosen == e).any(-1))[0]]


def by_position(x, chosen):
    """As Mixtral did."""
    x = x.view(-1, WIDTH)
    mask = nn.functional.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for e in range(EXPERTS):
        _, tokens = torch.where(mask[e])
        yield e, x[None, tokens].reshape(-1, WIDTH)


def by_repeating(x, chosen):
    """As DeepSeek did for training."""
    x = x.reshape(-1, x.shape[-1]).repeat_interleave(TOP_K, dim=0)
    flat = chosen.flatten()
    for e in range(EXPERTS):
        yield e, x[flat == e]


def by_sorting(x, chosen):
    """As DeepSeek did for inference: one gather, then slices."""
    order = chosen.flatten().argsort()
    rows = x.view(-1, WIDTH)[order // TOP_K]
    yield from enumerate(rows.split(torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()))


def by_mask(x, chosen):
    x = torch.flatten(x, 0, -2)
    for e in range(EXPERTS):
        yield e, x[(chosen == e).any(-1)].to(torch.float32).contiguous()


def by_index_select(x, chosen):
    for e in range(EXPERTS):
        yield e, torch.index_select(x.flatten(0, 1), 0, (chosen == e).any(-1).nonzero()[:, 0])


def by_buffer(x, chosen):
    """Into buffers of a fixed size, whose other rows are zero."""
    x = x.view(-1, WIDTH)
    buffers = x.new_zeros(EXPERTS, len(x) + 2, WIDTH)
    for e in range(EXPERTS):
        tokens = (chosen == e).any(-1).nonzero()[:, 0]
        buffers[e, : len(tokens)] = x[tokens]
    for e in range(EXPERTS):
        yield e, buffers[e]


GATHERS = [by_where, by_position, by_repeating, by_sorting, by_mask, by_index_select, by_buffer]


def mixture(gather) -> Mixture:
    torch.manual_seed(0)
    return Mixture(gather)


def data(batch: int = 4, length: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, length, WIDTH, generator=generator), torch.rand(batch, length, generator=generator) < 0.6


def expected_rows(model: Mixture, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """By the router's own choice of every token, one token at a time."""
    flat, rows = x.view(-1, WIDTH), {}
    for e, expert in enumerate(model.experts):
        mine = [t for t, chosen in enumerate(model.chosen(x).tolist()) if e in chosen and mask.flatten()[t]]
        rows[f"experts.{e}.w1"] = flat[mine]
        rows[f"experts.{e}.w2"] = torch.relu(flat[mine] @ expert.w1.weight.T).detach()
    return rows


@pytest.mark.parametrize("gather", GATHERS)
@pytest.mark.parametrize("full", [False, True])
def test_masks_reach_the_rows_of_every_expert(gather, full):
    model, (x, mask) = mixture(gather), data()
    mask = torch.ones_like(mask) if full else mask
    statistics = collect_statistics(model, [x], mask_fn=lambda batch: mask)
    for name, rows in expected_rows(model, x, mask).items():
        assert statistics.counts[name] == len(rows), name
        assert relative_error(statistics.covariance(name), covariance_of(rows)) < 1e-5, name


def test_it_equals_the_reference(oracle):
    model = mixture(by_where)
    weights = oracle.state_dict("routed.")
    model.load_state_dict({name: tensor for name, tensor in weights.items() if name.endswith(".weight")})
    mask = oracle.tensors["routed.mask"]
    statistics = collect_statistics(model, [oracle.tensors["routed.X"]], mask_fn=lambda batch: mask)
    assert statistics.counts == oracle.facts["routed"]["count"]
    for name in statistics.moments:
        expected = oracle.tensors[f"routed.C.{name}"]
        assert relative_error(statistics.covariance(name), expected) < oracle.facts["tolerance"]["routed"], name


@pytest.mark.parametrize("gather", GATHERS)
def test_rows_with_the_same_values_are_told_apart(gather):
    """Every token is the same row, and only one is selected: values say nothing, and no tolerance helps."""
    model = mixture(gather)
    x = data(1, 1)[0].expand(10, 6, WIDTH).clone()
    mask = torch.zeros(10, 6, dtype=torch.bool)
    mask[7, 3] = True
    statistics = collect_statistics(model, [x], mask_fn=lambda batch: mask)
    counts = [statistics.counts[f"experts.{e}.w1"] for e in range(EXPERTS)]
    assert sorted(counts) == [0, 1, 1]


@pytest.mark.parametrize("gather", [by_where, by_sorting])
def test_any_size_of_the_batch_is_right(gather):
    """One pass over many rows is the sum of passes over few."""
    model, (x, mask) = mixture(gather), data(40, 7)
    whole = collect_statistics(model, [x], mask_fn=lambda batch: mask)
    parts = [(x[i : i + 3], mask[i : i + 3]) for i in range(0, 40, 3)]
    masks = {id(part): its_mask for part, its_mask in parts}
    pieces = collect_statistics(model, [part for part, _ in parts], mask_fn=lambda batch: masks[id(batch)])
    assert whole.counts == pieces.counts
    for name in whole.moments:
        assert relative_error(pieces.covariance(name), whole.covariance(name)) < 1e-5, name


def test_rows_that_cannot_be_followed_are_refused():
    def shuffled(x, chosen):
        x = x.view(-1, WIDTH)
        for e in range(EXPERTS):
            yield e, torch.stack([x[t].roll(0) for t in torch.where((chosen == e).any(-1))[0]])

    model, (x, mask) = mixture(shuffled), data()
    with pytest.raises(ValueError, match=r"rows that reach experts.\d.w1 cannot be followed"):
        collect_statistics(model, [x], mask_fn=lambda batch: mask)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    # without a mask every row counts, and nothing has to be followed
    everything = collect_statistics(model, [x])
    assert sum(everything.counts[f"experts.{e}.w1"] for e in range(EXPERTS)) == TOP_K * mask.numel()


def test_an_expert_that_is_never_chosen_is_left_as_it_is():
    model, (x, mask) = mixture(by_where), data()
    with torch.no_grad():
        x[..., 0] = 1
        model.gate.weight[0] = 0
        model.gate.weight[0, 0] = -1e4
    target = collect_statistics(model, [x], mask_fn=lambda batch: mask)
    assert target.counts["experts.0.w1"] == target.counts["experts.0.w2"] == 0
    total = merge_statistics(target, collect_statistics(model, [x + 1e-1], mask_fn=lambda batch: mask))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = EngramConfig(target_modules=["w1", "w2"])
    edited = get_peft_model(model, config)
    report = extract_engram(edited, target, total)
    assert len(report.layers) == 4
    after = edited.merge_and_unload().state_dict()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {"gate.weight", "experts.0.w1.weight", "experts.0.w2.weight"}


@pytest.mark.parametrize("gather", [by_where, by_sorting])
def test_an_adapter_of_experts_is_one_of_linear_layers(gather, tmp_path):
    """Forward, merge, unmerge, save and export as LoRA."""
    model, (x, mask) = mixture(gather), data()
    edited = get_peft_model(model, EngramConfig(target_modules=["w1", "w2"], alpha=0.5))
    target = collect_statistics(edited, [x], mask_fn=lambda batch: mask)
    total = merge_statistics(target, collect_statistics(edited, [x], mask_fn=lambda batch: ~mask))
    extract_engram(edited, target, total)
    with edited.disable_adapter():
        base = edited(x)
    unmerged = edited(x)
    assert relative_error(unmerged, base) > 1e-2
    edited.merge_adapter()
    assert relative_error(edited(x), unmerged) < 1e-5
    edited.unmerge_adapter()
    assert torch.equal(edited(x), unmerged)
    edited.save_pretrained(tmp_path / "engram")
    edited.base_model.save_as_lora(tmp_path / "lora")
    for name in ("engram", "lora"):
        loaded = PeftModel.from_pretrained(mixture(gather), tmp_path / name)
        assert relative_error(loaded(x), unmerged) < 1e-5, name


def test_a_layer_that_is_no_expert_must_still_see_every_token():
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.fc(x[:, :2])

    x, mask = data()
    with pytest.raises(ValueError, match="does not see one row a token"):
        collect_statistics(Part(), [x], mask_fn=lambda batch: mask)
