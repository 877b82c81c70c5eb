"""What can be done to n-gram memories as adapters: add, switch, turn off, delete, sum, take off, make a model of."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import LoraConfig, PeftModel, get_layer_status, get_model_status, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from engram_peft import EngramConfig, EngramForCausalLM, NgramMemoryConfig
from engram_peft.memory import NgramMemory, build_token_map

from ...models.engram.tiny import KINDS, backbone, logits, token_ids
from .adapters import FIRST, SECOND, VARIANTS, adapted, add, fill, memories_of, memory_config, same, tensors, unchanged


@pytest.fixture
def ids() -> torch.Tensor:
    return token_ids(3, 9)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------------------ one adapter


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_memory_says_nothing_and_a_filled_one_does(kind, ids):
    base = backbone(kind)
    expected = logits(base, ids)
    model = get_peft_model(base, memory_config()).eval()
    assert torch.equal(logits(model, ids), expected)
    for memory in memories_of(model):
        fill(memory)
    assert float((logits(model, ids) - expected).abs().amax(-1)[:, 1:].min()) > 1e-3
    with model.disable_adapter():
        assert torch.equal(logits(model, ids), expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_says_what_the_native_model_says(variant, ids):
    """The memories of an adapter are those of an `EngramForCausalLM`; the token map is applied in both."""
    token_map = torch.arange(99) // 2
    config = memory_config(variant, compressed_vocab_size=50)
    config._token_map, config.token_map_size = token_map, len(token_map)
    model = get_peft_model(backbone("llama"), config).eval()
    for memory in memories_of(model):
        fill(memory)
    expected = logits(model, ids)
    assert not torch.equal(logits(model, ids // 2 * 2 + 1), logits(model, ids))
    merged = model.merge_and_unload().eval()
    assert type(merged) is EngramForCausalLM
    assert torch.equal(merged.token_map, token_map)
    assert torch.equal(logits(merged, ids), expected)


def test_only_the_memory_is_trained(ids):
    model = adapted().train()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if "ngram_memory_" in name}
    model(input_ids=ids, labels=ids).loss.backward()
    assert all((p.grad is not None) == (name in trained) for name, p in model.named_parameters())


def test_gradient_checkpointing_changes_no_gradient(ids):
    gradients = []
    for checkpointing in (False, True):
        model = adapted().train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert same(gradients[1], gradients[0])


def test_a_copy_is_a_model_of_its_own(ids):
    model = adapted()
    expected = logits(model, ids)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(twin, ids), expected)
        with torch.no_grad():
            for memory in memories_of(twin):
                memory.table.weight.zero_()
        assert not torch.equal(logits(twin, ids), expected)
        assert torch.equal(logits(model, ids), expected)


def test_threads_take_turns():
    model = adapted()
    texts = [token_ids(length=length, seed=length) for length in (5, 9, 14)]
    expected = [logits(model, text) for text in texts]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(10):
            found = pool.map(lambda text: logits(model, text), texts)
            assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    with pytest.raises(ValueError, match="outside the vocabulary"):  # a pass that fails gives its turn back
        logits(model, torch.tensor([[-1]]))
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(logits, model, texts[0]).result(timeout=60), expected[0])


def test_adapters_may_be_of_another_dtype_than_the_model(ids):
    model = adapted(backbone("llama").to(torch.bfloat16))
    assert {p.dtype for memory in memories_of(model) for p in memory.parameters()} == {torch.float32}
    assert logits(model, ids).dtype == torch.bfloat16
    half = get_peft_model(backbone("llama").to(torch.bfloat16), memory_config(), autocast_adapter_dtype=False)
    assert {p.dtype for memory in memories_of(half) for p in memory.parameters()} == {torch.bfloat16}
    assert logits(half, ids).dtype == torch.bfloat16


def test_a_classifier_has_memories_too(ids):
    config = LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
    )
    base = AutoModelForSequenceClassification.from_config(config).eval()
    plain = base(input_ids=ids).logits
    model = get_peft_model(base, memory_config(task_type="SEQ_CLS")).eval()
    for memory in memories_of(model):
        fill(memory)
    assert not torch.equal(model(input_ids=ids).logits, plain)
    assert {name for name, p in model.named_parameters() if p.requires_grad and "ngram_memory_" not in name} == {
        "base_model.model.score.modules_to_save.default.weight"
    }


def test_the_decoder_may_be_called_alone(ids):
    """As trainers do that compute logits in chunks."""
    model = adapted()
    base = model.get_base_model()
    hidden = base.model(input_ids=ids).last_hidden_state
    assert torch.equal(base.lm_head(hidden), logits(model, ids))


def test_the_default_layers_are_those_of_the_paper():
    config = memory_config(layers_to_transform=None)
    config.fit_to(LlamaConfig(num_hidden_layers=30))
    assert config.layers_to_transform == [1, 14]


# ------------------------------------------------------------------------------------------------ several adapters


def three_ways(ids: torch.Tensor) -> tuple[PeftModel, dict[str, torch.Tensor]]:
    """A model with two adapters, and the logits of each and of none."""
    model = adapted()
    add(model, "other", values=1, variant="needle", **SECOND)
    said = {"default": logits(model, ids)}
    model.set_adapter("other")
    said["other"] = logits(model, ids)
    with model.disable_adapter():
        said["__base__"] = logits(model, ids)
    assert len({float(each.sum()) for each in said.values()}) == 3
    return model, said


def test_adapters_of_different_shapes_live_side_by_side(ids):
    model, said = three_ways(ids)
    for name in ("default", "other"):
        model.set_adapter(name)
        assert torch.equal(logits(model, ids), said[name])


def test_contributions_add():
    """Two memories in front of the same layer add what each says to the same hidden states."""
    ids = token_ids(2, 7)
    model = adapted(layers_to_transform=[0])
    add(model, "other", values=1, **{**FIRST, "layers_to_transform": [0], "seed": 3})
    entering: list[torch.Tensor] = []
    layer = model.get_base_model().model.layers[0]
    layer.self_attn.register_forward_pre_hook(lambda m, a, kw: None, with_kwargs=True)
    layer.input_layernorm.register_forward_pre_hook(lambda module, args: entering.append(args[0]))
    for names in (["default"], ["other"], ["default", "other"]):
        model.base_model.set_adapter(names)
        logits(model, ids)
    plain = model.get_input_embeddings()(ids)
    first, second, both = entering
    close(both - plain, (first - plain) + (second - plain))


def test_every_text_of_a_batch_may_have_its_own_adapter(ids):
    model, said = three_ways(ids)
    names = ["other", "__base__", "default"]
    mixed = logits(model, ids, adapter_names=names)
    close(mixed, torch.stack([said[name][row] for row, name in enumerate(names)]))
    for beams in (1, 2):
        options = {"do_sample": False, "max_new_tokens": 5, "num_beams": beams}
        together = model.generate(input_ids=ids, adapter_names=names, **options)
        for row, name in enumerate(names):
            model.set_adapter("default" if name == "__base__" else name)
            if name == "__base__":
                with model.disable_adapter():
                    alone = model.generate(input_ids=ids[row : row + 1], **options)
            else:
                alone = model.generate(input_ids=ids[row : row + 1], **options)
            assert torch.equal(together[row], alone[0])


def test_a_deleted_adapter_is_gone(ids):
    model, said = three_ways(ids)
    model.set_adapter("default")
    model.delete_adapter("other")
    assert torch.equal(logits(model, ids), said["default"])
    assert not [name for name in model.state_dict() if ".other." in name]
    model.delete_adapter("default")
    assert torch.equal(logits(model.base_model.model, ids), said["__base__"])


def test_when_the_active_adapter_is_deleted_another_one_is(ids):
    """Also one that is in front of other layers."""
    model, said = three_ways(ids)
    model.set_adapter("default")
    model.delete_adapter("default")
    assert model.active_adapters == ["other"]
    assert torch.equal(logits(model, ids), said["other"])


def test_status_is_that_of_any_adapter():
    model = adapted()
    status = get_model_status(model)
    assert (status.adapter_model_type, status.active_adapters, status.merged_adapters) == (
        "NgramMemoryModel",
        ["default"],
        [],
    )
    assert [layer.name for layer in get_layer_status(model)] == [
        "model.model.layers.0.memory",
        "model.model.layers.1.memory",
    ]


# ------------------------------------------------------------------------------------------------ sums


def test_a_weighted_sum_adds_rows(ids):
    """With the same projections, values add exactly: what one adapter has learnt about an n-gram does not disturb another's."""
    model = adapted()
    model.add_adapter("other", memory_config())
    for index, memory in model.base_model.memories("other").items():
        memory.load_state_dict(model.base_model.memories("default")[index].state_dict())
        fill(memory.table, seed=9)
    model.base_model.add_weighted_adapter(["default", "other"], [2.0, -0.5], "sum")
    first, second, total = (model.base_model.memories(name) for name in ("default", "other", "sum"))
    for index, memory in total.items():
        assert torch.equal(memory.table.weight, 2.0 * first[index].table.weight + -0.5 * second[index].table.weight)
        assert torch.equal(memory.kv_proj.weight, first[index].kv_proj.weight)
    model.set_adapter("sum")
    assert not torch.equal(logits(model, ids), logits(model, ids, adapter_names=["default"] * 3))
    model.base_model.add_weighted_adapter(["default"], [1.0], "copy")
    model.set_adapter("copy")
    said = logits(model, ids)
    model.set_adapter("default")
    assert torch.equal(said, logits(model, ids))


