"""The edit item by item: one row of the factors a secret token, one strength an item.

For the rows `X_t` that predict the secret tokens, their company's means `X_c` (see `items.Slots`) and the sums of all that is
kept, `S = w S_retain + S_general + X_t^T X_t`:

    W <- W - V diag(a) A,    A = X_t S^-1,    V = P(W (X_t - X_c)^T)

`A` answers to the rows that predict the secret and, as little as least squares allow, to anything that is kept. `V` is what
the layer writes there and does not write for the secret's company. `P` keeps of it what says the secret: the component along the
token's readout direction `u` (`readout.readout_directions`), and of the rest the share `rest`:

    P(v) = u u^T v + rest (v - u u^T v),    |u| = 1

so other things that are known of the same subject stay. With `rest = 1`, and in layers that do not write to the hidden state, it is
all of `v`. With a replacement, what was written for the secret's first token is written for the replacement's instead:
`P(v) = (u - u') u^T v + rest (...)`. The adapter edits the input: `B = pinv(W) V` where `W` is not taller than wide, which reproduces
`V` exactly.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .collection import encoder_of, library_version
from .encoding import Item, TokenizedItem, tokenize_item
from .extraction import adapter_layers, balanced_factors
from .item_rows import ItemRows, collect_item_rows
from .items import Forget, ForgetText, first_token, forget_items, scored_tokens, without_prompt
from .readout import Directions, readout_directions
from .selection import residual_writers, unwrap
from .spectrum import FLOAT32_EPSILON, ridge_inverse
from .tuning import LARGEST_STRENGTH, SETTLED, ItemOutcome, ItemScores, item_scores, tune_strengths


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from peft import PeftModel


logger = logging.get_logger(__name__)


@dataclass
class ItemOptions:
    """How `extract_items` edits.

    Args:
        forget_probability (`float`):
            How likely the model may still say an item, asked as it is given or left to complete the answer alone: at most this, at most
            half of what it was, and never as the greedy choice.
        retain_weight (`float`): `w`, what a row of a kept answer weighs against one of a plain text.
        rest (`float`):
            Share of what the layers write beside the secret that is taken out with it, in [0, 1]. 0 takes the secret's own logit
            alone, 1 all that sets the item apart from its like.
        null_space (`bool`): Whether rows of kept answers must not be changed at all (AlphaEdit, arXiv 2410.02355).
        replacement (`str`, *optional*): What the model should say in the secret's place.
        sequential (`int`): In how many blocks of layers, from below; every block is collected with the edit of those below in place.
        rounds (`int`): How often the edited model may be looked at to find the strengths.
        layers (`str`, *optional*):
            `"auto"` keeps only the layers that do most for their damage, until nine tenths of the first-order effect are
            reached; the adapter is taken off the others. See `choose_layers`.

    Raises:
        `ValueError`: An option is out of its range.
    """

    forget_probability: float = 0.05
    retain_weight: float = 30.0
    rest: float = 0.05
    null_space: bool = False
    replacement: str | None = None
    sequential: int = 1
    rounds: int = 10
    layers: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.forget_probability < 1:
            raise ValueError(f"`forget_probability` must be in (0, 1), got {self.forget_probability}.")
        if not (self.retain_weight > 0 and math.isfinite(self.retain_weight)):
            raise ValueError(f"`retain_weight` must be a positive number, got {self.retain_weight}.")
        if not 0 <= self.rest <= 1:
            raise ValueError(f"`rest` must be in [0, 1], got {self.rest}.")
        if self.replacement is not None and not self.replacement.strip():
            raise ValueError("`replacement` is empty. Leave it out to forget without one.")
        if self.layers not in (None, "auto"):
            raise ValueError(
                f"`layers` must be 'auto' or None, got {self.layers!r}. To name layers use the config's `layers_to_transform`."
            )
        if self.layers and self.sequential > 1:
            raise ValueError(
                "`layers='auto'` compares layers of one model, `sequential` edits between them: use one of the two."
            )
        for name, value in (("sequential", self.sequential), ("rounds", self.rounds)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` must be a positive integer, got {value!r}.")


@dataclass
class ItemReport:
    """The outcome of `extract_items`, item by item, at `alpha` 1.

    **Attributes**:
        - **items** (`list[ItemOutcome]`) -- What became of every item.
        - **rounds** (`int`) -- How often the edited model was looked at.
        - **layer_effects** (`dict[str, float]`) --
            How much each layer's edit takes off a secret token's logit at the strengths found, on average and to first order.
    """

    items: list[ItemOutcome]
    rounds: int
    layer_effects: dict[str, float] = field(default_factory=dict)

    @property
    def resisting(self) -> list[str]:
        """Names of the items that the model still says more often than it should."""
        return [item.name for item in self.items if item.resists]

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("item", "before", "after", "goal", "strength", "")]
        for item in self.items:
            note = "resists" if item.resists else ""
            numbers = (f"{value:.3g}" for value in (item.before, item.after, item.goal, item.strength))
            rows.append((item.name, *numbers, note))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )

    def plot(self, ax: Axes | None = None) -> Axes:
        """How likely each item was and is, with its strength beside its name. Needs matplotlib.

        Args:
            ax (`matplotlib.axes.Axes`, *optional*): Where to draw.
        """
        from matplotlib import pyplot

        if ax is None:
            _, ax = pyplot.subplots(figsize=(7, 0.3 * len(self.items) + 1.5), layout="constrained")
        places = range(len(self.items))
        ax.hlines(places, [item.after for item in self.items], [item.before for item in self.items], color="lightgrey")
        ax.plot([item.before for item in self.items], places, "o", color="tab:blue", label="before")
        ax.plot([item.after for item in self.items], places, "o", color="tab:red", label="after")
        ax.plot([item.goal for item in self.items], places, "|", color="black", label="goal")
        ax.set_yticks(places, [f"{item.name} ({item.strength:.2g})" for item in self.items])
        ax.set(xlabel="probability", xlim=(-0.02, 1.02))
        ax.invert_yaxis()
        ax.legend()
        return ax


def extract_items(
    model: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    forget: Forget,
    retain: Sequence[Item],
    adapter_name: str = "default",
    *,
    batch_size: int = 8,
    max_length: int = 512,
    **options: Any,
) -> ItemReport:
    """Fills an ENGRAM adapter item by item, and finds for each the least strength at which it is forgotten.

    The strengths are found as if the adapter's `alpha` were 1; another one scales them. The formulas stand at the top of
    `editing/item_edit.py`. The rank is the number of secret tokens. Every text is run once, the forgotten ones once more with each
    round. Either the adapter is filled or it is as it was.

    Args:
        model (`PeftModel`): A model with an ENGRAM adapter, which must be active.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        forget (`Sequence` or `Mapping`):
            What to forget: `str`, `(prompt, answer)` pairs, chat messages or rows of a data set; or a dictionary from names to such
            an item or a list of several, which share a strength. A row may name the part to forget: `span`.
        retain (`Sequence`): What to keep, likewise. Answers are `S_retain`, plain texts are `S_general`.
        adapter_name (`str`): Which adapter.
        batch_size (`int`): Texts a batch.
        max_length (`int`): Longer texts are cut on the right.
        options: The fields of `ItemOptions`.

    Returns:
        `ItemReport`: What became of every item. A warning names those that resist.

    Raises:
        `ValueError`: Bad input; the adapter does not exist, is merged or inactive.
        `TypeError`: The model is an encoder-decoder.
    """
    chosen = ItemOptions(**options)
    check_reads_on(model)
    config, layers = adapter_layers(model, adapter_name)
    if parameters := [name for name, layer in layers.items() if hasattr(layer, "parameter_name")]:
        raise ValueError(
            f"The adapter {adapter_name!r} edits Parameters ({parameters[:2]}), which cannot be done item by item. Fill it with "
            "`extract_engram`, or make it without `target_parameters` and with `target_experts=False`."
        )
    for name, layer in layers.items():
        if not layer.kind.rows_are_input:
            raise ValueError(
                f"{name} is a `{type(layer.get_base_layer()).__name__}`, which cannot be edited item by item: a row a token is "
                'needed. Use `extract_engram` (`method="paper"`).'
            )
    if adapter_name not in model.active_adapters:
        raise ValueError(
            f"The adapter {adapter_name!r} is not active: call `model.set_adapter({adapter_name!r})` first."
        )
    if config.r is not None:
        raise ValueError(
            "`r` limits the rank of the paper's method; this one needs a row a secret token. Leave `r` out, or use `EngramConfig.paper(r=...)`."
        )
    kept = [tokenize_item(tokenizer, item, f"Item {i} of `retain`", max_length) for i, item in enumerate(retain)]
    if not kept:
        raise ValueError("`retain` must hold at least one text.")
    names, texts = forget_items(tokenizer, forget, kept, max_length)
    judged = [*texts, *without_prompt(tokenizer, texts)]
    replacing = None
    if chosen.replacement is not None:
        replacing = [first_token(tokenizer, text, chosen.replacement.strip()) for text in texts]
    before_edit = {name: layer.modules_of(adapter_name) for name, layer in layers.items()}
    try:
        with _as_if_alpha_were_one(layers, adapter_name):
            report = _fill(
                model,
                layers,
                adapter_name,
                names,
                texts,
                judged,
                kept,
                batch_size,
                tokenizer.pad_token_id,
                chosen,
                replacing,
            )
    except BaseException:
        for name, modules in before_edit.items():
            layers[name].put_modules(adapter_name, modules)
        raise
    if left_out := [name for name in layers if name not in report.layer_effects]:
        for name in left_out:
            others = [active for active in layers[name].active_adapters if active != adapter_name]
            layers[name].delete_adapter(adapter_name)
            layers[name].set_adapter(others)  # PEFT would switch another one on
        config.target_modules = set(report.layer_effects)
        config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
    rows = [0] * len(names)
    for text in texts:
        rows[text.item] += len(text.secret)
    config.record_extraction(
        ranks=dict.fromkeys(report.layer_effects, sum(rows)),
        record={
            "method": "items",
            **asdict(chosen),
            "target_rows": sum(rows),
            "total_rows": sum(rows) + sum(scored_tokens(tokens) for tokens in kept),
            "target_texts": len(texts),
            "total_texts": len(texts) + len(kept),
            "mask": "predict",
            "library_version": library_version(),
        },
        items=dict(zip(names, rows, strict=True)),
    )
    if report.resisting:
        logger.warning(f"{len(report.resisting)} of {len(names)} items resist: {report.resisting[:10]}.")
    return report


@contextmanager
def _as_if_alpha_were_one(layers: dict[str, Any], adapter_name: str) -> Iterator[None]:
    """What is found is what the items need, and `alpha` then scales it: otherwise it would be made up for."""
    scaling = {name: layer.engram_scaling[adapter_name] for name, layer in layers.items()}
    try:
        for layer in layers.values():
            layer.engram_scaling[adapter_name] = 1.0
        yield
    finally:
        for name, layer in layers.items():
            layer.engram_scaling[adapter_name] = scaling[name]


def check_reads_on(model: nn.Module) -> None:
    """Raises a `TypeError` for a model that does not write on where it reads: the rows of an item are those of one sequence."""
    base = unwrap(model)
    if encoder_of(base) is not None:
        raise TypeError(
            f"{type(base).__name__} is an encoder-decoder model: forgetting item by item needs one that reads and writes in a single "
            "sequence. Use `EngramConfig.paper(...)`, whose method needs the layers' inputs only."
        )


def _fill(
    model: PeftModel,
    layers: dict[str, Any],
    adapter_name: str,
    names: list[str],
    texts: list[ForgetText],
    judged: list[ForgetText],
    kept: list[TokenizedItem],
    batch_size: int,
    pad_token_id: int | None,
    options: ItemOptions,
    replacing: list[int] | None,
) -> ItemReport:
    for layer in layers.values():
        width = layer.in_features + layer.absorbs_bias(adapter_name)
        dtype = layer.dtype_of(adapter_name)
        nothing = torch.zeros(1, width, dtype=dtype)
        layer.fill(adapter_name, nothing, nothing.mT, 0.0)  # as if it were not there
    before = item_scores(model, judged, len(names), batch_size).log_probabilities
    if before.isnan().any():
        raise ValueError(
            "The model's output is not finite: its weights or the adapter's strength hold NaN or infinity."
        )
    goal = (before - math.log(2)).clamp_max(math.log(options.forget_probability))
    directions = readout_directions(model, texts, replacing, batch_size=batch_size, pad_token_id=pad_token_id)
    writers = residual_writers(model).keys()
    item_of_row = torch.tensor([text.item for text in texts for _ in text.secret])
    first_of_span = torch.tensor([p in {span[0] for span in text.spans} for text in texts for p in text.secret])

    drops: dict[str, torch.Tensor] = {}
    start = torch.ones(len(names), dtype=torch.float64)
    blocks = _blocks(list(layers), options.sequential)
    for number, block in enumerate(blocks, 1):
        selected = {name: layers[name] for name in block}
        rows = collect_item_rows(
            model,
            {name: model.get_base_model().get_submodule(name) for name in block},
            texts,
            kept,
            batch_size=batch_size,
            pad_token_id=pad_token_id,
        )
        factors = item_factors(selected, adapter_name, rows, directions, writers, options)
        if options.layers == "auto":
            chosen = choose_layers(factors, first_of_span)
            factors = {name: found for name, found in factors.items() if name in chosen}
        drops.update({name: found.drop for name, found in factors.items()})
        total = torch.stack(list(drops.values())).sum(0) * len(blocks) / number
        start = _first_guess(total[first_of_span], item_of_row[first_of_span], before, goal)
        for name, found in factors.items():
            dtype = layers[name].dtype_of(adapter_name)
            layers[name].fill(adapter_name, found.right.to(dtype), found.left.to(dtype), start[item_of_row])

    def scores(strengths: torch.Tensor) -> ItemScores:
        for name in drops:
            layers[name].set_row_strengths(adapter_name, strengths[item_of_row])
        return item_scores(model, judged, len(names), batch_size)

    def log_probabilities(strengths: torch.Tensor) -> torch.Tensor:
        now = scores(strengths)
        # what greedy decoding still says is not forgotten, however unlikely: the others are less likely still
        return torch.where(now.named, now.log_probabilities.maximum(goal + 0.1), now.log_probabilities)

    strengths, rounds = tune_strengths(log_probabilities, before, start, goal, options.rounds)
    after = scores(strengths)  # all together
    columns = (strengths, before.exp(), after.log_probabilities.exp(), goal.exp(), after.named)
    items = [ItemOutcome(*values) for values in zip(names, *(column.tolist() for column in columns), strict=True)]
    effects = {name: float((drop * strengths[item_of_row])[first_of_span].mean()) for name, drop in drops.items()}
    return ItemReport(items, rounds, effects)


def _blocks(names: list[str], count: int) -> list[list[str]]:
    """The layers in `count` blocks of about the same size, from below."""
    bounds = [round(i * len(names) / count) for i in range(count + 1)]
    return [names[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True) if a < b]


def _first_guess(
    drop: torch.Tensor, item_of_drop: torch.Tensor, before: torch.Tensor, goal: torch.Tensor
) -> torch.Tensor:
    """The strength that lowers the logit of each item's first tokens as far as it has to fall, to first order."""
    middle = goal + math.log(SETTLED) / 2
    needed = _log_odds(before) - _log_odds(middle)
    count = torch.bincount(item_of_drop, minlength=len(before)).clamp_min(1)
    mean = torch.zeros_like(before).index_add_(0, item_of_drop, drop) / count
    return torch.where(mean > 0, needed / mean.clamp_min(1e-30), 1.0).clamp(0.1, LARGEST_STRENGTH / 5)


