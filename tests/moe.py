"""Tiny random mixtures of experts of transformers, and what their experts are fed, computed the plain way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


VOCAB_SIZE = 99
EXPERTS = 4
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 64, "initializer_range": 0.4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
_KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 24, "num_local_experts": EXPERTS, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "intermediate_size": 24, "moe_intermediate_size": 24, "num_experts": EXPERTS, "num_experts_per_tok": 2, "head_dim": 8,
        "mlp_only_layers": [], "decoder_sparse_step": 1,
    },
    "deepseek_v3": {
        "intermediate_size": 24, "moe_intermediate_size": 24, "n_routed_experts": EXPERTS, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 2,
    },
    "gpt_oss": {
        "intermediate_size": 24, "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "nemotron_h": {
        "layers_block_type": ["attention", "moe"], "n_routed_experts": EXPERTS, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "head_dim": 8, "mamba_num_heads": 2, "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 4, "num_hidden_layers": 2,
    },
    "llama4_text": {
        "intermediate_size": 24, "intermediate_size_mlp": 24, "num_local_experts": EXPERTS, "num_experts_per_tok": 1, "head_dim": 8,
        "moe_layers": [0, 1], "use_qk_norm": False,
    },
    "dbrx": {
        "d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 64, "resid_pdrop": 0.0,
        "attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": EXPERTS, "moe_top_k": 2},
    },
    "jetmoe": {"intermediate_size": 24, "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "kv_channels": 8},
}  # fmt: skip
_LEFT_OUT = {
    "dbrx": {
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
    }
}


KINDS = list(_KINDS)


def moe_model(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random causal language model with experts; every parameter, biases too, is random."""
    settings = {k: v for k, v in _COMMON.items() if k not in _LEFT_OUT.get(kind, ())} | _KINDS[kind] | changes
    config = AutoConfig.for_model(kind, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" not in name:
                    parameter.normal_(std=0.4)
    return model.to(dtype).eval()


def plain_rows(model: nn.Module, kind: str, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """The selected inputs of every expert's weights in float64, `{"<parameter>.<expert>": (n, in)}`, one expert at a time.

    From what the router and the experts are handed and from the formula of the kind; nothing of the code under test takes part.
    Biased weights have a column of ones.
    """
    with _handed(model, kind) as seen, torch.no_grad():
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
    chosen, rows = mask.flatten().tolist(), {}
    for name, (module, tokens, index) in seen.items():
        for expert in range(EXPERTS):
            routed = [t for t in range(len(tokens)) if chosen[t] and expert in index[t].tolist()]
            rows |= {
                f"{name}.{key}.{expert}": x
                for key, x in _inputs(kind, module, expert, tokens[routed].double()).items()
            }
    return rows


def _inputs(kind: str, module: Any, expert: int, x: torch.Tensor) -> dict[str, torch.Tensor]:
    def weight(name: str) -> torch.Tensor:
        return getattr(module, name).detach()[expert].double()

    ones = x.new_ones(len(x), 1)
    silu = nn.functional.silu
    if kind == "gpt_oss":
        gate_up = x @ weight("gate_up_proj") + weight("gate_up_proj_bias")
        gate, up = gate_up[:, ::2].clamp(max=module.limit), gate_up[:, 1::2].clamp(-module.limit, module.limit)
        hidden = (up + 1) * gate * torch.sigmoid(module.alpha * gate)
        return {"gate_up_proj": torch.cat([x, ones], 1), "down_proj": torch.cat([hidden, ones], 1)}
    if kind == "nemotron_h":
        return {"up_proj": x, "down_proj": (x @ weight("up_proj").T).relu().square()}
    if kind == "dbrx":
        shape = (EXPERTS, module.ffn_hidden_size, -1)
        w1, v1 = (getattr(module, name).detach().view(shape)[expert].double() for name in ("w1", "v1"))
        return {"w1": x, "v1": x, "w2": silu(x @ w1.T) * (x @ v1.T)}
    if kind == "jetmoe":
        gate, up = (x @ module.input_linear.weight.detach()[expert].double().T).chunk(2, -1)
        return {"input_linear.weight": x, "output_linear.weight": silu(gate) * up}
    gate, up = (x @ (weight("gate_up_proj") if kind == "llama4_text" else weight("gate_up_proj").T)).chunk(2, -1)
    return {"gate_up_proj": x, "down_proj": silu(gate) * up}


@contextmanager
def _handed(model: nn.Module, kind: str) -> Iterator[dict[str, tuple[Any, torch.Tensor, torch.Tensor]]]:
    """Of every mixture by name: the module with the weights, the tokens `(T, hidden)` and the experts of each `(T, k)`."""
    seen: dict[str, tuple[Any, torch.Tensor, torch.Tensor]] = {}

    def watch(name: str, module: Any) -> Any:
        if kind == "llama4_text":

            def hook(m: Any, args: Any, output: Any) -> None:
                x = args[0].reshape(-1, args[0].shape[-1])
                scores, index = output[0].max(-1).values, output[0].argmax(-1, keepdim=True)
                seen[f"{name}.experts"] = (module.experts, x * scores[:, None], index)

            return module.router.register_forward_hook(hook)
        if kind == "jetmoe":

            def hook(m: Any, args: Any, output: Any) -> None:
                seen[name] = (module, args[0], output[4].topk(module.router.top_k).indices)

            return module.router.register_forward_hook(hook)

        def pre_hook(m: Any, args: Any) -> None:
            at = f"{name}.mlp" if kind == "dbrx" else name
            seen[at] = (module.mlp if kind == "dbrx" else module, args[0].reshape(-1, args[0].shape[-1]), args[1])

        return module.register_forward_pre_hook(pre_hook)

    ending = {"llama4_text": "feed_forward", "jetmoe": ".mlp"}.get(kind, ".experts")
    handles = [watch(name, module) for name, module in model.named_modules() if name.endswith(ending)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