def test_different_projections_are_averaged():
    model = adapted()
    add(model, "other", values=3)
    model.base_model.add_weighted_adapter(["default", "other"], [3.0, 1.0], "sum")
    first, second, total = (model.base_model.memories(name)[0] for name in ("default", "other", "sum"))
    close(total.kv_proj.weight, 0.75 * first.kv_proj.weight + 0.25 * second.kv_proj.weight)
    with pytest.raises(ValueError, match="different .* `weights` must not add up to 0"):
        model.base_model.add_weighted_adapter(["default", "other"], [1.0, -1.0], "difference")


@pytest.mark.parametrize(
    "changes", [{"seed": 1}, {"vocab_size": 51}, {"layers_to_transform": [0]}, {"variant": "needle"}]
)
def test_adapters_that_hash_differently_have_no_sum(changes):
    model = adapted()
    add(model, "other", values=1, **{**FIRST, **changes})
    with unchanged(model), pytest.raises(ValueError, match="'default' and 'other' do not hash alike"):
        model.base_model.add_weighted_adapter(["default", "other"], [1.0, 1.0], "sum")


# ------------------------------------------------------------------------------------------------ taking off


def test_unload_gives_the_base_model_back(ids):
    base = backbone("llama")
    with unchanged(base):
        flags = [parameter.requires_grad for parameter in base.parameters()]
        model = adapted(base)
        add(model, "other", values=1)
        assert model.unload() is base
        for parameter, flag in zip(base.parameters(), flags, strict=True):
            parameter.requires_grad_(flag)  # PEFT leaves them frozen
    assert torch.equal(logits(get_peft_model(base, memory_config()).eval(), ids), logits(backbone("llama"), ids))


