"""Optimizers for sparse tables: against torch's own on the same gradients, and inside what trains models."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from transformers import (
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
    get_scheduler,
)

from engram_peft.memory import NgramMemory, NgramMemorySpec, NgramTable
from engram_peft.models.engram import EngramForCausalLM, EngramLMConfig
from engram_peft.training import EngramOptimizer, RowSparseAdam, create_optimizer

from .processes import on_processes


ROWS, DIM = 12, 8
SPEC = NgramMemorySpec(hidden_size=32, layer_ids=(0,), vocab_size=11, compressed_vocab_size=99, n_heads=2, head_dim=4)


def row_gradients(steps: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each step some rows, one of them twice, and a gradient for each; row 0 never."""
    generator = torch.Generator().manual_seed(seed)
    gradients = []
    for _ in range(steps):
        rows = 1 + torch.randperm(ROWS - 1, generator=generator)[:4]
        rows = torch.cat([rows, rows[:1]])
        gradients.append((rows, torch.randn(len(rows), DIM, generator=generator)))
    return gradients


def sparse(rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(rows[None], values, (ROWS, DIM), check_invariants=True)


def new_table(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1)).to(dtype))


def test_exact_moments_are_those_of_dense_adam():
    table, dense = new_table(), new_table()
    optimizer = RowSparseAdam([table], lr=0.1, betas=(0.8, 0.9), moments="exact")
    adam = torch.optim.Adam([dense], lr=0.1, betas=(0.8, 0.9))
    for rows, values in row_gradients(9):
        before, dense_before = table.detach().clone(), dense.detach().clone()
        table.grad = sparse(rows, values)
        dense.grad = table.grad.to_dense()
        optimizer.step()
        adam.step()
        state, expected = optimizer.state[table], adam.state[dense]
        missed = state["step"] - state["last_step"][:, None]
        torch.testing.assert_close(state["exp_avg"] * 0.8**missed, expected["exp_avg"], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(state["exp_avg_sq"] * 0.9**missed, expected["exp_avg_sq"], rtol=1e-5, atol=1e-7)
        # Dense Adam also moves rows by momentum alone; the rows that were touched move alike.
        torch.testing.assert_close((table - before)[rows], (dense - dense_before)[rows], rtol=1e-4, atol=1e-6)


def test_lazy_moments_are_those_of_an_adam_that_ran_on_the_touched_steps_alone():
    table = new_table()
    single = [nn.Parameter(row.clone()) for row in table.detach()]
    adams = [torch.optim.Adam([row], lr=0.1, betas=(0.8, 0.999)) for row in single]
    optimizer = RowSparseAdam([table], lr=0.1, betas=(0.8, 0.999), moments="lazy")
    for rows, values in row_gradients(9):
        table.grad = sparse(rows, values)
        for row in rows.unique().tolist():
            single[row].grad = table.grad.to_dense()[row]
            adams[row].step()
        optimizer.step()
    torch.testing.assert_close(table.detach(), torch.stack([row.detach() for row in single]), rtol=1e-5, atol=1e-6)
    assert optimizer.state[table]["row_step"].tolist() == [
        len(adam.state) and int(adam.state[row]["step"]) for adam, row in zip(adams, single, strict=True)
    ]


@pytest.mark.parametrize("moments", ["exact", "lazy"])
def test_where_every_step_touches_every_row_all_kinds_agree_with_torch(moments: str):
    table, sparse_adam_table = new_table(), new_table()
    # SparseAdam adds its epsilon before the bias correction, Adam after it: one too small to tell.
    optimizer = RowSparseAdam([table], lr=0.1, eps=1e-20, moments=moments)
    reference = torch.optim.SparseAdam([sparse_adam_table], lr=0.1, eps=1e-20)
    for seed in range(5):
        values = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(seed))
        table.grad = sparse_adam_table.grad = sparse(torch.arange(ROWS), values)
        optimizer.step()
        reference.step()
    torch.testing.assert_close(table, sparse_adam_table, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("row_wise", [False, True])
@pytest.mark.parametrize("moments", ["exact", "lazy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_a_gradient_keep_their_bits(moments: str, row_wise: bool, dtype: torch.dtype):
    table = new_table(dtype)
    optimizer = RowSparseAdam([table], lr=0.1, moments=moments, row_wise=row_wise)
    for rows, values in row_gradients(5):
        before = table.detach().clone()
        table.grad = sparse(rows, values.to(dtype))
        optimizer.step()
        changed = (table != before).any(1)
        assert changed.nonzero()[:, 0].tolist() == rows.unique().tolist()


def test_row_wise_second_moment_is_the_mean_over_a_row():
    """Of a table whose row is repeated in a one-column table: the gradient's root mean square stands for the gradient."""
    table, column = new_table(), nn.Parameter(torch.zeros(ROWS, 1))
    optimizer = RowSparseAdam([table], lr=0.1, betas=(0.0, 0.9), row_wise=True)
    adam = torch.optim.Adam([column], lr=0.1, betas=(0.0, 0.9))
    for rows, values in row_gradients(9):
        before, column_before = table.detach().clone(), column.detach().clone()
        table.grad = sparse(rows, values)
        grad = table.grad.to_dense()
        size = grad.square().mean(1, keepdim=True).sqrt()
        column.grad = size
        optimizer.step()
        adam.step()
        direction = grad / size.clamp_min(1e-30)
        torch.testing.assert_close(table - before, direction * (column - column_before), rtol=1e-4, atol=1e-6)
    assert set(optimizer.state[table]) == {"step", "last_step", "exp_avg_sq"}


@pytest.mark.parametrize("row_wise", [False, True])
@pytest.mark.parametrize("moments", ["exact", "lazy"])
def test_dense_gradients_are_taken_too(moments: str, row_wise: bool):
    table, same = new_table(), new_table()
    optimizer = RowSparseAdam([table, same], lr=0.1, moments=moments, row_wise=row_wise)
    for rows, values in row_gradients(4):
        table.grad = sparse(rows, values)
        same.grad = table.grad.to_dense()
        optimizer.step()
    assert torch.equal(table, same)


def test_a_step_without_any_row_counts_as_a_step():
    table, dense = new_table(), new_table()
    optimizer, adam = RowSparseAdam([table], lr=0.1), torch.optim.Adam([dense], lr=0.1)
    for rows, values in [
        *row_gradients(1),
        (torch.tensor([], dtype=torch.long), torch.zeros(0, DIM)),
        *row_gradients(1),
    ]:
        before, dense_before = table.detach().clone(), dense.detach().clone()
        table.grad = sparse(rows, values)
        dense.grad = table.grad.to_dense()
        optimizer.step()
        adam.step()
        torch.testing.assert_close((table - before)[rows], (dense - dense_before)[rows], rtol=1e-4, atol=1e-6)


def test_row_wise_state_is_a_twentieth_of_dense_adams_at_most():
    def state_bytes(optimizer: torch.optim.Optimizer, table: nn.Parameter) -> int:
        table.grad = torch.ones_like(table)
        optimizer.step()
        return sum(value.nbytes for value in optimizer.state[table].values() if isinstance(value, torch.Tensor))

    table = nn.Parameter(torch.zeros(1000, 64))
    dense = state_bytes(torch.optim.Adam([table]), table)
    assert state_bytes(RowSparseAdam([table], betas=(0.0, 0.95), row_wise=True), table) <= 0.05 * dense


class Reader(nn.Module):
    """Tables, a projection, biases: what `create_optimizer` tells apart, in the small."""

    def __init__(self, sparse: bool = True, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.table = NgramTable((7, 11), 4)
            self.hidden = nn.Linear(8, 16)
            self.out = nn.Linear(16, 3)
        self.table.sparse = sparse
        nn.init.normal_(self.table.weight, generator=torch.Generator().manual_seed(0))
        self.to(dtype)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """`(batch, length, 2)` rows, `(batch, length)` classes."""
        logits = self.out(self.hidden(self.table(input_ids).flatten(-2)).tanh())
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()), "logits": logits}


def reader_batch(seed: int, size: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # Few rows of many, the first of them in every sequence.
    rows = torch.randint(0, 4, (size, 3, 2), generator=generator) + torch.tensor([seed % 4, 0])
    rows[:, 0] = 0
    return {"input_ids": rows, "labels": torch.randint(0, 3, (size, 3), generator=generator)}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range, max_norm: float | None = None) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        model(**reader_batch(seed))["loss"].backward()
        if max_norm is not None:
            clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()


def equal_states(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().items(), second.state_dict().items(), strict=True)
    return all(name == other and torch.equal(a, b) for (name, a), (other, b) in pairs)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("backwards", [1, 2])
def test_clipping_counts_and_clips_sparse_gradients(backwards: int, norm_type: float):
    model, dense = Reader(), Reader(sparse=False)
    create_optimizer(model)
    for seed in range(backwards):
        model(**reader_batch(seed))["loss"].backward()
        dense(**reader_batch(seed))["loss"].backward()
    assert model.table.weight.grad.is_sparse and not dense.table.weight.grad.is_sparse
    norm = clip_grad_norm_(model.parameters(), 0.01, norm_type)
    torch.testing.assert_close(norm, clip_grad_norm_(dense.parameters(), 0.01, norm_type))
    assert norm > 0.01
    for ours, theirs in zip(model.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.to_dense(), theirs.grad)


def test_norms_of_sparse_tensors_that_zeros_would_change_are_refused():
    create_optimizer(Reader())
    tensor = sparse(torch.tensor([1]), torch.ones(1, DIM))
    for options in ({"ord": -1}, {"dim": 0}, {"dim": [0, 1], "keepdim": True}):
        with pytest.raises(NotImplementedError, match="order >= 0"):
            torch.linalg.vector_norm(tensor, **options)


def test_one_optimizer_is_three():
    model, reference = Reader(), Reader()
    optimizer = create_optimizer(model, lr=0.01, weight_decay=0.2)
    members = [
        torch.optim.Muon([reference.hidden.weight, reference.out.weight], lr=0.01, weight_decay=0.2, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([reference.hidden.bias, reference.out.bias], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0),
        RowSparseAdam([reference.table.weight], lr=0.05, betas=(0.9, 0.95)),
    ]  # fmt: skip
    train(model, optimizer, range(4))
    for seed in range(4):
        reference.zero_grad()
        reference(**reader_batch(seed))["loss"].backward()
        for member in members:
            member.step()
    assert equal_states(model, reference)


def by_algorithm(model: nn.Module, optimizer: EngramOptimizer) -> dict[tuple[str, float, float], set[str]]:
    """Names of the parameters under their algorithm, rate and weight decay."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        (group["algorithm"], group["lr"], group["weight_decay"]): {names[p] for p in group["params"]}
        for group in optimizer.param_groups
    }


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "opt"])
def test_who_is_stepped_by_what(tiny_model: Callable[..., PreTrainedModel], kind: str):
    model = tiny_model(kind)
    model.base_model.memory = NgramMemory(SPEC, 0)
    groups = by_algorithm(model, create_optimizer(model, lr=0.01, weight_decay=0.3))
    assert set(groups) == {
        ("muon", 0.01, 0.3),
        ("adamw", 0.01, 0.3),
        ("adamw", 0.01, 0.0),
        ("row_sparse_adam", 0.05, 0.0),
    }
    muon, decayed = groups["muon", 0.01, 0.3], groups["adamw", 0.01, 0.3]
    assert groups["row_sparse_adam", 0.05, 0.0] == {
        n for n, _ in model.named_parameters() if n.endswith("memory.table.weight")
    }
    assert sum(map(len, groups.values())) == len(list(model.parameters()))
    shapes = {name: p.shape for name, p in model.named_parameters()}
    assert all(len(shapes[name]) == 2 for name in muon)
    # Two layers: q, k, v and o or their fusion; gate, up, down or the two of a plain feed-forward block.
    assert len(muon) == {"llama": 14, "qwen3": 14, "gpt2": 8, "opt": 12}[kind]
    assert not any(
        "embed" in name or "wte" in name or "wpe" in name or "lm_head" in name or "memory" in name for name in muon
    )
    assert all(len(shapes[name]) > 1 for name in decayed) and any("memory.kv_proj.weight" in name for name in decayed)
    norms = {name for name in shapes if "norm" in name or ".ln_" in name}
    assert norms and groups["adamw", 0.01, 0.0] == norms | {name for name in shapes if name.endswith("bias")}


def test_what_is_frozen_stays_out(tiny_model: Callable[..., PreTrainedModel]):
    model = tiny_model("llama").requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        create_optimizer(model)
    model.model.memory = NgramMemory(SPEC, 0)
    groups = by_algorithm(model, create_optimizer(model))
    assert {name.split(".")[1] for names in groups.values() for name in names} == {"memory"}


def test_adapters_are_the_rest(tiny_model: Callable[..., PreTrainedModel]):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules=["q_proj"]))
    groups = by_algorithm(model, create_optimizer(model, weight_decay=0.1))
    assert set(groups) == {("adamw", 1e-3, 0.1)}


def test_without_muon_adamw_takes_its_matrices():
    model = Reader()
    groups = by_algorithm(model, create_optimizer(model, lr=0.01, weight_decay=0.1, muon=False))
    assert groups["adamw", 0.01, 0.1] == {"hidden.weight", "out.weight"}


def test_a_torch_without_muon_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ImportError, match="muon=False"):
        create_optimizer(Reader())
    create_optimizer(Reader(), muon=False)


def test_schedulers_keep_the_ratio():
    optimizer = create_optimizer(Reader(), lr=0.01, table_lr_ratio=7)
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=9)
    for _ in range(8):
        optimizer.step()
        scheduler.step()
        rates = {group["algorithm"]: group["lr"] for group in optimizer.param_groups}
        assert rates["row_sparse_adam"] == pytest.approx(7 * rates["muon"]) and rates["muon"] == rates["adamw"] > 0


@pytest.mark.parametrize("row_wise", [False, True])
@pytest.mark.parametrize("moments", ["exact", "lazy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_state_continues_to_the_bit(dtype: torch.dtype, moments: str, row_wise: bool):
    options = {"lr": 0.01, "moments": moments, "row_wise": row_wise}
    whole = Reader(dtype=dtype)
    optimizer = create_optimizer(whole, **options)
    train(whole, optimizer, range(3), max_norm=0.1)

    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = copy.deepcopy(whole)
    # Other options than those saved: a loaded state brings its own, as with every optimizer of torch.
    loaded = create_optimizer(resumed, lr=1.0)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    train(whole, optimizer, range(3, 6), max_norm=0.1)
    train(resumed, loaded, range(3, 6), max_norm=0.1)
    assert equal_states(whole, resumed)
    state = loaded.state[resumed.table.weight]
    assert state["exp_avg_sq"].dtype == torch.float32
    assert state["last_step" if moments == "exact" else "row_step"].dtype == torch.int32


def test_loading_takes_a_copy():
    model = Reader()
    optimizer = create_optimizer(model)
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    other = create_optimizer(copy.deepcopy(model))
    other.load_state_dict(saved)
    before = copy.deepcopy(saved)
    train(model, other, range(2))  # gradients go to `model`, not to the copy: nothing to step
    other.param_groups[-1]["params"][0].grad = torch.ones(18, 4)
    other.step()
    for index, state in before["state"].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(saved["state"][index][key]))


def test_a_copied_optimizer_steps_its_own_copy():
    pair = nn.ModuleDict({"model": Reader()})
    optimizer = create_optimizer(pair)
    train(pair["model"], optimizer, range(2))
    copied, copied_optimizer = copy.deepcopy((pair, optimizer))
    train(pair["model"], optimizer, range(2, 4))
    train(copied["model"], copied_optimizer, range(2, 4))
    assert equal_states(pair, copied)


def test_a_closure_is_called_once_with_gradients():
    model, same = Reader(), Reader()
    optimizer, calls = create_optimizer(model), []

    def closure() -> torch.Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = model(**reader_batch(0))["loss"]
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    train(same, create_optimizer(same), range(1))
    assert calls == [1] and loss.requires_grad and equal_states(model, same)


def test_parameters_can_be_added():
    model, extra = Reader(), nn.Linear(3, 3)
    optimizer = create_optimizer(model, lr=0.01)
    optimizer.add_param_group({"params": [extra.weight], "algorithm": "muon", "weight_decay": 0.0})
    optimizer.add_param_group({"params": [extra.bias]})
    before = copy.deepcopy(extra)
    extra(torch.ones(1, 3)).square().sum().backward()
    optimizer.step()
    adam = torch.optim.AdamW([before.bias], lr=0.01)
    muon = torch.optim.Muon([before.weight], lr=0.01, weight_decay=0.0)
    before(torch.ones(1, 3)).square().sum().backward()
    adam.step()
    muon.step()
    assert equal_states(extra, before)


def test_loss_scaling_changes_nothing_and_skips_what_overflowed():
    model, plain = Reader(), Reader()
    optimizer = create_optimizer(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(model(**reader_batch(0))["loss"]).backward()
    scaler.step(optimizer)
    scaler.update()
    train(plain, create_optimizer(plain), range(1))
    assert equal_states(model, plain)

    optimizer.zero_grad()
    scaler.scale(model(**reader_batch(1))["loss"]).backward()
    model.table.weight.grad._values()[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert equal_states(model, plain) and scaler.get_scale() == 2.0**9


@pytest.mark.parametrize(
    "options, message",
    [
        ({"lr": -1.0}, "`lr` must not be negative"),
        ({"betas": (0.9, 1.0)}, "`betas` must be in"),
        ({"eps": 0.0}, "`eps` must be positive"),
        ({"weight_decay": -0.1}, "`weight_decay` must not be negative"),
        ({"table_lr_ratio": -5.0}, "`table_lr_ratio` must not be negative"),
        ({"moments": "sparse"}, "`moments` must be one of"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], message: str):
    model = Reader(sparse=False)
    with pytest.raises(ValueError, match=message):
        create_optimizer(model, **options)
    assert not model.table.sparse


def test_bad_groups_leave_the_optimizer_as_it_was():
    model, extra = Reader(), nn.Parameter(torch.zeros(3))
    optimizer = create_optimizer(model)
    for group, message in [
        ({"algorithm": "adam"}, "`algorithm` must be one of"),
        ({"algorithm": "row_sparse_adam"}, r"must be tables \(rows, dim\)"),
        ({"algorithm": "muon"}, "2D"),
    ]:
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group({"params": [extra], **group})
    with pytest.raises(ValueError, match="`weight_decay` must be 0 for tables"):
        RowSparseAdam([{"params": [new_table()], "weight_decay": 0.1}])
    assert len(optimizer.param_groups) == 3
    train(model, optimizer, range(1))


# Inside what trains models


def reader_items(count: int) -> list[dict[str, torch.Tensor]]:
    return [{key: value[0] for key, value in reader_batch(seed, size=1).items()} for seed in range(count)]


def new_trainer(folder: Path, optimizer_options: dict[str, Any] | None = None, **options: Any) -> Trainer:
    """A plain trainer around a new `Reader`."""
    options = {"max_steps": 6, "per_device_train_batch_size": 2, "save_strategy": "no", "max_grad_norm": 0.1} | options
    arguments = TrainingArguments(
        str(folder), use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, **options
    )
    model = Reader()
    optimizer = create_optimizer(model, lr=0.01, **(optimizer_options or {}))
    return Trainer(model, arguments, train_dataset=reader_items(12), optimizers=(optimizer, None))


@pytest.mark.parametrize("optimizer_options", [{}, {"moments": "lazy", "row_wise": True}])
def test_trainer_resumes_to_the_bit(tmp_path: Path, optimizer_options: dict[str, Any]):
    whole = new_trainer(tmp_path / "whole", optimizer_options, warmup_steps=2)
    whole.train()
    new_trainer(tmp_path / "parts", optimizer_options, warmup_steps=2, save_strategy="steps", save_steps=3).train()
    resumed = new_trainer(tmp_path / "parts", optimizer_options, warmup_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-3"))
    assert [entry["step"] for entry in resumed.state.log_history if "loss" in entry] == [1, 2, 3, 4, 5, 6]
    assert equal_states(whole.model, resumed.model)
    assert not torch.equal(whole.model.table.weight, Reader().table.weight)


@pytest.mark.parametrize(
    "batches",
    [{"per_device_train_batch_size": 12}, {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4}],
)
def test_trainer_clips_and_logs_the_norm_of_all_gradients(tmp_path: Path, batches: dict[str, int]):
    trainer = new_trainer(tmp_path, {"muon": False}, max_steps=1, **batches)
    trainer.train()
    by_hand = Reader()
    optimizer = create_optimizer(by_hand, lr=0.01, muon=False)
    by_hand(**default_data_collator(reader_items(12)))["loss"].backward()
    norm = torch.cat([parameter.grad.to_dense().flatten() for parameter in by_hand.parameters()]).norm()
    for parameter in by_hand.parameters():
        parameter.grad *= 0.1 / norm
    optimizer.step()
    assert norm > 0.1 and trainer.state.log_history[0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    for ours, expected in zip(trainer.model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.1])
def test_trainer_in_mixed_precision(tmp_path: Path, max_grad_norm: float):
    """Half-precision products, single-precision parameters: the loss falls as it does in single precision."""
    options = {"per_device_train_batch_size": 12, "max_steps": 12, "max_grad_norm": max_grad_norm}
    losses = []
    for bf16 in (False, True):
        trainer = new_trainer(tmp_path, bf16=bf16, **options)
        trainer.train()
        assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    single, half = losses
    assert single != half
    assert half == pytest.approx(single, abs=0.02) and half[-1] < half[0] - 0.05


def _train_on_one_rank(rank: int, folder: Path) -> None:
    for muon in (False, True):
        model = Reader()
        optimizer = create_optimizer(model, lr=0.01, muon=muon)
        parallel = nn.parallel.DistributedDataParallel(model)
        for seed in range(4):
            optimizer.zero_grad()
            batch = {key: value[2 * rank : 2 * rank + 2] for key, value in reader_batch(seed).items()}
            parallel(**batch)["loss"].backward()
            assert model.table.weight.grad.is_sparse
            clip_grad_norm_(parallel.parameters(), 0.1)
            optimizer.step()
        torch.save(model.state_dict(), folder / f"{muon}-{rank}.pt")


def test_two_processes_train_as_one(tmp_path: Path):
    on_processes(2, _train_on_one_rank, tmp_path)
    loaded = {path.stem: torch.load(path, weights_only=True) for path in tmp_path.iterdir()}
    for muon in (False, True):
        first, second = loaded[f"{muon}-0"], loaded[f"{muon}-1"]
        assert all(torch.equal(first[name], second[name]) for name in first)
    single = Reader()
    train(single, create_optimizer(single, lr=0.01, muon=False), range(4), max_norm=0.1)
    for name, value in single.state_dict().items():
        torch.testing.assert_close(loaded["False-0"][name], value, rtol=1e-4, atol=1e-6)


def new_language_model(variant: str) -> EngramForCausalLM:
    backbone = LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, eos_token_id=2,
        pad_token_id=0, max_position_embeddings=64,
    )  # fmt: skip
    config = EngramLMConfig.from_backbone(
        backbone, engram_variant=variant, engram_layer_ids=[1], engram_n_heads=2, engram_head_dim=8,
        engram_vocab_size=50_000,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return EngramForCausalLM(config)


def token_items(low: int, high: int, count: int, length: int = 10) -> list[dict[str, torch.Tensor]]:
    """Random sequences of the tokens from `low` to below `high`."""
    ids = torch.randint(low, high, (count, length), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def test_texts_without_a_trained_ngram_keep_their_logits_to_the_bit(tmp_path: Path):
    """With the memory alone trained, and a variant without biases."""
    model = new_language_model("qwen_ple")
    model.requires_grad_(False)
    model.memories.requires_grad_(True)
    # Few n-grams in large tables: none of one text collides with one of the other.
    read, other = token_items(10, 50, 4), torch.stack([item["input_ids"] for item in token_items(50, 90, 2)])
    with torch.no_grad():
        known_before, other_before = model(input_ids=read[0]["input_ids"][None]).logits, model(input_ids=other).logits
    arguments = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, save_strategy="no", max_steps=6,
        per_device_train_batch_size=4,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=read, optimizers=(create_optimizer(model, lr=0.05), None)).train()
    model.eval()
    with torch.no_grad():
        known_after, other_after = model(input_ids=read[0]["input_ids"][None]).logits, model(input_ids=other).logits
    assert torch.equal(other_before, other_after)
    assert (known_after - known_before).abs().max() > 0.01
    rows = model.memories["1"].table.weight.ne(0).any(1).sum()
    assert 0 < rows <= 4 * 10 * 4  # at most one row a table and token


def test_gradient_checkpointing_changes_no_gradient():
    plain, checkpointed = new_language_model("deepseek"), new_language_model("deepseek")
    checkpointed.activation_checkpointing_enable()
    gradients = []
    for model in (plain, checkpointed):
        create_optimizer(model)
        nn.init.normal_(model.memories["1"].table.weight, generator=torch.Generator().manual_seed(0))
        ids = torch.stack([item["input_ids"] for item in token_items(10, 50, 4)])
        model.train()(input_ids=ids, labels=ids).loss.backward()
        gradients.append({name: p.grad.to_dense() for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and any("table" in name for name in gradients[0])
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


@pytest.mark.parametrize("options", [{}, {"packing": True}], ids=["padded", "packed"])
def test_sft_trainer_of_trl(
    tmp_path: Path, tiny_tokenizer: Callable[..., PreTrainedTokenizerFast], options: dict[str, Any]
):
    """Plain, and resumed to the bit. It runs the model without its head, and the memory with it."""
    import trl
    from datasets import Dataset

    texts = ["the capital of france is paris", "a cat by the river", "one two three four", "the moon is old"] * 4
    trainers = []
    for resume in (None, str(tmp_path / "checkpoint-2")):
        arguments = trl.SFTConfig(
            str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, save_steps=2, max_steps=4,
            per_device_train_batch_size=2, max_length=16, bf16=False, **options,
        )  # fmt: skip
        model = new_language_model("deepseek")
        trainer = trl.SFTTrainer(
            model, arguments, train_dataset=Dataset.from_dict({"text": texts}), processing_class=tiny_tokenizer(),
            optimizers=(create_optimizer(model, lr=0.05), None),
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        trainers.append(trainer)
    first, second = (trainer.model for trainer in trainers)
    assert equal_states(first, second)
    assert first.memories["1"].table.weight.ne(0).any()
    losses = [entry["loss"] for entry in trainers[0].state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
