"""The example that forgets a digit."""

from __future__ import annotations

import pytest
import torch
from forget_a_digit import accuracies, images_and_labels, trained_network, without_digit


@pytest.fixture(scope="module")
def digits():
    images, labels = images_and_labels()
    return trained_network(images[:1200], labels[:1200]), images, labels


@pytest.mark.parametrize("digit", [3, 7])
def test_one_digit_is_forgotten_and_the_others_are_kept(digits, digit):
    model, images, labels = digits
    known, unseen = (images[:1200], labels[:1200]), (images[1200:], labels[1200:])
    before = accuracies(model, *unseen)
    others = torch.arange(10) != digit
    edited = without_digit(model, *known, digit, alpha=2.0)
    after = accuracies(edited, *unseen)
    assert before.min() > 0.85 and after[digit] < 0.2
    assert after[others].mean() > before[others].mean() - 0.05
    assert torch.equal(accuracies(edited.unload(), *unseen), before)
