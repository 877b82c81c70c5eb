"""Optimizers for models with n-gram memory: one object that steps matrices, tables and everything else, each its own way.

A table has millions of rows and a batch reads thousands. Its gradient is a sparse tensor of those rows, and `RowSparseAdam`
touches no other row. `create_optimizer` puts it beside `torch.optim.Muon` and `torch.optim.AdamW` in an `EngramOptimizer`, which
is a `torch.optim.Optimizer` like any other: it goes to `Trainer(optimizers=(optimizer, None))` as it is.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, zeros
from torch.optim import AdamW, Optimizer
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .memory.layer import NgramMemory, NgramTable
from .sharded import sharded_like


MOMENTS = ("exact", "lazy")


class RowSparseAdam(Optimizer):
    """Adam (Kingma & Ba 2015, algorithm 1) that reads and writes only the rows that the gradient holds.

    The two kinds of moments differ in what happens to a row at a step that does not touch it:

    | `moments` | at a step without the row | a row's moments equal |
    |---|---|---|
    | `"exact"` | they decay; the decays of all missed steps are applied when the row is next touched | those of dense Adam, where the row's gradient is zero at the missed steps |
    | `"lazy"` | nothing; every row counts its own steps | those of an Adam that ran on the steps that touched the row, and on no other |

    In both, a row that is not touched keeps its values to the bit, where dense Adam would let momentum move it on.
    `torch.optim.SparseAdam` is a third: moments as in `"lazy"`, but bias correction by the steps of the whole table.

    Moments are float32 whatever the table's dtype. With `row_wise=True` a row has one second moment, the mean over its elements;
    with `betas=(0.0, beta2)` it has no first moment. With both, the state is 8 bytes a row: of dense Adam's in float32,
    `1 / dim`, which is 1.6 % at 64 columns.

    Tables may be sharded over processes, as `DTensor`s: every process steps its part, and the state is sharded like the table.

    Args:
        params (`Iterable`): Tables `(rows, dim)`, or parameter groups of them. Gradients may be sparse or dense.
        lr (`float`): Learning rate.
        betas (`tuple[float, float]`): Decay of the first and of the second moment.
        eps (`float`): Added to the root of the second moment.
        moments (`str`): `"exact"` or `"lazy"`.
        row_wise (`bool`): Keep one second moment a row.

    Raises:
        `ValueError`: A parameter is not a matrix, or an option is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        moments: str = "exact",
        row_wise: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": 0.0,
            "moments": moments,
            "row_wise": row_wise,
        }
        super().__init__(params, defaults)
        register_sparse_norm()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_adam(group["lr"], group["betas"], group["eps"])
            if group["moments"] not in MOMENTS:
                raise ValueError(f"`moments` must be one of {list(MOMENTS)}, got {group['moments']!r}.")
            if group["weight_decay"] != 0:
                raise ValueError(
                    "`weight_decay` must be 0 for tables: decay would change rows that no gradient touches."
                )
            for table in group["params"]:
                if table.ndim != 2:
                    raise ValueError(f"`params` must be tables (rows, dim), got the shape {tuple(table.shape)}.")
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs one step; returns what `closure`, which computes the gradients again, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for table in group["params"]:
                if table.grad is not None:
                    self._step_table(table, table.grad, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned; moments and counts keep their dtypes, whatever the tables'."""
        _load_row_states(self, state_dict, super().load_state_dict)

    def _step_table(self, table: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        rows, grad = _touched_rows(gradient)  # (n,), (n, dim)
        if not self.state[table]:
            self.state[table].update(_empty_state(table, group))
        self.state[table]["step"] += 1
        state = {key: _here(value) for key, value in self.state[table].items()}

        steps: Any  # taken so far, which the bias correction needs; per row where rows count their own
        elapsed: Any  # since the moments of a row were last decayed
        if group["moments"] == "exact":
            steps = state["step"]
            elapsed = (steps - state["last_step"].index_select(0, rows)).unsqueeze(1)
            state["last_step"].index_fill_(0, rows, steps)
        else:
            own_steps = state["row_step"].index_select(0, rows) + 1
            state["row_step"].index_copy_(0, rows, own_steps)
            steps, elapsed = own_steps.unsqueeze(1), 1

        energy = grad.square()
        if group["row_wise"]:
            energy = _over_columns(energy.sum(1, keepdim=True), table, dist.ReduceOp.SUM) / table.shape[1]
        second = state["exp_avg_sq"].index_select(0, rows)
        second.mul_(beta2**elapsed).add_(energy, alpha=1 - beta2)
        state["exp_avg_sq"].index_copy_(0, rows, second)
        denominator = second.div_(_bias_correction(beta2, steps)).sqrt_().add_(group["eps"])

        if beta1:
            first = state["exp_avg"].index_select(0, rows)
            first.mul_(beta1**elapsed).add_(grad, alpha=1 - beta1)
            state["exp_avg"].index_copy_(0, rows, first)
            grad = first.div_(_bias_correction(beta1, steps))

        held = _here(table)
        values = held.index_select(0, rows).float().addcdiv_(grad, denominator, value=-group["lr"])
        held.index_copy_(0, rows, values.to(held.dtype))


class EngramOptimizer(Optimizer):
    """Several optimizers as one, each for the parameter groups that name it under `"algorithm"`.

    `"muon"` is `torch.optim.Muon`, `"adamw"` is `torch.optim.AdamW`, `"row_sparse_adam"` is `RowSparseAdam`. They work on this
    optimizer's own groups and state: schedulers, gradient scalers, `accelerate` and checkpoints see one optimizer.

    Args:
        groups (`Iterable[dict]`): Parameter groups with a key `"algorithm"` and the options of that optimizer.
        lr (`float`): What `defaults["lr"]` says, which some schedulers ask for, and the rate of groups that name none.

    Raises:
        `ValueError`: A group names no known algorithm, or has options that its optimizer refuses.
        `ImportError`: A group asks for Muon, and torch is older than 2.9.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float) -> None:
        self._members: list[Optimizer] = []
        super().__init__(groups, {"lr": lr})
        register_sparse_norm()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; `param_group["algorithm"]` says which optimizer steps it, `"adamw"` where it is missing."""
        param_group.setdefault("algorithm", "adamw")
        super().add_param_group(param_group)
        try:
            self._divide_groups()
        except Exception:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs one step of every member; returns what `closure`, which computes the gradients again, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for member in self._members:
            member.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned; the tables' moments and counts keep their dtypes."""
        _load_row_states(self, state_dict, super().load_state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # load_state_dict, copies and pickles all come through here with new groups and a new state.
        super().__setstate__(state)
        self._divide_groups()

    def _divide_groups(self) -> None:
        """Makes the members anew around this optimizer's own group dicts and its own state."""
        divided = defaultdict(list)
        for group in self.param_groups:
            divided[group["algorithm"]].append(group)
        members = []
        for algorithm, groups in divided.items():
            member = _optimizer_class(algorithm)(groups)  # fills in the options that a group leaves out
            member.param_groups, member.state = groups, self.state
            members.append(member)
        self._members = members


def create_optimizer(
    model: nn.Module,
    lr: float = 1e-3,
    *,
    table_lr_ratio: float = 5.0,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    muon: bool = True,
    moments: str = "exact",
    row_wise: bool = False,
) -> EngramOptimizer:
    """Returns one optimizer for everything in `model` that is trained, after the Engram paper's recipe (arXiv 2601.07372).

    | what | optimizer | rate | weight decay |
    |---|---|---|---|
    | weights of the backbone's linear layers, heads excepted | `torch.optim.Muon` with AdamW's scale of updates | `lr` | yes |
    | the rest: embeddings, heads, fused experts, adapters, the memory's projections | `torch.optim.AdamW` | `lr` | yes, but for biases and norms |
    | n-gram tables | `RowSparseAdam` | `table_lr_ratio * lr` | never |

    The tables' gradients become sparse (`table.sparse = True`), but for those that FSDP2 has sharded. Schedulers scale all groups alike, so the ratio lasts.
    `torch.nn.utils.clip_grad_norm_` and what builds on it (`max_grad_norm` of `Trainer`) count and clip the sparse gradients of
    tables with all others: see `register_sparse_norm`.

    Args:
        model (`torch.nn.Module`): Its parameters that require gradients, wherever they are, before or after it is wrapped.
        lr (`float`): Learning rate of the backbone.
        table_lr_ratio (`float`): Learning rate of tables, in units of `lr`.
        weight_decay (`float`): Decoupled weight decay.
        betas (`tuple[float, float]`): Adam's, for tables and for the rest.
        eps (`float`): Adam's.
        muon (`bool`): With `False`, AdamW steps the matrices too, as is usual where the backbone was trained with it.
        moments (`str`): Of tables: `"exact"` or `"lazy"`, see `RowSparseAdam`.
        row_wise (`bool`): Tables keep one second moment a row and no first: 8 bytes of state a row.

    Raises:
        `ValueError`: Nothing in `model` requires a gradient, or an option is out of its range.
        `ImportError`: `muon=True` with a torch older than 2.9.
    """
    _check_adam(lr, betas, eps)
    if not table_lr_ratio >= 0:
        raise ValueError(f"`table_lr_ratio` must not be negative, got {table_lr_ratio}.")
    if not weight_decay >= 0:
        raise ValueError(f"`weight_decay` must not be negative, got {weight_decay}.")
    tables = {module for module in model.modules() if isinstance(module, NgramTable)}
    rows = {table.weight for table in tables}
    matrices = _backbone_matrices(model) if muon else set()

    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    divided: dict[str, list[nn.Parameter]] = {"matrices": [], "decayed": [], "plain": [], "tables": []}
    for name, parameter in trained.items():
        if parameter in rows:
            divided["tables"].append(parameter)
        elif parameter in matrices:
            divided["matrices"].append(parameter)
        else:
            divided["plain" if _is_bias_or_norm(name, parameter) else "decayed"].append(parameter)
    if not trained:
        raise ValueError("`model` has no parameter that requires a gradient: nothing would be trained.")

    adam = {"lr": lr, "betas": betas, "eps": eps}
    options: dict[str, dict[str, Any]] = {
        "matrices": {"algorithm": "muon", "lr": lr, "weight_decay": weight_decay, "adjust_lr_fn": "match_rms_adamw"},
        "decayed": {"algorithm": "adamw", **adam, "weight_decay": weight_decay},
        "plain": {"algorithm": "adamw", **adam, "weight_decay": 0.0},
        "tables": {
            "algorithm": "row_sparse_adam",
            "lr": table_lr_ratio * lr,
            "betas": (0.0, betas[1]) if row_wise else betas,
            "eps": eps,
            "weight_decay": 0.0,
            "moments": moments,
            "row_wise": row_wise,
        },
    }
    groups = [{"params": parameters, **options[name]} for name, parameters in divided.items() if parameters]
    optimizer = EngramOptimizer(groups, lr)
    for table in tables:
        table.sparse = not _is_reduced_by_fsdp(table)
    return optimizer


def _is_reduced_by_fsdp(table: NgramTable) -> bool:
    """Whether FSDP2 takes care of a table's gradient, of which it reduces dense ones only."""
    if not getattr(table, "_is_fsdp_managed_module", False):
        return False
    # one that `distribute_tables` made is left to itself; one that is sharded further lies on a mesh of more dimensions
    return not (table.is_distributed and isinstance(table.weight, DTensor) and table.weight.device_mesh.ndim == 1)


def register_sparse_norm() -> None:
    """Gives torch the norm of a sparse tensor, without which it cannot clip a sparse gradient.

    `torch.nn.utils.clip_grad_norm_` multiplies sparse gradients well enough, but stops before that with "Could not run
    'aten::linalg_vector_norm' with arguments from the 'SparseCPU' backend" (torch 2.13, the same on CUDA), and `Trainer` asks for
    the norm even where it clips nothing. This registers that operator for the sparse backends, through the door that torch
    has for it. It does nothing where torch brings the operator itself.
    """
    for backend in ("SparseCPU", "SparseCUDA"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::linalg_vector_norm", backend):
            _LIBRARY.impl("linalg_vector_norm", _sparse_vector_norm, backend)


_LIBRARY = torch.library.Library("aten", "IMPL")  # what it registers lasts as long as it does


def _sparse_vector_norm(
    tensor: torch.Tensor,
    order: float = 2,
    dim: list[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    if order < 0 or keepdim or (dim and len(dim) < tensor.ndim):
        raise NotImplementedError(
            "Of sparse tensors, only norms of the whole tensor with an order >= 0 are implemented."
        )
    # Coalesced first: a row that is there twice is the sum of both. What is not there is zero and adds nothing.
    return torch.linalg.vector_norm(tensor.coalesce().values(), order, dtype=dtype)


def _load_row_states(
    optimizer: Optimizer, state_dict: dict[str, Any], load_state_dict: Callable[[dict[str, Any]], None]
) -> None:
    """Loads a state dict past `torch.optim.Optimizer`'s habit of casting all state to the parameter's dtype.

    The float32 moments of a bfloat16 table, and integers in any table, would lose digits. State that counts rows is kept from
    `load_state_dict`, and put in its place afterwards.
    """
    states = state_dict["state"]
    held = {index: state for index, state in states.items() if "last_step" in state or "row_step" in state}
    load_state_dict({**state_dict, "state": {index: state for index, state in states.items() if index not in held}})
    saved = [index for group in state_dict["param_groups"] for index in group["params"]]
    tables = [(table, group) for group in optimizer.param_groups for table in group["params"]]
    for index, (table, group) in zip(saved, tables, strict=True):
        if index in held:
            places = _empty_state(table, group) if isinstance(table, DTensor) else {}
            optimizer.state[table] = {
                key: sharded_like(value.to(table.device, copy=True), places.get(key, table))
                if isinstance(value, torch.Tensor)
                else value
                for key, value in held[index].items()
            }


def _optimizer_class(algorithm: str) -> Callable[[list[dict[str, Any]]], Optimizer]:
    classes: dict[str, Any] = {
        "adamw": AdamW,
        "row_sparse_adam": RowSparseAdam,
        "muon": getattr(torch.optim, "Muon", None),
    }
    if algorithm not in classes:
        raise ValueError(f"`algorithm` must be one of {sorted(classes)}, got {algorithm!r}.")
    found = classes[algorithm]
    if found is None:
        raise ImportError(
            f"Muon came with torch 2.9, and this is {torch.__version__}: update it, or pass `muon=False`."
        )
    return found


def _backbone_matrices(model: nn.Module) -> set[torch.Tensor]:
    """Weights of linear layers that belong neither to a head, nor to a memory, nor to an adapter."""
    others: set[Any] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            backbone = getattr(module, module.base_model_prefix, module)
            others.update(set(module.modules()) - set(backbone.modules()), {module.get_output_embeddings()})
        elif isinstance(module, NgramMemory):
            # Its projections are fused: as one matrix they are no matrix that Muon should make orthogonal.
            others.update(module.modules())
        elif isinstance(module, BaseTunerLayer):
            others.update(set(module.modules()) - set(module.get_base_layer().modules()))
    linear = {
        module.weight for module in model.modules() if isinstance(module, (nn.Linear, Conv1D)) and module not in others
    }
    tied = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    return linear - tied


def _is_bias_or_norm(name: str, parameter: torch.Tensor) -> bool:
    """Also those that are matrices: one bias an expert, one norm a branch of the residual stream."""
    return parameter.ndim < 2 or name.endswith("bias") or "norm" in ".".join(name.rsplit(".", 2)[-2:])


def _here(value: Any) -> Any:
    """This process's part of a tensor that is sharded; of anything else, all of it."""
    return value.to_local() if isinstance(value, DTensor) else value


def _over_columns(values: torch.Tensor, table: torch.Tensor, operation: Any) -> torch.Tensor:
    """`values` reduced over the processes that hold other columns of the same rows of a table, if there are any."""
    if isinstance(table, DTensor) and table.placements[-1].is_shard(1):
        dist.all_reduce(values, operation, group=table.device_mesh.get_group())
    return values


def _touched_rows(grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows `(n,)` of a gradient that may differ from zero, each once, and their values `(n, dim)` in float32.

    Of a gradient that is sharded, they are those of this process's part.
    """
    local = _here(grad)
    if local.is_sparse:
        local = local.coalesce()
        return local.indices()[0], local.values().float()
    touched = _over_columns(local.ne(0).any(1).int(), grad, dist.ReduceOp.MAX)
    rows = touched.nonzero()[:, 0]
    return rows, local.index_select(0, rows).float()


def _bias_correction(beta: float, steps: int | torch.Tensor) -> float | torch.Tensor:
    """`1 - beta^steps`; of tensors by way of the logarithm, since `beta` near 1 would cancel in float32."""
    if isinstance(steps, int) or beta == 0:
        return 1 - beta**steps
    return -torch.expm1(steps * math.log(beta))


def _empty_state(table: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
    rows, dim = table.shape
    state: dict[str, Any] = {"step": 0, "exp_avg_sq": _zeros((rows, 1 if group["row_wise"] else dim), table)}
    state["last_step" if group["moments"] == "exact" else "row_step"] = _zeros((rows,), table, torch.int32)
    if group["betas"][0]:
        state["exp_avg"] = _zeros((rows, dim), table)
    return state


def _zeros(shape: tuple[int, ...], table: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Zeros for every row of a table, or for every element of it; sharded, if the table is."""
    if not isinstance(table, DTensor):
        return torch.zeros(shape, dtype=dtype, device=table.device)
    by_row = shape != table.shape
    placements = [Replicate() if by_row and place.is_shard(1) else place for place in table.placements]
    return zeros(shape, dtype=dtype, device_mesh=table.device_mesh, placements=placements)


def _check_adam(lr: float, betas: tuple[float, float], eps: float) -> None:
    if not lr >= 0:
        raise ValueError(f"`lr` must not be negative, got {lr}.")
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"`betas` must be in [0, 1), got {betas}.")
    if not eps > 0:
        raise ValueError(f"`eps` must be positive, got {eps}.")
