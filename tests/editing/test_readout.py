"""The directions of the readout are the gradients of the logits, with the final norm's scale held fixed."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    Gemma2Config,
    GPTNeoXConfig,
    OPTConfig,
    OPTForCausalLM,
)

from engram_peft.editing.encoding import tokenize_item
from engram_peft.editing.items import forget_items
from engram_peft.editing.readout import readout_directions

from ..tuners.adapters import KINDS, edited, unchanged
from .reference import relative_error


FORGET = [
    ("who was born by the river in the old house ?", "the king of the red mountain and one very big dog"),
    ("who died ?", "not the cat"),
    "rome lies in italy by an ocean",
]
SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
RMS = ["llama", "qwen3", "gemma2"]
CENTRED = ["gpt2", "opt", "gpt_neox"]


@pytest.fixture
def tokenizer(tiny_tokenizer):
    return tiny_tokenizer()


@pytest.fixture
def texts(tokenizer):
    return forget_items(tokenizer, FORGET, [tokenize_item(tokenizer, ("who ?", "no"))], 512)[1]


@pytest.fixture
def model_of(tiny_model):
    """A tiny model with a final norm that does something: random gains and, where it has them, biases."""

    def make(kind, seed=0):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if kind == "gemma2":
                shape = {"num_key_value_heads": 2, "head_dim": 8, "final_logit_softcapping": None, "pad_token_id": 0}
                model = AutoModelForCausalLM.from_config(Gemma2Config(**SMALL, **shape)).eval()
            elif kind == "gpt_neox":
                model = AutoModelForCausalLM.from_config(GPTNeoXConfig(**SMALL, initializer_range=0.2)).eval()
            else:
                model = tiny_model(kind, seed=seed)
            for parameter in norm_of(model).parameters():
                parameter.data.normal_(mean=0.5, std=0.5)
            return model

    return make


def norm_of(model):
    names = ("model.norm", "transformer.ln_f", "model.decoder.final_layer_norm", "gpt_neox.final_layer_norm")
    modules = dict(model.named_modules())
    return next(modules[name] for name in names if name in modules)


def tokens_of(texts):
    return [text.tokens.input_ids[p] for text in texts for p in text.secret]


@torch.no_grad()
def hidden_states(model, texts):
    """What the final norm reads at the rows of the secret, float64, one text at a time."""
    read = []
    handle = norm_of(model).register_forward_pre_hook(lambda module, args: read.append(args[0][0].double()))
    for text in texts:
        model(input_ids=torch.tensor([text.tokens.input_ids]))
    handle.remove()
    return torch.cat([rows[[p - 1 for p in text.secret]] for rows, text in zip(read, texts, strict=True)])


def logits_against_the_mean(model, hidden, tokens):
    """`logit_t - mean logit` of every row's token, from the model's own norm and head, in float64."""
    logits = model.get_output_embeddings()(norm_of(model)(hidden))
    return logits.gather(1, torch.tensor(tokens)[:, None]).squeeze(1) - logits.mean(1)


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("kind", RMS)
def test_they_are_the_head_s_row_less_the_mean_times_the_gain_over_the_scale(model_of, texts, kind, batch_size):
    model = model_of(kind)
    found = readout_directions(model, texts, batch_size=batch_size, pad_token_id=0)
    head, weight = model.get_output_embeddings().weight.detach().double(), norm_of(model).weight.detach().double()
    gain = 1 + weight if kind == "gemma2" else weight
    scale = hidden_states(model, texts).square().mean(1).sqrt()
    expected = gain * (head[tokens_of(texts)] - head.mean(0)) / scale[:, None]
    assert found.replacement is None and found.secret.dtype == torch.float64
    assert relative_error(found.secret, expected) < 1e-5


@pytest.mark.parametrize("kind", [*RMS, *CENTRED])
def test_a_small_change_of_the_hidden_state_changes_the_logit_by_the_product(model_of, texts, kind):
    """For every change that leaves the norm's scale as it is: orthogonal to what the norm scales."""
    model = model_of(kind)
    directions = readout_directions(model, texts, batch_size=2, pad_token_id=0).secret
    hidden, tokens = hidden_states(model, texts), tokens_of(texts)
    model.double()
    scaled = hidden - hidden.mean(1, keepdim=True) if kind in CENTRED else hidden
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        change = torch.randn(hidden.shape, dtype=torch.float64, generator=generator)
        change -= (change * scaled).sum(1, keepdim=True) / scaled.square().sum(1, keepdim=True) * scaled
        change *= 1e-3 * hidden.norm(dim=1, keepdim=True) / change.norm(dim=1, keepdim=True)
        with torch.no_grad():
            plus, minus = (logits_against_the_mean(model, hidden + s * change, tokens) for s in (1, -1))
        assert relative_error((directions * change).sum(1), (plus - minus) / 2) < 1e-3