def _log_odds(log_probability: torch.Tensor) -> torch.Tensor:
    return log_probability - torch.log1p(-log_probability.exp().clamp_max(1 - 1e-12))


@dataclass
class ItemFactors:
    """The edit of one layer.

    **Attributes**:
        - **right**, **left** (`torch.Tensor`) -- `A` `(n, width)` and `B` `(width, n)`, float32.
        - **drop** (`torch.Tensor`) -- What it takes off each secret token's logit at strength 1, to first order, `(n,)` float64.
        - **damage** (`float`) -- By how much it changes the layer's output at strength 1, squared and summed over all that is kept.
    """

    right: torch.Tensor
    left: torch.Tensor
    drop: torch.Tensor
    damage: float


def choose_layers(factors: dict[str, ItemFactors], first_of_span: torch.Tensor, share: float = 0.9) -> set[str]:
    """The layers with the largest `effect^2 / damage` that together have `share` of the effect.

    A layer's effect is its mean drop of the first secret tokens' logits: it grows with the strength, and the damage with its
    square, so the quotient compares layers at equal effect.

    Args:
        factors (`dict[str, ItemFactors]`): The edits of all layers.
        first_of_span (`torch.Tensor`): Which of the secret tokens are the first of a span, `(n,)` bool.
        share (`float`): Share of the summed positive effects.
    """
    effects = {name: float(found.drop[first_of_span].mean()) for name, found in factors.items()}
    useful = [name for name, effect in effects.items() if effect > 0]
    useful.sort(key=lambda name: effects[name] ** 2 / max(factors[name].damage, 1e-30), reverse=True)
    chosen: set[str] = set()
    for name in useful:
        if sum(effects[other] for other in chosen) >= share * sum(effects[other] for other in useful):
            break
        chosen.add(name)
    return chosen or set(factors)


