"""Tiny models and tokenizers that every test may use. Nothing here is downloaded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)


torch.set_num_threads(1)  # on matrices this small a second thread costs more than it saves

VOCAB_SIZE = 99
HIDDEN = 32
LAYERS = 2
PAD, BOS, EOS, UNK = "<pad>", "<s>", "</s>", "<unk>"  # ids 0, 1, 2 and 3
ROLES = ["<user>", "<assistant>", "<end>"]  # ids 4, 5 and 6
_TEXT = """the a of is in to and what who where when capital city river king queen mountain ocean country paris london rome
berlin madrid france england italy germany spain lies on by near long high deep old new big small red green blue dog cat bird
fish tree house road bridge water fire earth air sun moon star day night one two three four five six seven eight nine ten
was born lived died wrote built found lost said yes no not very . , ? !"""
WORDS = _TEXT.split()
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)

_SPECIAL_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _config(kind: str) -> LlamaConfig | Qwen3Config | GPT2Config | OPTConfig:
    if kind in ("llama", "qwen3"):
        shape = {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": HIDDEN,
            "intermediate_size": 48,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 64,
            "initializer_range": 0.2,
        }
        if kind == "llama":
            return LlamaConfig(**shape, tie_word_embeddings=False, **_SPECIAL_IDS)
        return Qwen3Config(**shape, tie_word_embeddings=True, **_SPECIAL_IDS)
    if kind == "gpt2":
        return GPT2Config(
            vocab_size=VOCAB_SIZE, n_positions=64, n_embd=HIDDEN, n_layer=LAYERS, n_head=4, n_inner=48,
            initializer_range=0.2, tie_word_embeddings=True, **_SPECIAL_IDS,
        )  # fmt: skip
    if kind == "opt":
        return OPTConfig(
            vocab_size=VOCAB_SIZE, hidden_size=HIDDEN, word_embed_proj_dim=HIDDEN, ffn_dim=48, num_hidden_layers=LAYERS,
            num_attention_heads=4, max_position_embeddings=64, init_std=0.2, tie_word_embeddings=False, **_SPECIAL_IDS,
        )  # fmt: skip
    raise ValueError(f"no tiny model of kind {kind!r}")


@pytest.fixture
def tiny_model() -> Callable[..., PreTrainedModel]:
    """`tiny_model(kind, dtype=torch.float32, seed=0)`: a random causal language model in evaluation mode.

    | kind | what is particular |
    |---|---|
    | `llama` | untied head, grouped-query attention, no biases |
    | `qwen3` | tied head |
    | `gpt2` | `Conv1D`, biases, tied head, dropout |
    | `opt` | biases, untied head, dropout |

    Biases are random too: transformers would start them at zero.
    """

    def make(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(_config(kind))
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name.endswith(".bias"):
                        parameter.normal_(std=0.2)
        return model.to(dtype).eval()

    return make


@pytest.fixture
def tiny_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """`tiny_tokenizer(pad="<pad>", chat=False, add_bos=False)`: one token a word of `WORDS`, split at blanks.

    `pad=None` has no pad token, `pad="</s>"` pads with the end-of-sequence token.
    """

    def make(pad: str | None = PAD, chat: bool = False, add_bos: bool = False) -> PreTrainedTokenizerFast:
        vocabulary = {token: i for i, token in enumerate([PAD, BOS, EOS, UNK, *ROLES, *WORDS])}
        assert len(vocabulary) <= VOCAB_SIZE
        backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        if add_bos:
            backend.post_processor = processors.TemplateProcessing(
                single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
            )
        special = {"bos_token": BOS, "eos_token": EOS, "unk_token": UNK, "additional_special_tokens": ROLES}
        if pad is not None:
            special["pad_token"] = pad
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
        if chat:
            tokenizer.chat_template = CHAT_TEMPLATE
        return tokenizer

    return make


@pytest.fixture
def token_ids() -> Callable[..., torch.Tensor]:
    """`token_ids(batch, length, seed=0)`: random ids without special tokens, `(batch, length)`."""

    def make(batch: int, length: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(7, VOCAB_SIZE, (batch, length), generator=generator)

    return make
