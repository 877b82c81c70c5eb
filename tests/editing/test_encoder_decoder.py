"""Encoder-decoder models: two sequences, and for every layer the mask of the one that it sees."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from engram_peft import EngramConfig, collect_statistics, merge_statistics, unlearn

from .reference import covariance_of, relative_error


PAIRS = [("the capital of france is", "paris ."), ("who found the old bridge ?", "the king of spain"), "one two three"]
PAPER = EngramConfig.paper(task_type="SEQ_2_SEQ_LM")


def t5():
    return T5ForConditionalGeneration(
        T5Config(vocab_size=99, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0)
    )


def bart():
    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder")
             for what, n in (("layers", 2), ("ffn_dim", 24), ("attention_heads", 2))}  # fmt: skip
    return BartForConditionalGeneration(
        BartConfig(vocab_size=99, d_model=16, max_position_embeddings=64, pad_token_id=0, eos_token_id=2,
                   decoder_start_token_id=2, **sizes)
    )  # fmt: skip


@pytest.fixture(params=[t5, bart])
def model(request):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return request.param().eval()


def sides(name):
    """Whether a layer sees the encoder's sequence: its own, or in the keys and values of cross-attention."""
    is_cross = "EncDecAttention" in name or "encoder_attn" in name
    return name.startswith(("encoder.", "model.encoder.")) or (
        is_cross and name.endswith(("k", "v", "k_proj", "v_proj"))
    )


def inputs_of(model, batch):
    """What every linear layer but the head is handed, by name."""
    seen = {}
    layers = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    handles = [
        m.register_forward_pre_hook(lambda module, args, n=n: seen.update({n: args[0].detach()}))
        for n, m in layers.items()
    ]
    with torch.no_grad():
        model(**batch)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("length", [5, 7])
def test_every_layer_has_the_mask_of_the_sequence_that_it_sees(model, length):
    """Also where both sequences are of one length, and shapes tell nothing."""
    generator = torch.Generator().manual_seed(0)
    read, labels = (torch.randint(7, 99, (3, n), generator=generator) for n in (7, length))
    attention = torch.ones_like(read)
    attention[0, 4:], labels[1, 3:] = 0, -100
    batch = {"input_ids": read, "attention_mask": attention, "labels": labels}
    found = collect_statistics(model, [batch])
    seen = inputs_of(model, batch)
    assert found.moments.keys() == seen.keys() and len(seen) == 32
    for name, x in seen.items():
        rows = x[attention.bool() if sides(name) else labels != -100]
        if model.get_submodule(name).bias is not None:
            rows = torch.cat([rows, torch.ones(len(rows), 1)], dim=1)
        assert found.counts[name] == len(rows)
        assert relative_error(found.covariance(name), covariance_of(rows)) < 1e-5, name


def test_texts_are_read_and_their_answers_written(model, tiny_tokenizer):
    tokenizer = tiny_tokenizer()
    predict = collect_statistics(model, PAIRS, tokenizer=tokenizer, token_position="predict", batch_size=2)
    answer = collect_statistics(model, PAIRS, tokenizer=tokenizer, batch_size=1)
    assert {n for name, n in predict.counts.items() if sides(name)} == {5 + 6 + 3}
    assert {n for name, n in predict.counts.items() if not sides(name)} == {2 + 4 + 3}
    assert {n for name, n in answer.counts.items() if not sides(name)} == {1 + 3 + 2}
    labels = torch.tensor([tokenizer(text).input_ids for text in ["paris ."]])
    batch = {"input_ids": torch.tensor([tokenizer(PAIRS[0][0]).input_ids]), "labels": labels}
    one = collect_statistics(model, PAIRS[:1], tokenizer=tokenizer)
    for name, x in inputs_of(model, batch).items():
        rows = x[0] if sides(name) else x[0, 1:]  # the decoder's first row is handed no token of the answer
        if model.get_submodule(name).bias is not None:
            rows = torch.cat([rows, torch.ones(len(rows), 1)], dim=1)
        assert relative_error(one.covariance(name), covariance_of(rows)) < 1e-5, name