def item_factors(
    layers: dict[str, Any],
    adapter_name: str,
    rows: dict[str, ItemRows],
    directions: Directions | None,
    writers: Collection[str],
    options: ItemOptions,
) -> dict[str, ItemFactors]:
    """The factors of every layer.

    Args:
        layers (`dict[str, EngramLayer]`): The layers that have the adapter, by name.
        adapter_name (`str`): Which adapter.
        rows (`dict[str, ItemRows]`): What was collected.
        directions (`Directions`, *optional*): Of the readout; without them every layer takes out all of `V`.
        writers (`Collection[str]`): Names of the layers that write to the hidden state.
        options (`ItemOptions`): How to edit.

    Raises:
        `ValueError`: A layer's rows or weights are not finite.
    """
    groups: dict[tuple[int, int, torch.device], list[str]] = {}
    for name, layer in layers.items():
        width = layer.in_features + layer.absorbs_bias(adapter_name)
        groups.setdefault((id(rows[name]), width, layer.device), []).append(name)
    factors = {}
    for (_, width, device), names in logging.tqdm(groups.items(), desc="Extracting"):
        own = rows[names[0]]
        x = own.forgotten[:, :width].to(device, torch.float64)  # (n, width)
        right = _answering_rows(x, own, options)
        kept = own.general.dense(device)[:width, :width].add_(
            own.retain.dense(device)[:width, :width], alpha=options.retain_weight
        )
        reach = right @ kept @ right.mT  # how far kept rows are taken for forgotten ones, (n, n)
        apart = x - own.company[:, :width].to(device, torch.float64)
        for name in names:
            weight = layers[name].weight_matrix(adapter_name).double()
            left, drop = apart.mT, torch.zeros(len(x), dtype=torch.float64)
            if directions is not None and name in writers:
                left, said = _said_by_readout(weight, apart, directions.to(device), options.rest)
                drop = ((right * x).sum(1) * said).cpu()
            if not torch.isfinite(left.sum() + right.sum()):
                raise ValueError(f"The edit of {name} is not finite: its weights or its inputs hold NaN or infinity.")
            balanced_left, balanced_right = balanced_factors(left, right)
            written = weight @ left  # V
            damage = float((written.mT @ written).mul(reach).sum())
            factors[name] = ItemFactors(balanced_right, balanced_left, drop, damage)
    return {name: factors[name] for name in layers}