def test_memories_cannot_be_merged_into_weights():
    model = adapted()
    with unchanged(model), pytest.raises(ValueError, match="cannot be merged.*EngramForCausalLM"):
        model.merge_adapter()
    add(model, "other", values=1)
    model.base_model.set_adapter(["default", "other"])
    with unchanged(model), pytest.raises(ValueError, match="one memory, but 2 adapters"):
        model.merge_and_unload()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_merged_model_is_saved_and_loaded_like_any_other(variant, ids, tmp_path):
    model = adapted(variant=variant)
    add(model, "other", values=1)
    expected = logits(model, ids)
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(loaded, ids), expected)
    assert not any("other" in name for name in loaded.state_dict())


# ------------------------------------------------------------------------------------------------ with other methods


@pytest.mark.filterwarnings(
    "ignore:You are trying to modify a model with PEFT", "ignore:Already found a `peft_config`"
)
@pytest.mark.parametrize("other", [LoraConfig, EngramConfig])
def test_it_stacks_on_lora_and_on_an_edit(other, ids, tmp_path):
    random = {"init_lora_weights": False} if other is LoraConfig else {"init_weights": False}
    lower = get_peft_model(
        backbone("llama"), other(task_type="CAUSAL_LM", target_modules=["down_proj"], **random), adapter_name="style"
    ).eval()
    trained = {name for name, p in lower.named_parameters() if p.requires_grad}
    alone = logits(lower, ids)
    model = adapted(lower, adapter_name="facts")
    assert {name for name, p in model.named_parameters() if p.requires_grad and "ngram_memory_" not in name} == trained
    both = logits(model, ids)
    assert not torch.equal(both, alone)
    with model.disable_adapter():
        assert torch.equal(logits(model, ids), logits(backbone("llama"), ids))

    # each can be loaded alone and on top of the other
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(backbone("llama"), tmp_path / "style"), ids), alone)
    first = PeftModel.from_pretrained(backbone("llama"), tmp_path / "style", adapter_name="style")
    again = PeftModel.from_pretrained(first, tmp_path / "facts", adapter_name="facts")
    assert torch.equal(logits(again, ids), both)
    assert torch.equal(
        logits(PeftModel.from_pretrained(backbone("llama"), tmp_path / "facts"), ids),
        logits(adapted(adapter_name="facts"), ids),
    )
    with pytest.raises(ValueError, match="other adapters of the model first: model.layers.0.mlp.down_proj"):
        model.merge_and_unload()
    model.unload()
    assert torch.equal(logits(lower, ids), alone)


