"""Every class of experts that transformers ships: built tiny, edited, merged."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import get_peft_model
from torch import nn

from engram_peft import EngramConfig, collect_statistics, extract_engram, merge_statistics
from engram_peft.editing.experts import OWN_CLASSES, expert_stacks

from .tuners.adapters import close


EXPERTS, TOP_K, WIDTH, INNER = 4, 2, 8, 12
_MODELS = Path(transformers.__file__).parent / "models"
_STACK = re.compile(
    r"nn\.Parameter\(\s*torch\.\w+\(\(?\s*(?:self\.|config\.)?(?:total|num|n_shared|moe_num)\w*experts?\b[^,()]*,[^,()]+,"
)


def _classes() -> list[tuple[str, str]]:
    """Model and class of everything that is decorated as experts, or holds a Parameter whose first dimension is experts'."""
    found = []
    for file in sorted(_MODELS.glob("*/modeling_*.py")):
        source = file.read_text()
        if "experts" not in source:
            continue
        for match in re.finditer(r"((?:^@.*\n)*)^class (\w+)\(.*\n((?:(?:    .*)?\n)*)", source, re.MULTILINE):
            decorators, name, body = match.groups()
            stacked = _STACK.search(body) and "dtype=torch.float32" not in _STACK.search(body).group(0)
            is_matrix_stack = "moe_num_experts * self.ffn_hidden_size" in body
            routers = re.search(r"(TopK|Topk|Statics|Gate$|Router)", name)
            if "use_experts_implementation" in decorators or ((stacked or is_matrix_stack) and not routers):
                found.append((f"{file.parent.name}.{file.stem}", name))
    return found


CLASSES = _classes()


class TinyConfig:
    """What a class of experts asks its config for, by the kind of name that it asks by."""

    hidden_act = mlp_hidden_act = activation_function = hidden_activation = "silu"
    ffn_act_fn = {"name": "silu"}
    _experts_implementation = "eager"
    moe_latent_size = None
    zero_expert_num = 1
    swiglu_limit, swiglu_alpha, mlp_gate_softcap, mlp_up_softcap = 7.0, 1.702, 5.0, 5.0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if "expert" in name and "ffn" not in name and "size" not in name:
            return EXPERTS
        if "hidden_size" in name and "ffn" not in name or name in ("d_model",):
            return WIDTH
        if "intermediate" in name or "ffn" in name:
            return INNER
        if "eps" in name:
            return 1e-6
        raise AttributeError(name)


def build(model: str, name: str) -> nn.Module:
    """The experts, alone: all weights random, biases too."""
    cls = getattr(importlib.import_module(f"transformers.models.{model}"), name)
    torch.manual_seed(0)
    module = cls(EXPERTS, WIDTH, INNER) if name == "JetMoeParallelExperts" else cls(TinyConfig())
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            parameter.normal_(std=0.1 if "norm" in key else 0.4)
    return module


class Mixture(nn.Module):
    """A router that every class can be run by, around its experts."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.kind = type(experts).__name__
        if self.kind == "DbrxExpertGLU":
            from transformers.models.dbrx.modeling_dbrx import DbrxExperts

            outer = DbrxExperts(TinyConfig())
            outer.mlp, experts = experts, outer
        if self.kind == "JetMoeParallelExperts":
            self.router = _Router(self.gate)
        self.experts = experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(-1, WIDTH)
        scores, index = self.gate(x).softmax(-1).topk(TOP_K)
        if self.kind == "Llama4TextExperts":
            dense = torch.zeros(len(x), EXPERTS).scatter(1, index, scores)
            return self.experts(x.repeat(EXPERTS, 1) * dense.T.reshape(-1, 1))
        if self.kind == "InklingSharedExperts":
            return self.experts(x, self.gate(x).softmax(-1))
        if self.kind == "JetMoeParallelExperts":
            _, tokens, _, sizes, _ = self.router(x)
            return self.experts(x[tokens], sizes)
        return self.experts(x, index, scores)


class _Router(nn.Module):
    """What JetMoE's returns."""

    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.gate = gate

    def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
        logits = self.gate(x)
        experts, order = logits.topk(TOP_K).indices.flatten().sort(stable=True)
        return order, order // TOP_K, None, torch.bincount(experts, minlength=EXPERTS).tolist(), logits


def test_the_list_is_that_of_transformers():
    """Sixty and more are decorated; what is not is exactly what we know by name."""
    names = {name for _, name in CLASSES}
    assert {"MixtralExperts", "GptOssExperts", "NemotronHExperts", "AriaExperts", "MuseSparkExperts"} <= names
    assert len(CLASSES) >= 70
    undecorated = set()
    for model, name in CLASSES:
        cls = getattr(importlib.import_module(f"transformers.models.{model}"), name)
        if not hasattr(cls, "_apply_gate") or not hasattr(cls.forward, "__wrapped__"):
            undecorated.add(name)
    assert undecorated == set(OWN_CLASSES)


@pytest.mark.parametrize("model, name", CLASSES, ids=[name for _, name in CLASSES])
def test_experts_are_edited(model, name):
    """The class's own forward pass computes the same as ours, with an identity and with merged weights; masks count rows."""
    mixture = Mixture(build(model, name)).eval()
    torch.manual_seed(1)
    x = torch.randn(20, WIDTH)
    own = mixture(x)
    stacks = expert_stacks(mixture)
    assert len(stacks) >= (1 if name == "JetMoeParallelExperts" else 2)
    config = EngramConfig(target_modules=[], target_parameters=list(stacks), alpha=0.5)
    adapted = get_peft_model(mixture, config).eval()
    adapted.base_model.set_scale("default", 0.0)
    assert torch.equal(adapted(x), own)
    adapted.base_model.set_scale("default", 1.0)
    assert close(adapted(x), own, 1e-5)
    mask = torch.arange(20) % 2 == 0
    target = collect_statistics(adapted, [x], mask_fn=lambda batch: mask)
    total = merge_statistics(target, collect_statistics(adapted, [x], mask_fn=lambda batch: ~mask))
    for stack in stacks:
        rows = sum(count for key, count in total.counts.items() if key.rpartition(".")[0] == stack)
        assert rows == 20 * (EXPERTS if name == "InklingSharedExperts" else TOP_K)
    extract_engram(adapted, target, total, scale="uniform", cut="ridge", ridge_delta=1e-2)
    edited = adapted(x)
    assert not close(edited, own, 1e-2)
    adapted.merge_adapter(safe_merge=True)
    assert close(adapted(x), edited, 1e-4)
    adapted.unmerge_adapter()
    if name in OWN_CLASSES:
        return
    for implementation in ("grouped_mm", "batched_mm"):
        adapted.get_base_model().experts.get_base_layer().config._experts_implementation = implementation
        assert close(adapted(x), edited, 1e-4), implementation
