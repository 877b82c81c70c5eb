"""Makes a small convolutional network forget one digit, and prints the accuracy on every digit before and after.

    python examples/forget_a_digit.py            # some seconds on a CPU; needs scikit-learn
    python examples/forget_a_digit.py --digit 7

The network is trained here, on the 8 x 8 images that come with scikit-learn. Its convolutions are then edited in closed form: what
the digit's training images make them see is set against what all training images do, as second moments of patches. No
gradient is taken. Accuracy is measured on images that neither training nor editing saw.
"""

from __future__ import annotations

import argparse
import time
from collections import OrderedDict

import torch
from peft import PeftModel, get_peft_model
from sklearn.datasets import load_digits
from torch import nn

from engram_peft import EngramConfig, collect_statistics, extract_engram, merge_statistics


def images_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    """The 1,797 digits, `(n, 1, 8, 8)` between -1 and 1, in random order."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    return images[order], torch.tensor(digits.target)[order]


def trained_network(images: torch.Tensor, labels: torch.Tensor, epochs: int = 10) -> nn.Module:
    """Three convolutions, the last with groups, and a linear layer."""
    torch.manual_seed(0)
    model = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 16, 3, padding=1),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(16, 32, 3, stride=2, padding=1),
            relu2=nn.ReLU(),
            conv3=nn.Conv2d(32, 64, 3, stride=2, padding=1, groups=2),
            relu3=nn.ReLU(),
            flat=nn.Flatten(),
            head=nn.Linear(256, 10),
        )
    )
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=epochs * -(-len(images) // 64))
    for _ in range(epochs):
        for chosen in torch.randperm(len(images)).split(64):
            nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return model.eval()


def without_digit(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, digit: int, alpha: float) -> PeftModel:
    """`model` with an adapter that takes out of its convolutions what the digit's images use more than others do."""
    model = get_peft_model(model, EngramConfig(target_modules=["conv1", "conv2", "conv3"], alpha=alpha)).eval()
    batches = [
        {"input": some, "labels": theirs} for some, theirs in zip(images.split(400), labels.split(400), strict=True)
    ]
    target = collect_statistics(model, batches, mask_fn=lambda batch: batch["labels"] == digit)
    others = collect_statistics(model, batches, mask_fn=lambda batch: batch["labels"] != digit)
    extract_engram(model, target, merge_statistics(target, others))
    return model


@torch.inference_mode()
def accuracies(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The share of each digit's images that are recognised, `(10,)`."""
    right = model(images).argmax(-1) == labels
    return torch.stack([right[labels == digit].float().mean() for digit in range(10)])


def print_row(name: str, shares: torch.Tensor, digit: int) -> None:
    others = shares[torch.arange(10) != digit].mean()
    print(f"{name:8}" + "".join(f"{share:6.2f}" for share in shares.tolist()) + f"{others:14.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--digit", type=int, default=3, choices=range(10), help="which one to forget")
    parser.add_argument("--alpha", type=float, default=2.0, help="strength of the edit")
    args = parser.parse_args()
    images, labels = images_and_labels()
    known, unseen = (images[:1200], labels[:1200]), (images[1200:], labels[1200:])

    start = time.perf_counter()
    model = trained_network(*known)
    trained = time.perf_counter()
    before = accuracies(model, *unseen)
    model = without_digit(model, *known, args.digit, args.alpha)
    print(f"\ntrained in {trained - start:.1f} s, edited in {time.perf_counter() - trained:.1f} s\n")

    print("digit   " + "".join(f"{digit:6}" for digit in range(10)) + "    the others")
    print_row("before", before, args.digit)
    print_row("after", accuracies(model, *unseen), args.digit)
    with model.disable_adapter():
        assert torch.equal(accuracies(model, *unseen), before)


if __name__ == "__main__":
    main()