@pytest.mark.filterwarnings(
    "ignore:You are trying to modify a model with PEFT", "ignore:Already found a `peft_config`"
)
def test_lora_on_top_does_not_touch_the_memory(ids):
    model = adapted(adapter_name="facts")
    memory_only = logits(model, ids)
    config = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False)
    stacked = get_peft_model(model, config, adapter_name="style").eval()
    assert not any("lora_" in name and "ngram_memory_" in name for name in stacked.state_dict())
    with_both = logits(stacked, ids)
    stacked.merge_adapter()
    close(logits(stacked, ids), with_both)
    stacked.unmerge_adapter()
    assert not torch.equal(with_both, memory_only)


def test_kinds_of_adapters_share_their_names():
    lower = get_peft_model(backbone("llama"), LoraConfig(target_modules=["down_proj"]))
    with unchanged(lower), pytest.raises(ValueError, match="'default' already exists.*another `adapter_name`"):
        get_peft_model(lower, memory_config())


# ------------------------------------------------------------------------------------------------ tokens


def test_the_token_map_comes_from_a_tokenizer(tiny_tokenizer, ids):
    tokenizer = tiny_tokenizer()
    config = NgramMemoryConfig(layers_to_transform=[0], **FIRST)
    assert config.token_map_from(tokenizer) is config
    token_map = build_token_map(tokenizer)
    assert (config.token_map_size, config.compressed_vocab_size) == (len(tokenizer), int(token_map.max()) + 1)
    model = get_peft_model(backbone("llama"), config)
    stored = model.base_model.token_map()
    assert torch.equal(stored[: len(token_map)], token_map)
    assert len(stored) == 99  # rows of the embeddings that no token has are classes of their own
    assert (
        len(set(stored[len(token_map) :].tolist()) | set(token_map.tolist()))
        == 99 - len(token_map) + config.compressed_vocab_size
    )
    model.base_model.check_tokenizer(tokenizer)
    assert isinstance(model.base_model.memories()[0], NgramMemory)


def test_placeholders_are_not_read(ids):
    """A masked token ends what later tokens may look back to, as padding does."""
    model = adapted(masked_token_ids=[60])
    row = torch.cat([ids[:1, :4], ids.new_tensor([[60]]), ids[1:2, :4]], dim=1)
    said: list[torch.Tensor] = []
    memories_of(model)[0].register_forward_hook(lambda module, args, output: said.append(output[0]))
    logits(model, row)
    logits(model, ids[1:2, :4])
    assert torch.equal(said[0][:, 4], torch.zeros_like(said[0][:, 4]))
    torch.testing.assert_close(said[0][:, 5:], said[1], rtol=0, atol=1e-5)


def test_tensors_of_the_base_model_keep_their_names():
    base = backbone("llama")
    names = set(tensors(base))
    adapted(base)
    assert names == {name for name in tensors(base) if "ngram_memory_" not in name}