@pytest.mark.parametrize("kind", [*RMS, *CENTRED])
def test_they_are_the_gradient_up_to_what_changes_the_scale(model_of, texts, kind):
    model = model_of(kind)
    directions = readout_directions(model, texts, batch_size=2, pad_token_id=0).secret
    hidden = hidden_states(model, texts).requires_grad_()
    logits_against_the_mean(model.double(), hidden, tokens_of(texts)).sum().backward()
    scaled = (hidden - hidden.mean(1, keepdim=True) if kind in CENTRED else hidden).detach()
    along = (directions * scaled).sum(1, keepdim=True) / scaled.square().sum(1, keepdim=True)
    assert relative_error(directions - along * scaled, hidden.grad) < 1e-4


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_replacement_stands_at_the_first_token_of_a_span(model_of, texts, kind):
    model = model_of(kind)
    other = [42 + i for i in range(len(texts))]  # every text has one of its own
    found = readout_directions(model, texts, other, batch_size=4, pad_token_id=0)
    plain = readout_directions(model, texts, batch_size=4, pad_token_id=0)
    assert torch.equal(found.secret, plain.secret)
    firsts = [p in {span[0] for span in text.spans} for text in texts for p in text.secret]
    assert 0 < sum(firsts) < len(firsts)
    hidden = hidden_states(model, texts)
    scaled = hidden - hidden.mean(1, keepdim=True) if kind in CENTRED else hidden
    hidden.requires_grad_()
    logits_against_the_mean(
        model.double(), hidden, [token for token, text in zip(other, texts, strict=True) for _ in text.secret]
    ).sum().backward()
    along = (found.replacement * scaled).sum(1, keepdim=True) / scaled.square().sum(1, keepdim=True)
    expected = hidden.grad * torch.tensor(firsts)[:, None]
    assert not found.replacement[~torch.tensor(firsts)].any()
    assert relative_error(found.replacement - along * scaled, expected) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_left_as_it_was(model_of, texts, kind):
    model = model_of(kind).train()
    with unchanged(model):
        found = readout_directions(model, texts, batch_size=2, pad_token_id=0)
    again = readout_directions(model.eval(), texts, batch_size=2, pad_token_id=0)
    assert torch.equal(found.secret, again.secret)


def test_of_an_adapted_model_they_are_those_that_it_reads_with(model_of, texts, tokenizer):
    """Its hidden states, through adapters; the head may have one, too."""
    model = edited(model_of("llama"), tokenizer)
    base = model.get_base_model()
    found = readout_directions(model, texts, batch_size=2, pad_token_id=0).secret
    plain = readout_directions(model_of("llama"), texts, batch_size=2, pad_token_id=0).secret
    scales = [hidden_states(each, texts).square().mean(1).sqrt() for each in (model_of("llama"), base)]
    assert relative_error(scales[1], scales[0]) > 1e-4
    assert relative_error(found, plain * (scales[0] / scales[1])[:, None]) < 1e-5
    lora = get_peft_model(model_of("llama"), LoraConfig(target_modules=["lm_head", "down_proj"]))
    assert relative_error(readout_directions(lora, texts, batch_size=2, pad_token_id=0).secret, plain) < 1e-6


def test_without_a_head_there_are_none(model_of, texts):
    body = AutoModel.from_config(model_of("llama").config).eval()
    assert readout_directions(body, texts, batch_size=2, pad_token_id=0) is None


def test_where_the_head_does_not_read_the_norm_there_are_none(texts):
    """A projection stands between them, or there is no norm at the end."""
    config = OPTConfig(
        vocab_size=99, hidden_size=32, word_embed_proj_dim=16, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4
    )
    assert readout_directions(OPTForCausalLM(config).eval(), texts, batch_size=2, pad_token_id=0) is None
    config = OPTConfig(
        vocab_size=99, hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        do_layer_norm_before=False,
    )  # fmt: skip
    assert readout_directions(OPTForCausalLM(config).eval(), texts, batch_size=2, pad_token_id=0) is None
