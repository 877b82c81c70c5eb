"""Fixtures for adapters."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedTokenizerFast


# a second thread costs tiny models ten times what it brings
torch.set_num_threads(1)


@pytest.fixture
def tokenizer(tiny_tokenizer) -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture
def ids(token_ids) -> torch.Tensor:
    """Three texts of nine tokens."""
    return token_ids(3, 9)