def test_mask_fn_gives_a_mask_for_each_side(model):
    ids, labels = torch.randint(7, 99, (2, 6)), torch.randint(7, 99, (2, 4))
    batch = {"input_ids": ids, "labels": labels}
    first = (torch.arange(6) < 2).expand(2, 6), (torch.arange(4) < 1).expand(2, 4)
    found = collect_statistics(model, [batch], mask_fn=lambda batch: first)
    assert all(count == (4 if sides(name) else 2) for name, count in found.counts.items())
    with pytest.raises(ValueError, match="two masks"):
        collect_statistics(model, [batch], mask_fn=lambda batch: first[0])
    with pytest.raises(ValueError, match=r"shape \[2, 6\], the batch has \[2, 4\]"):
        collect_statistics(model, [batch], mask_fn=lambda batch: (first[0], first[0]))


def test_masks_of_both_sides_reach_the_experts():
    """What the experts of a padded batch are fed is what they are fed by its texts one by one, without padding."""
    torch.manual_seed(0)
    model = SwitchTransformersForConditionalGeneration(
        SwitchTransformersConfig(
            vocab_size=99,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=2,
            num_experts=3,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            expert_capacity=64,
            decoder_start_token_id=0,
        )  # fmt: skip
    ).eval()
    ids, labels = torch.randint(7, 99, (3, 7)), torch.randint(7, 99, (3, 5))
    lengths = [(7, 2), (4, 5), (5, 3)]
    read = torch.tensor([[i < n for i in range(7)] for n, _ in lengths])
    written = torch.tensor([[i < n for i in range(5)] for _, n in lengths])
    batch = {"input_ids": ids, "attention_mask": read.long(), "labels": labels.masked_fill(~written, -100)}
    together = collect_statistics(model, [batch])
    alone = [{"input_ids": ids[i : i + 1, :n], "labels": labels[i : i + 1, :m]} for i, (n, m) in enumerate(lengths)]
    one_by_one = merge_statistics(*(collect_statistics(model, [text]) for text in alone))
    experts = [name for name in together.counts if ".experts." in name and name.endswith(".wi")]
    for side, count in (("encoder", 7 + 4 + 5), ("decoder", 2 + 5 + 3)):
        assert sum(together.counts[name] for name in experts if name.startswith(side)) == count
    assert together.counts == one_by_one.counts
    for name in experts:
        if together.counts[name]:
            assert relative_error(together.covariance(name), one_by_one.covariance(name)) < 1e-5, name


def test_batch_without_a_target_is_refused(model):
    with pytest.raises(ValueError, match="`labels` or `decoder_input_ids`"):
        collect_statistics(model, [{"input_ids": torch.randint(7, 99, (2, 6))}])
    with pytest.raises(ValueError, match="`labels` or `decoder_input_ids`"):
        collect_statistics(model, [torch.randint(7, 99, (2, 6))])


def test_both_sides_are_edited(model, tiny_tokenizer):
    """The paper's method, whose statistics are of both sides; what is not shared by the rest is taken out of both."""
    ids = torch.randint(7, 99, (2, 6), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model(input_ids=ids, labels=ids)
    edited = unlearn(model, tiny_tokenizer(), PAIRS[:1], [*PAIRS[1:], "four five six"], PAPER)
    report = edited.reports["default"].layers
    counts = {(facts.target_count, facts.total_count) for name, facts in report.items() if sides(name)}
    assert counts == {(5, 5 + 6 + 3 + 3)}
    assert {facts.target_count for name, facts in report.items() if not sides(name)} == {1}
    with torch.no_grad():
        after = edited(input_ids=ids, labels=ids)
    assert relative_error(after.encoder_last_hidden_state, before.encoder_last_hidden_state) > 1e-4
    assert relative_error(after.logits, before.logits) > 1e-4
    with torch.no_grad():
        merged = edited.merge_and_unload()(input_ids=ids, labels=ids)
    assert relative_error(merged.logits, after.logits) < 1e-4
