"""The layer of the Engram paper's demo (`deepseek-ai/Engram`, class `Engram`) as an `NgramMemory`, and back, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..memory.spec import NgramMemorySpec


TABLE = "multi_head_embedding.embedding.weight"
CONV = "short_conv.conv.weight"
# One tensor a branch there, one for all branches here.
NORMS = {
    "gate.key_norm.weight": "norm1.{}.weight",
    "gate.query_norm.weight": "norm2.{}.weight",
    "conv_norm.weight": "short_conv.norms.{}.weight",
}


def demo_to_memory(state_dict: Mapping[str, torch.Tensor], spec: NgramMemorySpec) -> dict[str, torch.Tensor]:
    """The state dict of an `NgramMemory` from that of a demo layer.

    Args:
        state_dict (`Mapping[str, torch.Tensor]`): Of the demo's `Engram`; its offsets, which are a buffer, are not needed.
        spec (`NgramMemorySpec`): The memory, `variant="deepseek"`.

    Raises:
        `KeyError`: A tensor is missing.
    """
    branches = range(spec.hc_mult)
    projections = [*(f"key_projs.{branch}" for branch in branches), "value_proj"]
    memory = {"table.weight": state_dict[TABLE], "conv.weight": state_dict[CONV]}
    for kind in ("weight", "bias"):
        memory[f"kv_proj.{kind}"] = torch.cat([state_dict[f"{projection}.{kind}"] for projection in projections])
    for ours, theirs in NORMS.items():
        memory[ours] = torch.stack([state_dict[theirs.format(branch)] for branch in branches])
    return memory


def memory_to_demo(state_dict: Mapping[str, torch.Tensor], spec: NgramMemorySpec) -> dict[str, torch.Tensor]:
    """The state dict of a demo layer from that of an `NgramMemory`: the inverse of `demo_to_memory`."""
    demo = {TABLE: state_dict["table.weight"], CONV: state_dict["conv.weight"]}
    for kind in ("weight", "bias"):
        *keys, value = state_dict[f"kv_proj.{kind}"].split(spec.hidden_size)
        demo |= {f"key_projs.{branch}.{kind}": key for branch, key in enumerate(keys)}
        demo[f"value_proj.{kind}"] = value
    for ours, theirs in NORMS.items():
        demo |= {theirs.format(branch): weight for branch, weight in enumerate(state_dict[ours])}
    return demo
