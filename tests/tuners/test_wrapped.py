"""Models inside something else: compiled, checkpointed, with adapters of another kind, or part of a larger model."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
from transformers.pytorch_utils import Conv1D

from engram_peft import EngramConfig, collect_statistics, extract_engram, unlearn

from ..editing.reference import relative_error
from .adapters import FORGET, RETAIN, close, edited, fill, logits, same_tensors, statistics, tensors


ITEMS = {"france": ("the capital of france is", " paris"), "italy": ("the capital of italy is", " rome")}
KEPT = [("the capital of spain is", " madrid"), "the old red house on the long road"]


def paper():
    return EngramConfig.paper(alpha=0.5, task_type="CAUSAL_LM")


def same_statistics(found, expected):
    return all(torch.equal(found.covariance(name), expected.covariance(name)) for name in expected.moments)


# ------------------------------------------------------------------------------------------------ compiled


def compiled_module(model):
    return torch.compile(model, backend="eager")


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


def compiled_layers(model):
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return model


@pytest.mark.parametrize("wrap", [compiled_module, compiled_in_place, compiled_layers])
def test_compiled_model_is_seen_through(tiny_model, tokenizer, ids, wrap):
    """Also one that ran before: what was compiled then does not call hooks that are added now."""
    model = wrap(tiny_model("llama"))
    logits(model, ids)
    assert same_statistics(statistics(model, tokenizer)[0], statistics(tiny_model("llama"), tokenizer)[0])


def test_compiled_adapter_follows_its_strength(tiny_model, tokenizer, ids):
    plain = edited(tiny_model("llama"), tokenizer)
    model = edited(compiled_module(tiny_model("llama")), tokenizer)
    assert tensors(model).keys() == tensors(plain).keys()  # names are those of the plain model
    compiled = compiled_module(model)
    for scale in (1.0, 0.5, 0.0):
        model.set_scale("default", scale)
        plain.set_scale("default", scale)
        assert torch.equal(logits(compiled, ids), logits(plain, ids))
    target, total = statistics(tiny_model("llama"), tokenizer, FORGET[:1])
    extract_engram(compiled, target, total)
    extract_engram(plain, target, total)
    assert same_tensors(tensors(model), tensors(plain))


# ------------------------------------------------------------------------------------------------ checkpointed


def test_gradient_checkpointing_changes_neither_statistics_nor_gradients(tiny_model, tokenizer, ids):
    model = tiny_model("llama")
    model.gradient_checkpointing_enable()
    model.train()
    assert same_statistics(statistics(model, tokenizer)[0], statistics(tiny_model("llama"), tokenizer)[0])
    assert model.training
    gradients = []
    for is_checkpointed in (False, True):
        model = edited(tiny_model("llama"), tokenizer).train()
        if is_checkpointed:
            model.get_base_model().gradient_checkpointing_enable()
            model.enable_input_require_grads()
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 30
    assert all(close(gradients[1][name], gradient, 1e-5) for name, gradient in gradients[0].items())


# ------------------------------------------------------------------------------------------------ called by keyword


class ByKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.conv = nn.Linear(8, 8), Conv1D(8, 8)

    def forward(self, x):
        return self.conv(x=self.linear(input=x))


def test_layers_that_are_called_by_keyword_are_edited():
    torch.manual_seed(0)
    x, plain = torch.randn(30, 8), ByKeyword()
    model = get_peft_model(copy.deepcopy(plain), EngramConfig.paper(target_modules=["linear", "conv"]))
    target = collect_statistics(model, [x[:3]])
    extract_engram(model, target, collect_statistics(model, [x]))
    after = model(x)
    assert relative_error(after, plain(x)) > 0.01
    assert relative_error(model.merge_and_unload()(x), after) < 1e-5


# ------------------------------------------------------------------------------------------------ beside LoRA


def with_lora(model, name="default"):
    config = LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return get_peft_model(model, config, name).eval()


def test_beside_lora_the_base_is_edited_and_lora_is_not(tiny_model, tokenizer, ids):
    lora = with_lora(tiny_model("llama"))
    before = logits(lora, ids)
    own = {name: tensor for name, tensor in tensors(lora).items() if "lora_" in name}
    model = unlearn(lora, tokenizer, FORGET, RETAIN, paper())
    after = logits(model, ids)
    assert not close(after, before, 1e-2)
    assert torch.equal(logits(lora, ids), after)  # one model, two handles
    assert same_tensors({name: tensor for name, tensor in tensors(lora).items() if "lora_" in name}, own)
    assert list(model.base_model.engram_layers()) == list(collect_statistics(lora, [ids]).moments)
    layer = model.get_base_model().model.layers[0].mlp.down_proj  # LoRA's
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        added = layer.lora_B["default"](layer.lora_A["default"](x)) * layer.scaling["default"]
        assert relative_error(layer(x), layer.base_layer(x) + added) < 1e-6
    with model.disable_adapter():
        assert torch.equal(logits(model, ids), before)


def test_beside_lora_merging_leaves_lora_alone(tiny_model, tokenizer, ids):
    lora = with_lora(tiny_model("llama"))
    before = logits(lora, ids)
    model = unlearn(lora, tokenizer, FORGET, RETAIN, paper())
    after = logits(model, ids)
    model.merge_adapter()
    assert not any(layer.merged for layer in lora.modules() if hasattr(layer, "lora_A"))
    assert close(logits(model, ids), after)
    model.unmerge_adapter()
    assert torch.equal(logits(model, ids), after)
    merged = model.merge_and_unload()
    assert close(logits(merged, ids), after)
    assert any("lora_A" in name for name, _ in merged.named_modules())
    with lora.disable_adapter():
        edit = logits(lora, ids)
    assert not close(edit, logits(tiny_model("llama"), ids), 1e-3) and not close(edit, before, 1e-2)


def test_beside_lora_taking_off_gives_lora_back(tiny_model, tokenizer, ids):
    lora = with_lora(tiny_model("llama"))
    before, held = logits(lora, ids), tensors(lora)
    unlearn(lora, tokenizer, FORGET, RETAIN, paper()).unload()
    assert torch.equal(logits(lora, ids), before)
    assert same_tensors(tensors(lora), held)


def test_configs_of_both_are_kept(tiny_model, tokenizer, tmp_path):
    """Also under one name, and where transformers put LoRA into the model without a wrapper."""
    lora = with_lora(tiny_model("llama"))
    lora.save_pretrained(tmp_path)
    model = unlearn(lora, tokenizer, FORGET, RETAIN, paper())
    assert type(lora.peft_config["default"]) is LoraConfig and type(model.peft_config["default"]) is EngramConfig
    plain = tiny_model("llama")
    plain.load_adapter(str(tmp_path))
    model = unlearn(plain, tokenizer, FORGET, RETAIN, paper(), adapter_name="edit")
    assert {name: type(config) for name, config in plain.peft_config.items()} == {
        "default": LoraConfig, "edit": EngramConfig
    }  # fmt: skip
    assert list(model.peft_config) == ["edit"]
    model.unload()
    assert list(plain.peft_config) == ["default"]


def test_lora_may_be_merged_around_an_edit(tiny_model, tokenizer, ids):
    """PEFT merges every adapter that it finds in the model; the edit stays what it is, and everything comes back."""
    lora = with_lora(tiny_model("llama"))
    model = unlearn(lora, tokenizer, FORGET, RETAIN, paper())
    after = logits(model, ids)
    with pytest.warns(UserWarning, match="stay unmerged: unmerge the lora.Linear"):
        lora.merge_adapter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lora.unmerge_adapter()
    assert close(logits(model, ids), after, 1e-5)
    # the edit first: then LoRA's change is in the merged weight, which must not be dropped
    model = fill(get_peft_model(with_lora(tiny_model("llama")), paper(), "edit").eval(), tokenizer, "edit")
    model.merge_adapter()
    layer = model.get_base_model().model.layers[0].mlp.down_proj
    layer.merge()
    with pytest.raises(ValueError, match="lora.Linear is merged.*first"):
        model.unmerge_adapter()


def test_adapter_beside_lora_is_saved_under_the_names_of_the_plain_model(tiny_model, tokenizer, ids, tmp_path):
    model = unlearn(with_lora(tiny_model("llama")), tokenizer, FORGET, RETAIN, paper())
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    plain = edited(tiny_model("llama"), tokenizer)
    plain.save_pretrained(tmp_path / "plain")
    assert saved.keys() == load_file(tmp_path / "plain" / "adapter_model.safetensors").keys()
    beside = PeftModel.from_pretrained(with_lora(tiny_model("llama")).get_base_model(), tmp_path).eval()
    assert torch.equal(logits(beside, ids), logits(model, ids))
    alone = PeftModel.from_pretrained(tiny_model("llama"), tmp_path).eval()
    assert not close(logits(alone, ids), logits(tiny_model("llama"), ids), 1e-3)


def test_items_beside_lora(tiny_model, tokenizer, ids):
    lora = with_lora(tiny_model("llama"))
    before = logits(lora, ids)
    model = unlearn(lora, tokenizer, ITEMS, KEPT)
    assert list(model.base_model.engram_layers()) == ["model.layers.1.mlp.down_proj"]
    for strength, changes in ((2.0, True), (0.0, False)):
        for item in ITEMS:
            model.base_model.set_item_strength(item, strength)
        assert torch.equal(logits(lora, ids), before) != changes


# ------------------------------------------------------------------------------------------------ vision and language


@pytest.fixture
def llava():
    """A tiny Llava whose vision tower has more layers than its language model."""
    text = LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, initializer_range=0.2, pad_token_id=0,
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2, image_size=16, patch_size=8
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=98)
        return LlavaForConditionalGeneration(config).eval()


def test_of_a_vision_language_model_the_language_model_is_edited(llava, tokenizer, ids):
    before = logits(llava, ids)
    language = [name for name, module in llava.named_modules() if isinstance(module, nn.Linear) and "language" in name]
    assert list(collect_statistics(llava, RETAIN, tokenizer=tokenizer).moments) == language
    model = unlearn(llava, tokenizer, FORGET, RETAIN, paper())
    assert list(model.base_model.engram_layers()) == language
    assert not close(logits(model, ids), before, 1e-2)
    llava = model.unload()
    model = unlearn(llava, tokenizer, ITEMS, KEPT)
    assert list(model.base_model.engram_layers()) == ["model.language_model.layers.1.mlp.down_proj"]
    model.base_model.set_item_strength("france", 2.0)
    assert not close(logits(model, ids), before, 1e-3)


def test_rows_beside_an_image(llava):
    ids = torch.tensor([[5, 98, 98, 98, 98, 20, 21, 22]])  # four patches
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(1, 3, 16, 16)}
    found = collect_statistics(llava, [batch], mask_fn=lambda batch: batch["input_ids"] != 98)
    assert set(found.counts.values()) == {4}
    with pytest.raises(ValueError, match="vision_tower.*exclude_modules"):
        collect_statistics(llava, [batch], target_modules="all-linear")
