"""From a call's arguments to what memories read."""

from __future__ import annotations

import pytest
import torch

from engram_peft.memory import NgramMemorySpec
from engram_peft.memory.stream import open_stream


EOS = 2
IDS = torch.tensor([[5, 6, EOS, 7, 8, 9]])


def reach(variant: str = "deepseek", **arguments) -> list[int]:
    spec = NgramMemorySpec(
        hidden_size=8, layer_ids=[0], vocab_size=20, compressed_vocab_size=50, variant=variant, n_heads=2, head_dim=4,
        eos_token_id=EOS,
    )  # fmt: skip
    return open_stream(spec, IDS, vocab_size=50, **arguments).reach[0].tolist()


@pytest.mark.parametrize("variant", ["deepseek", "deepseek_v41", "needle"])
def test_documents_end_with_their_last_token(variant: str):
    assert reach(variant) == [0, 1, 2, 0, 1, 2]


def test_in_qwens_layer_the_convolution_runs_on_over_the_end_of_a_text():
    assert reach("qwen_ple") == [0, 1, 2, 3, 4, 5]
    assert reach("qwen_ple", position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]])) == [0, 1, 2, 0, 1, 2]


def test_masks_of_several_kinds_and_positions_of_several_modalities():
    padding = torch.tensor([[0, 0, 1, 1, 1, 1]])
    prepared = padding.bool()[:, None, None] & torch.ones(6, 6, dtype=torch.bool).tril()
    expected = reach("qwen_ple", attention_mask=padding)
    assert expected == [-1, -1, 0, 1, 2, 3]
    narrow = prepared[..., -3:]
    for mask in (prepared, {"sliding_attention": narrow, "full_attention": prepared}, {"linear_attention": padding}):
        assert reach("qwen_ple", attention_mask=mask) == expected
    restarting = torch.tensor([0, 1, 2, 0, 1, 2]).view(1, 1, 6)
    assert reach("qwen_ple", position_ids=restarting.expand(4, 1, 6)) == [0, 1, 2, 0, 1, 2]  # the first is the text's
    assert reach("qwen_ple", position_ids=restarting.expand(3, 1, 6)) == [0, 1, 2, 3, 4, 5]  # those of images restart


def test_masked_tokens_stop_everything():
    assert reach(masked_token_ids=[7]) == [0, 1, 2, -1, 0, 1]
    assert reach("qwen_ple", masked_token_ids=[7, 1000]) == [0, 1, 2, -1, 0, 1]
