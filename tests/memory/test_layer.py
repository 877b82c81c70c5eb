"""What every variant of the layer must satisfy, whatever its numbers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from engram_peft.memory import NgramMemory, NgramTable, token_reach
from engram_peft.memory.layer import BranchRMSNorm, DilatedConv, NgramGate

from .tiny import HIDDEN, VARIANTS, VOCAB, forward, forward_in_steps, random_ids, random_states, tiny_spec, trained


variants = pytest.mark.parametrize("variant", VARIANTS)
LENGTH = 24  # longer than any look-back


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return actual.shape == expected.shape and (actual - expected).abs().max().item() < 2e-6


# ------------------------------------------------------------------------------------------------- calls and documents


@pytest.mark.parametrize("steps", [[1] * LENGTH, [10, 1, 13], [2, 3, 19], [LENGTH]], ids=str)
@pytest.mark.parametrize("branches", [1, 2])
@variants
def test_steps_equal_one_pass(variant: str, branches: int, steps: list[int]) -> None:
    memory = trained(tiny_spec(variant, hc_mult=branches))
    ids, states = random_ids(3, LENGTH), random_states(memory.spec, 3, LENGTH)
    attention_mask = torch.ones_like(ids)
    attention_mask[0, :4] = attention_mask[1, 12:14] = 0  # on the left, and in the middle of a continued chat
    position_ids = torch.arange(LENGTH).repeat(3, 1)
    position_ids[2, 11:] -= 11  # two documents
    documents = {"attention_mask": attention_mask, "position_ids": position_ids}
    full = forward(memory, states, ids, **documents)
    assert close(forward_in_steps(memory, states, ids, steps, **documents), full)


@variants
def test_packed_documents_equal_separate_ones(variant: str) -> None:
    memory = trained(tiny_spec(variant))
    ids, states = random_ids(1, LENGTH), random_states(memory.spec, 1, LENGTH)
    cuts = [0, 1, 2, 13, LENGTH]
    documents = list(zip(cuts[:-1], cuts[1:], strict=True))
    alone = torch.cat([forward(memory, states[:, a:b], ids[:, a:b]) for a, b in documents], dim=1)
    position_ids = torch.cat([torch.arange(b - a) for a, b in documents])[None]
    segment_ids = torch.cat([torch.full((b - a,), i) for i, (a, b) in enumerate(documents)])[None]
    assert close(forward(memory, states, ids, position_ids=position_ids), alone)
    assert close(forward(memory, states, ids, segment_ids=segment_ids), alone)


@pytest.mark.parametrize("side", ["left", "right"])
@variants
def test_padding_changes_nothing(variant: str, side: str) -> None:
    memory = trained(tiny_spec(variant))
    ids, states = random_ids(2, LENGTH), random_states(memory.spec, 2, LENGTH)
    tokens = slice(5, None) if side == "left" else slice(0, -5)
    mask = torch.zeros_like(ids)
    mask[:, tokens] = 1
    delta = forward(memory, states, ids, attention_mask=mask)
    assert close(delta[:, tokens], forward(memory, states[:, tokens], ids[:, tokens]))
    assert delta[mask == 0].count_nonzero() == 0


@pytest.mark.parametrize("variant", ["deepseek", "qwen_ple", "needle"])
def test_masked_tokens_are_zero_for_the_convolution(variant: str) -> None:
    """After its norm too: a norm would make anything but zero as large as everything else. Biases do not matter."""
    memory = trained(tiny_spec(variant))
    ids = random_ids(1, LENGTH)
    mask = torch.ones_like(ids)
    mask[:, 7:9] = 0
    history = F.pad(ids, (memory.spec.ids_lookback, 0))
    reach = token_reach(ids, attention_mask=mask, limit=memory.spec.lookback)
    _, conv_inputs = memory(random_states(memory.spec, 1, LENGTH), history, reach)
    assert conv_inputs[..., 7:9].count_nonzero() == 0
    assert conv_inputs[..., [6, 10]].count_nonzero() == conv_inputs[..., [6, 10]].numel()


@variants
def test_batches_split(variant: str) -> None:
    memory = trained(tiny_spec(variant))
    ids, states = random_ids(4, LENGTH), random_states(memory.spec, 4, LENGTH)
    halves = [forward(memory, states[part], ids[part]) for part in (slice(0, 2), slice(2, 4))]
    assert close(torch.cat(halves), forward(memory, states, ids))


@variants
def test_repeated_ngrams_are_projected_once(variant: str) -> None:
    """Four answers to one prompt: the same outputs and gradients, from a quarter of the projections."""
    memory = trained(tiny_spec(variant))
    ids, states = random_ids(1, 70).repeat(4, 1), random_states(memory.spec, 4, 70)
    projected = []
    memory.kv_proj.register_forward_pre_hook(lambda module, args: projected.append(args[0].shape[:-1].numel()))
    together = copy.deepcopy(memory)
    forward(together, states, ids).sum().backward()
    delta = forward(memory, states, ids)
    assert projected[-1] <= 70
    alone = torch.cat([forward(memory, state[None, :35], ids[:1, :35]) for state in states])
    assert close(delta[:, :35], alone)
    for state, text in zip(states, ids, strict=True):
        # Without its repetitions each text is projected in full.
        forward(memory, state[None], text[None]).sum().backward()
    assert projected[-1] == 70
    for name, parameter in memory.named_parameters():
        torch.testing.assert_close(together.get_parameter(name).grad, parameter.grad, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------- the parts


@pytest.mark.parametrize("length", [1, 5, LENGTH])
@pytest.mark.parametrize("past", [False, True])
def test_convolution_is_its_definition(past: bool, length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    conv = DilatedConv(channels=3, kernel_size=4, dilation=2, identity=False)
    weight = torch.randn(3, 1, 4, generator=generator)
    conv.load_state_dict({"weight": weight})
    inputs = torch.randn(2, length, 3, generator=generator)
    before = torch.randn(2, 3, 6, generator=generator)
    reach = torch.randint(0, 7, (2, length), generator=generator)
    outputs = conv(inputs, reach, before if past else None)
    values = torch.cat([before.mT if past else torch.zeros(2, 6, 3), inputs], dim=1)
    for row in range(2):
        for t in range(length):
            steps = [(tap, 2 * (3 - tap)) for tap in range(4)]
            allowed = [values[row, 6 + t - s] * weight[:, 0, tap] for tap, s in steps if s <= reach[row, t]]
            assert close(outputs[row, t], sum(allowed, torch.zeros(3)))


def test_convolution_never_touches_what_it_must_not_read() -> None:
    conv = DilatedConv(channels=2, kernel_size=4, dilation=2, identity=True)
    inputs = torch.ones(1, LENGTH, 2)
    inputs[:, :10] = torch.nan
    reach = token_reach(torch.zeros(1, LENGTH), segment_ids=(torch.arange(LENGTH) >= 10)[None].long(), limit=6)
    outputs = conv(inputs, reach, None)
    assert torch.equal(outputs[:, 10:], inputs[:, 10:])


def test_gates_at_a_score_of_zero() -> None:
    """`sign(0)` is 0, so the gate is 1/2 exactly; `copysign` leaves the clamped root, 0.001."""
    zeros = torch.zeros(1, 1, 1, HIDDEN)
    gates = {kind: NgramGate(tiny_spec("deepseek", gate=kind)) for kind in ("signed_sqrt", "copysign", "sigmoid")}
    assert gates["signed_sqrt"](zeros, zeros).item() == 0.5
    assert gates["sigmoid"](zeros, zeros).item() == 0.5
    assert gates["copysign"](zeros, zeros).item() == torch.sigmoid(torch.tensor(1e-3)).item()


@pytest.mark.parametrize("kind", ["signed_sqrt", "copysign"])
def test_derivative_of_the_gate_near_the_clamp(kind: str) -> None:
    """Below 1e-6 the root is constant, above its derivative is 1 / (2 sqrt(s)): large, never infinite."""
    gate = NgramGate(tiny_spec("deepseek", gate=kind, norm_eps=1e-6))
    key = torch.ones(1, 1, 1, HIDDEN)
    score = HIDDEN**0.5  # of a query that equals the key; <q, k> / sqrt(d)

    def derivative(target: float) -> float:
        """Of the gate by the score, at a score of `target`: the query is mostly orthogonal to the key."""
        orthogonal = torch.tensor([1.0, -1.0] * (HIDDEN // 2))
        part = torch.tensor(target / score, requires_grad=True)
        gate(orthogonal + part * key, key).sum().backward()
        return part.grad.item() / score

    assert derivative(5e-7) == 0 == derivative(-5e-7)
    for target in (1e-4, -1e-4):
        assert derivative(target) == pytest.approx(0.25 / (2 * 1e-4**0.5), rel=0.02)


def test_rms_norm_of_the_convolution_matches_torch() -> None:
    """It is computed from the value alone, once for all branches."""
    memory = trained(tiny_spec("qwen_ple", hc_mult=2))
    ids, states = random_ids(2, LENGTH), random_states(memory.spec, 2, LENGTH)
    history = F.pad(ids, (2, 0))
    reach = token_reach(ids, limit=memory.spec.lookback)
    _, conv_inputs = memory(states, history, reach)
    key, value = memory._key_value(history, reach, states)
    gated = memory.gate(states, key) * value.unsqueeze(-2)
    expected = F.rms_norm(gated, (HIDDEN,), eps=memory.spec.conv_norm_eps)
    assert close(conv_inputs.mT.unflatten(-1, (2, HIDDEN)), expected)


# ------------------------------------------------------------------------------------------------- the beginning


@variants
def test_a_new_memory_adds_nothing_and_can_learn(variant: str) -> None:
    memory = NgramMemory(tiny_spec(variant), 1)
    ids, states = random_ids(2, LENGTH), random_states(memory.spec, 2, LENGTH)
    delta = forward(memory, states, ids)
    assert delta.count_nonzero() == 0
    delta.backward(torch.randn(delta.shape, generator=torch.Generator().manual_seed(1)))
    assert memory.table.weight.grad.count_nonzero() > 0
    assert all(parameter.grad.isfinite().all() for parameter in memory.parameters())


@variants
def test_locality(variant: str) -> None:
    """After training on one text, a text without any of its rows is what it was, to the bit."""
    spec = tiny_spec(variant, vocab_size=5003, compressed_vocab_size=1000, bias=False)
    memory = NgramMemory(spec, 1)
    optimizer = torch.optim.AdamW(memory.parameters(), lr=0.1, weight_decay=0.0)
    ids, other = random_ids(1, 8, seed=1) + 100, random_ids(1, 8, seed=2) + 500
    for step in range(3):
        optimizer.zero_grad()
        forward(memory, random_states(spec, 1, 8, seed=step), ids).square().add(1).sum().backward()
        memory.table.weight.grad.add_(torch.sign(memory.table.weight.grad))
        delta = forward(memory, random_states(spec, 1, 8, seed=step), ids)
        (delta - 1).square().sum().backward()
        optimizer.step()
    touched = memory.table.weight.detach().abs().sum(-1) > 0

    def rows(ids: torch.Tensor) -> torch.Tensor:
        history = F.pad(ids, (spec.ids_lookback, 0))
        return memory.hash(history, token_reach(ids, limit=spec.lookback)) + memory.table.offsets

    assert forward(memory, random_states(spec, 1, 8), ids).count_nonzero() > 0
    assert not touched[rows(other)].any()
    assert forward(memory, random_states(spec, 1, 8), other).count_nonzero() == 0


def test_constants_are_restored_after_the_meta_device() -> None:
    expected = trained(tiny_spec("deepseek"))
    with torch.device("meta"):
        memory = NgramMemory(expected.spec, 1)
    memory.to_empty(device="cpu")
    memory.load_state_dict(expected.state_dict())
    memory.reset_buffers()
    ids, states = random_ids(2, LENGTH), random_states(memory.spec, 2, LENGTH)
    assert torch.equal(forward(memory, states, ids), forward(expected, states, ids))


@pytest.mark.parametrize("variant", ["deepseek", "needle"])
def test_reset_parameters_restores_a_new_memory(variant: str) -> None:
    memory = trained(tiny_spec(variant))
    memory.reset_parameters()
    new = NgramMemory(memory.spec, 1)
    for name, parameter in memory.named_parameters():
        if name != "kv_proj.weight":
            assert torch.equal(parameter, new.get_parameter(name))
    assert 0.5 < memory.kv_proj.weight.std() * memory.spec.memory_dim**0.5 < 2


# ------------------------------------------------------------------------------------------------- neighbours


@variants
def test_compiles_without_a_graph_break(variant: str) -> None:
    memory = trained(tiny_spec(variant, hc_mult=2))
    ids, states = random_ids(2, LENGTH), random_states(memory.spec, 2, LENGTH)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    compiled = torch.compile(forward, fullgraph=True, backend="eager")
    expected = forward(memory, states, ids, attention_mask=mask)
    assert close(compiled(memory, states, ids, attention_mask=mask), expected)


@pytest.mark.parametrize("variant", ["qwen_ple", "needle"])
def test_exports(variant: str) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory = trained(tiny_spec(variant))

        def forward(self, states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return forward(self.memory, states, ids)

    model = Model()
    length = torch.export.Dim("length", min=4, max=4096)
    example = (random_states(model.memory.spec, 2, LENGTH), random_ids(2, LENGTH))
    program = torch.export.export(model, example, dynamic_shapes={"states": {1: length}, "ids": {1: length}})
    states, ids = random_states(model.memory.spec, 2, 2 * LENGTH, seed=1), random_ids(2, 2 * LENGTH, seed=1)
    assert close(program.module()(states, ids), model(states, ids))


def test_sparse_gradients_equal_dense_ones() -> None:
    dense = trained(tiny_spec("deepseek"))
    sparse = copy.deepcopy(dense)
    sparse.table.sparse = True
    ids, states = random_ids(2, LENGTH), random_states(dense.spec, 2, LENGTH)
    for memory in (dense, sparse):
        forward(memory, states, ids).sum().backward()
    gradient = sparse.table.weight.grad
    assert gradient.is_sparse and gradient._nnz() <= 2 * LENGTH * dense.spec.n_tables
    assert torch.allclose(gradient.to_dense(), dense.table.weight.grad, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@variants
def test_low_precision(variant: str, dtype: torch.dtype) -> None:
    memory = trained(tiny_spec(variant))
    ids, states = random_ids(2, LENGTH), random_states(memory.spec, 2, LENGTH)
    expected = forward(memory, states, ids)
    delta = forward(memory.to(dtype), states.to(dtype), ids)
    assert delta.dtype == dtype
    assert (delta - expected).abs().max().item() < 0.03 * expected.abs().max().item()


def test_autocast() -> None:
    memory = trained(tiny_spec("qwen_ple"))
    ids, states = random_ids(2, LENGTH), random_states(memory.spec, 2, LENGTH)
    expected = forward(memory, states, ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        delta = forward(memory, states, ids)
    assert (delta - expected).abs().max().item() < 0.03 * expected.abs().max().item()


def test_another_module_may_hold_the_rows() -> None:
    memory = trained(tiny_spec("deepseek"))
    ids, states = random_ids(2, LENGTH), random_states(memory.spec, 2, LENGTH)
    expected = forward(memory, states, ids)
    parts = memory.table.weight.detach().split(list(memory.table.head_sizes))

    class ByHead(torch.nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return torch.stack([part[rows[..., head]] for head, part in enumerate(parts)], dim=-2)

    memory.table = ByHead()
    assert torch.equal(forward(memory, states, ids), expected)


def test_one_parameter_a_leaf() -> None:
    """Whoever initialises parameters one at a time, as transformers does, can rely on it."""
    for module in trained(tiny_spec("deepseek")).modules():
        if isinstance(module, NgramTable | BranchRMSNorm | DilatedConv):
            assert [name for name, _ in module.named_parameters(recurse=False)] == ["weight"]


def test_shapes_that_do_not_fit() -> None:
    memory = trained(tiny_spec("deepseek", hc_mult=2))
    ids = random_ids(1, 4)
    reach = token_reach(ids, limit=9)
    with pytest.raises(ValueError, match="2 branches of 8"):
        memory(torch.zeros(1, 4, HIDDEN), F.pad(ids, (2, 0)), reach)
    with pytest.raises(ValueError, match="`ids` must hold the 2 tokens before"):
        memory(torch.zeros(1, 4, 2, HIDDEN), ids, reach)
    assert int(ids.max()) < VOCAB
