"""The model is its backbone and memories, and everything that one does to a model can be done to it."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers as t
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.integrations.accelerate import infer_auto_device_map

from engram_peft import EngramForCausalLM, EngramLMConfig
from engram_peft.memory import NgramMemory

from .tiny import (
    BACKBONES,
    KINDS,
    VARIANTS,
    VOCAB_SIZE,
    backbone,
    backbone_config,
    engram,
    engram_config,
    fill,
    logits,
    shared,
    token_ids,
)  # fmt: skip


GENERATE = {"do_sample": False, "max_new_tokens": 6, "return_dict_in_generate": True, "output_logits": True}
SMALL_MEMORY = {"engram_n_heads": 2, "engram_head_dim": 4, "engram_vocab_size": 50}


def follows_full_pass(model, ids: torch.Tensor, **kwargs) -> None:
    out = model.generate(input_ids=ids, **kwargs, **GENERATE)
    expected = logits(model, out.sequences, **kwargs)[:, ids.shape[1] - 1 : -1]
    torch.testing.assert_close(torch.stack(out.logits, dim=1), expected, rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------------------- memories added


@pytest.mark.parametrize("kind", KINDS)
def test_adding_memories_changes_no_bit(kind: str):
    model = backbone(kind)
    expected = logits(model, token_ids())
    for variant in VARIANTS:
        config = engram_config(kind, variant)
        grown = EngramForCausalLM.from_backbone(model, config)
        assert grown.backbone is model and not grown.training
        assert torch.equal(logits(grown, token_ids()), expected)
        fill(grown)
        assert not torch.equal(logits(grown, token_ids()), expected)
        assert torch.equal(logits(model, token_ids()), expected)  # on its own it is what it was


def test_memories_take_dtype_and_generation_config_of_the_backbone():
    model = backbone().to(torch.bfloat16)
    model.generation_config.top_k = 7
    grown = EngramForCausalLM.from_backbone(model, engram_config())
    assert {parameter.dtype for parameter in grown.parameters()} == {torch.bfloat16} and grown.dtype == torch.bfloat16
    assert grown.generation_config.top_k == 7
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_sentences_with_trained_ngrams_change(variant: str):
    """The tables start at zero, and the value projection does not: what was never trained keeps saying nothing.

    Biases, which the published demo has, speak for every n-gram.
    """
    config = engram_config(variant=variant, engram_vocab_size=50_000, engram_bias=False)
    model = EngramForCausalLM.from_backbone(backbone(), config)
    trained, other = token_ids(1, 12, seed=3) // 2 + 1, token_ids(4, 12, seed=4) // 2 + 50
    before = logits(model, other), logits(model, trained)
    for parameter in model.backbone.parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        model(input_ids=trained, labels=trained).loss.backward()
        optimizer.step()
    assert not torch.equal(logits(model, trained), before[1])
    assert torch.equal(logits(model, other), before[0])


def quantised(method: str) -> t.quantizers.base.QuantizationConfigMixin:
    if method == "int8 of torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        return t.TorchAoConfig(Int8WeightOnlyConfig())
    if method == "int8 of bitsandbytes":
        return t.BitsAndBytesConfig(load_in_8bit=True)
    return t.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)


@pytest.mark.parametrize("method", ["int8 of torchao", "int8 of bitsandbytes", "nf4 of bitsandbytes"])
def test_a_quantised_backbone(method: str, tmp_path):
    shape = {"hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 4, "head_dim": 32}
    backbone("llama", **shape).save_pretrained(tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=quantised(method))
    config = EngramLMConfig.from_backbone(model.config, **SMALL_MEMORY)
    grown = fill(EngramForCausalLM.from_backbone(model, config))
    assert type(grown.memories["1"].kv_proj) is torch.nn.Linear
    # Saved before the first pass: bitsandbytes 0.50 cannot save what it repacked for the CPU.
    grown.save_pretrained(tmp_path / "grown")
    loaded = EngramForCausalLM.from_pretrained(tmp_path / "grown")
    assert type(loaded.memories["1"].kv_proj) is torch.nn.Linear
    for name, parameter in grown.memories.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(loaded.memories.get_parameter(name), parameter)
    ids = token_ids()
    assert torch.equal(logits(loaded, ids), logits(grown, ids))
    fresh = EngramForCausalLM.from_backbone(model, config)
    assert torch.equal(logits(fresh, ids), logits(model, ids))
    assert not torch.equal(logits(grown, ids), logits(model, ids))


def write_gguf(model: t.LlamaForCausalLM, path: Path) -> None:
    """The weights in the names of llama.cpp, which has the halves of every rotated head interleaved."""
    import gguf

    config, weights = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    for i in range(config.num_hidden_layers):
        names |= {f"model.layers.{i}.{ours}": f"blk.{i}.{theirs}" for ours, theirs in parts.items()}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for ours, theirs in names.items():
        weight = weights[f"{ours}.weight"]
        if count := heads.get(theirs.split(".")[-1]):
            weight = weight.view(count, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(f"{theirs}.weight", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_backbone_from_gguf(tmp_path):
    plain = backbone()
    write_gguf(plain, tmp_path / "model.gguf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
    grown = EngramForCausalLM.from_backbone(model, EngramLMConfig.from_backbone(model.config, **SMALL_MEMORY))
    assert torch.equal(logits(grown, token_ids()), logits(plain, token_ids()))
    fill(grown).save_pretrained(tmp_path / "grown")  # its weights were unpacked while loading
    loaded = EngramForCausalLM.from_pretrained(tmp_path / "grown")
    assert torch.equal(logits(loaded, token_ids()), logits(grown, token_ids()))


def test_a_table_too_large_for_any_accelerator_stays_in_host_memory():
    with torch.device("meta"):
        model = EngramForCausalLM(engram_config(engram_layer_ids=[1], engram_vocab_size=100_000))
    backbone_size = sum(4 * parameter.numel() for parameter in model.backbone.parameters())
    limits = {0: backbone_size + 200_000, 1: backbone_size + 200_000, 2: backbone_size + 200_000, "cpu": 10**9}
    placed = infer_auto_device_map(
        model, limits, no_split_module_classes=model._no_split_modules, no_placement_params=model._no_placement_params
    )
    assert all(place != "cpu" for name, place in placed.items() if not name.startswith("memories"))
    assert "memories.1.table.weight" not in placed and placed["memories.1.kv_proj.weight"] in (0, 1, 2)


def test_an_offloaded_backbone(tmp_path):
    plain = backbone()
    plain.save_pretrained(tmp_path)
    places = dict.fromkeys(
        ["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"], "cpu"
    )
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map={**places, "model.layers.1": "disk"}, offload_folder=tmp_path / "offload"
    )
    grown = EngramForCausalLM.from_backbone(model, engram_config())
    assert torch.equal(logits(grown, token_ids()), logits(plain, token_ids()))
    assert grown.hf_device_map["backbone.model.layers.1"] == "disk"
    assert str(grown.hf_device_map["memories.1"]) == "cpu"
    grown.save_pretrained(tmp_path / "grown")
    loaded = EngramForCausalLM.from_pretrained(tmp_path / "grown")
    assert torch.equal(logits(loaded, token_ids()), logits(plain, token_ids()))


# ------------------------------------------------------------------------------------------------- other backbones


def llava() -> t.LlavaConfig:
    return t.LlavaConfig(
        text_config=backbone_config("llama"), image_token_id=98, image_token_index=98, image_seq_length=4,
        vision_config={
            "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": 8, "patch_size": 4, "projection_dim": 16,
        },
    )  # fmt: skip


def test_a_multimodal_backbone(tmp_path):
    torch.manual_seed(0)
    model = fill(EngramForCausalLM(EngramLMConfig.from_backbone(llava(), **SMALL_MEMORY)).eval())
    model.generation_config.eos_token_id = None
    assert type(model.backbone) is t.LlavaForConditionalGeneration
    ids = torch.tensor([[5, 6, 98, 98, 98, 98, 7, 8, 9]])
    pixels = torch.randn(1, 3, 8, 8)
    follows_full_pass(model, ids, pixel_values=pixels)
    said: list[torch.Tensor] = []
    model.memories["1"].register_forward_hook(lambda module, args, output: said.append(output[0]))
    expected = logits(model, ids, pixel_values=pixels)
    assert not said[0][:, 2:6].any() and said[0][:, 6:].any()  # nothing is said about an image
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, ids, pixel_values=pixels), expected)


def test_a_backbone_of_several_streams():
    torch.manual_seed(0)
    config = t.DeepseekV4Config(
        vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=16, q_lora_rank=16,
        o_lora_rank=8, o_groups=2, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, hc_mult=3,
        index_n_heads=2, index_head_dim=16, index_topk=4, sliding_window=8, initializer_range=0.2,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    plain = AutoModelForCausalLM.from_config(config).eval()
    expected = logits(plain, token_ids())
    model = EngramForCausalLM.from_backbone(plain, EngramLMConfig.from_backbone(config, **SMALL_MEMORY))
    assert torch.equal(logits(model, token_ids()), expected)
    fill(model)
    shapes: list[torch.Size] = []
    model.memories["1"].register_forward_pre_hook(lambda module, args: shapes.append(args[0].shape))
    full = logits(model, token_ids())
    assert shapes == [(2, 11, 3, 32)] and not torch.equal(full, expected)
    cache, steps = None, []
    with torch.no_grad():
        for piece in token_ids().split([4, 1, 1, 5], dim=1):
            out = model(input_ids=piece, cache=cache, use_cache=True)
            cache = out.cache
            steps.append(out.logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), full, rtol=0, atol=1e-5)


def test_a_quantised_cache_holds_keys_and_values_only():
    """What the memory of the first layer says depends on no key."""
    model, ids = shared(), token_ids()
    said: list[torch.Tensor] = []
    handle = model.memories["0"].register_forward_hook(lambda module, args, output: said.append(output[0]))
    cache = t.QuantizedCache("fp8", config=model.config.get_text_config())
    out = model.generate(ids, cache=cache, **GENERATE)
    generated = torch.cat(said, dim=1)
    said.clear()
    logits(model, out.sequences[:, :-1])
    handle.remove()
    torch.testing.assert_close(generated, said[0], rtol=0, atol=1e-6)


# ------------------------------------------------------------------------------------------------- what is done to models


def test_added_tokens_leave_old_hashes_alone(tiny_tokenizer, tmp_path):
    model = fill(EngramForCausalLM(engram_config(tokenizer=tiny_tokenizer())).eval())
    ids = token_ids()
    expected, old_map = logits(model, ids), model.token_map
    model.resize_token_embeddings(VOCAB_SIZE + 21, mean_resizing=False)
    assert model.vocab_size == model.config.text_config.vocab_size == VOCAB_SIZE + 21
    assert torch.equal(logits(model, ids)[..., :VOCAB_SIZE], expected)
    assert torch.equal(model.token_map[:VOCAB_SIZE], old_map)
    assert len(set(model.token_map.tolist())) == len(set(old_map.tolist())) + 21  # each a class of its own
    logits(model, ids + 21)
    model.save_pretrained(tmp_path)
    loaded = EngramForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, ids + 21), logits(model, ids + 21))
    model.resize_token_embeddings(VOCAB_SIZE)
    assert torch.equal(model.token_map, old_map)


def test_embeddings_in_place_of_ids():
    for kind in ("llama", "gemma3"):  # which scales its embeddings
        model, ids = shared(kind), token_ids()
        embeds = model.get_input_embeddings()(ids)
        expected = logits(model, ids)
        with torch.no_grad():
            # Gemma scales in its embedding module, so what comes out of it is what goes in.
            assert torch.equal(model(inputs_embeds=embeds).logits, expected)
            assert torch.equal(model(inputs_embeds=embeds, engram_input_ids=ids).logits, expected)


def test_soft_prompts_with_ids_for_the_memories():
    model, ids = shared(), token_ids()
    embeds = model.get_input_embeddings()(ids) + 0.01
    with torch.no_grad():
        out = model.generate(inputs_embeds=embeds, engram_input_ids=ids, **GENERATE)
        everything = torch.cat([embeds, model.get_input_embeddings()(out.sequences)], dim=1)
        full = model(
            inputs_embeds=everything, engram_input_ids=torch.cat([ids, out.sequences], dim=1), use_cache=False
        )
    expected = full.logits[:, ids.shape[1] - 1 : -1]
    torch.testing.assert_close(torch.stack(out.logits, dim=1), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_checkpointing_changes_no_gradient(kind: str):
    """Two passes before one backward: each replay must see its own tokens."""
    model, ids = engram(kind), token_ids()
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        loss = sum(model(input_ids=x, labels=x).loss for x in (ids, ids.flip(1)))
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    expected = gradients()
    model.activation_checkpointing_enable()
    for actual, gradient in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(actual, gradient, rtol=0, atol=1e-6)


def test_an_adapter_on_top(tmp_path):
    config = LoraConfig(target_modules=["q_proj", "kv_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = get_peft_model(engram(), config).eval()
    follows_full_pass(adapted, token_ids())
    assert not torch.equal(logits(adapted, token_ids()), logits(shared(), token_ids()))
    with adapted.disable_adapter():
        assert torch.equal(logits(adapted, token_ids()), logits(shared(), token_ids()))
    adapted.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(engram(), tmp_path).eval()
    assert torch.equal(logits(loaded, token_ids()), logits(adapted, token_ids()))


def test_copies_have_memories_of_their_own():
    model, ids = engram(), token_ids()
    expected = logits(model, ids)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(twin, ids), expected)
        with torch.no_grad():
            twin.memories["1"].table.weight.zero_()
        assert not torch.equal(logits(twin, ids), expected)
    assert torch.equal(logits(model, ids), expected)


@pytest.mark.slow
def test_it_can_be_exported():
    model, ids = engram(), token_ids()
    auto = torch.export.Dim.AUTO
    shapes = {"input_ids": {0: auto, 1: auto}, "use_cache": None}
    program = torch.export.export(model, args=(), kwargs={"input_ids": ids, "use_cache": False}, dynamic_shapes=shapes)
    other = token_ids(3, 7)
    actual = program.module()(input_ids=other, use_cache=False).logits
    torch.testing.assert_close(actual, logits(model, other), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt"])
def test_the_base_model_has_no_head_but_memories(kind: str):
    """Trainers that never make all logits call it, and the head themselves."""
    model, ids = shared(kind), token_ids()
    with torch.no_grad():
        hidden_states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    assert torch.equal(model.get_output_embeddings()(hidden_states), logits(model, ids))
    assert model.get_decoder() is model.backbone.get_decoder()


def test_the_backbone_decides_how_it_runs():
    model = engram()
    ids = token_ids()
    expected = logits(model, ids)
    model.set_attn_implementation("eager")
    assert model.config.text_config._attn_implementation == "eager"
    torch.testing.assert_close(logits(model, ids), expected, rtol=0, atol=1e-5)
    with torch.no_grad():
        outputs = model(input_ids=ids, output_hidden_states=True, output_attentions=True)
    assert len(outputs.hidden_states) == 3 and len(outputs.attentions) == 2
    assert len(model(input_ids=ids, return_dict=False)) == 2


def test_a_memory_stands_before_the_layer_that_its_number_names():
    model = engram(engram_layer_ids=[1])
    ids = token_ids()
    with torch.no_grad():
        silent = model.backbone(input_ids=ids, output_hidden_states=True).hidden_states
        heard = model(input_ids=ids, output_hidden_states=True).hidden_states
    assert torch.equal(heard[0], silent[0])
    assert not torch.equal(heard[-1], silent[-1])
    assert [type(m) for m in model.memories.values()] == [NgramMemory] and list(model.memories) == ["1"]
    assert list(shared().memories) == ["1", "0"]  # in the order that table sizes are dealt out


def test_every_tiny_backbone_is_another_architecture():
    assert len({config.model_type for config in BACKBONES.values()}) == len(KINDS) == 9


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_experts_run_as_the_backbone_is_told(implementation: str):
    model, ids = engram("mixtral"), token_ids()
    expected = logits(model, ids)
    model.set_experts_implementation(implementation)
    assert model.backbone.config._experts_implementation == implementation
    torch.testing.assert_close(logits(model, ids), expected, rtol=0, atol=1e-5)


def test_threads_take_turns():
    model = fill(engram("llama", "deepseek"))
    texts = [token_ids(length=length, seed=length) for length in (5, 9, 14)]
    expected = [model.generate(input_ids=ids, do_sample=False, max_new_tokens=12, pad_token_id=0) for ids in texts]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            found = pool.map(
                lambda ids: model.generate(input_ids=ids, do_sample=False, max_new_tokens=12, pad_token_id=0), texts
            )
            assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