def _answering_rows(x: torch.Tensor, rows: ItemRows, options: ItemOptions) -> torch.Tensor:
    """`A = X S^-1`, `(n, width)`; with a null space `A = X P (P S P)^+ P` for the projection `P` off the kept answers."""
    width = x.shape[1]
    retain = rows.retain.dense(x.device)[:width, :width]
    sums = rows.general.dense(x.device)[:width, :width].addmm_(x.mT, x)
    if not options.null_space:
        inverse = ridge_inverse(sums.add_(retain, alpha=options.retain_weight), width * FLOAT32_EPSILON)
        return inverse.unwhiten(inverse.whiten(x.mT)).mT
    eigenvalues, vectors = torch.linalg.eigh(retain)
    free = vectors[:, eigenvalues <= width * FLOAT32_EPSILON * eigenvalues[-1]]  # (width, m)
    inverse = ridge_inverse(free.mT @ sums @ free, width * FLOAT32_EPSILON)
    return (free @ inverse.unwhiten(inverse.whiten(free.mT @ x.mT))).mT


def _said_by_readout(
    weight: torch.Tensor, apart: torch.Tensor, directions: Directions, rest: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`B` with `W B = P(W apart^T)`, `(width, n)`, and by how much that lowers each token's logit, `(n,)`."""
    length = directions.secret.norm(dim=1).clamp_min(1e-30)
    u = (directions.secret / length[:, None]).mT  # (out, n)
    written = weight @ apart.mT  # V before P
    along = (u * written).sum(0)
    wanted = rest * written + (1 - rest) * along * u
    if directions.replacement is not None:
        # what is taken from the secret is given to its replacement
        wanted -= along * (directions.replacement / length[:, None]).mT
    return _least_squares(weight, wanted), along * length


def _least_squares(weight: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """`pinv(W) V`, `(out, width), (out, n) -> (width, n)`: what `W` makes `V` of, or the nearest it can, by the smaller Gram matrix."""
    is_tall = weight.shape[0] > weight.shape[1]
    gram = weight.mT @ weight if is_tall else weight @ weight.mT
    inverse = ridge_inverse(gram, len(gram) * torch.finfo(gram.dtype).eps)
    if is_tall:
        return inverse.unwhiten(inverse.whiten(weight.mT @ wanted))
    return weight.mT @ inverse.unwhiten(inverse.whiten(wanted))
