"""What cannot be right fails before anything is computed, and says what to do."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache

from engram_peft import EngramForCausalLM

from .tiny import VOCAB_SIZE, backbone, engram, engram_config, logits, shared, token_ids


@pytest.mark.parametrize(("token_id", "named"), [(VOCAB_SIZE, f"{VOCAB_SIZE} is outside"), (-1, "-1 is outside")])
def test_token_ids_outside_the_vocabulary(token_id: int, named: str):
    ids = token_ids()
    ids[1, 3] = token_id
    with pytest.raises(ValueError, match=rf"Token id {named} the vocabulary, 0 to {VOCAB_SIZE - 1}"):
        logits(shared(), ids)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        model = shared()
        model(inputs_embeds=model.get_input_embeddings()(token_ids()), engram_input_ids=ids)


def test_token_ids_without_a_token_map(tiny_tokenizer):
    config = engram_config(tokenizer=tiny_tokenizer())
    config = type(config).from_dict(config.to_dict())  # as from a checkpoint, but without its weights
    with pytest.raises(ValueError, match="without a token map.*from_pretrained"):
        logits(EngramForCausalLM(config), token_ids())


def test_a_cache_that_another_model_filled():
    model, ids = shared(), token_ids()
    cache = model.backbone(input_ids=ids, use_cache=True).cache
    with pytest.raises(ValueError, match="another model filled it"):
        model(input_ids=ids[:, :1], cache=cache)
    assert cache.get_seq_length() == ids.shape[1]
    other = engram(engram_max_ngram_size=2)(input_ids=ids, use_cache=True).cache
    with pytest.raises(ValueError, match="other n-gram memories"):
        model(input_ids=ids[:, :1], cache=other)


def test_a_pass_that_fails_leaves_no_tokens_behind():
    model, ids = engram(), token_ids()
    cache = DynamicCache(config=model.config.get_text_config())
    handle = model.backbone.lm_head.register_forward_pre_hook(
        lambda module, args: (_ for _ in ()).throw(MemoryError())
    )
    with pytest.raises(MemoryError):
        model(input_ids=ids, cache=cache, use_cache=True)
    handle.remove()
    assert all(layer.past() is None for layer in cache.layers[2:])
    assert torch.equal(logits(model.backbone, ids), logits(backbone(), ids))  # the backbone alone reads no memory


def test_neither_ids_nor_embeddings():
    with pytest.raises(ValueError, match="input_ids"):
        shared()()


def test_embeddings_that_are_of_no_token():
    model = shared()
    embeds = model.get_input_embeddings()(token_ids())
    with pytest.raises(ValueError, match="engram_input_ids"):
        model(inputs_embeds=embeds + 1)


def test_embeddings_that_are_of_two_tokens():
    model = engram()
    with torch.no_grad():
        model.get_input_embeddings().weight[50] = model.get_input_embeddings().weight[51]
    ids = token_ids()
    ids[0, 0] = 50
    with pytest.raises(ValueError, match="of more than one.*engram_input_ids"):
        model(inputs_embeds=model.get_input_embeddings()(ids))


def test_ids_and_hidden_states_of_different_lengths():
    model, ids = shared(), token_ids()
    embeds = model.get_input_embeddings()(ids)
    with pytest.raises(ValueError, match="engram_input_ids"):
        model(inputs_embeds=embeds, engram_input_ids=ids[:, 1:])


@pytest.mark.parametrize(
    ("changes", "name"), [({"hidden_size": 64}, "hidden_size"), ({"num_hidden_layers": 4}, "num_hidden_layers")]
)
def test_a_configuration_for_another_backbone(changes, name: str):
    with pytest.raises(ValueError, match=f"another backbone: `{name}`"):
        EngramForCausalLM.from_backbone(backbone("llama", **changes), engram_config("llama"))
    with pytest.raises(ValueError, match="another backbone: `model_type`"):
        EngramForCausalLM.from_backbone(backbone("qwen3"), engram_config("llama"))


def test_a_backbone_inside_of_an_adapter():
    adapted = get_peft_model(backbone(), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(TypeError, match="Merge or unload adapters first"):
        EngramForCausalLM.from_backbone(adapted, engram_config())


def test_a_tokenizer_that_disagrees_with_the_map(tiny_tokenizer):
    tokenizer = tiny_tokenizer()
    model = EngramForCausalLM(engram_config(tokenizer=tokenizer))
    model.check_tokenizer(tokenizer)
    other = tiny_tokenizer()
    other.add_tokens(["The"])  # which reads like `the`
    with pytest.raises(ValueError, match=rf"token {len(tokenizer)} \('The'\)"):
        model.check_tokenizer(other)
