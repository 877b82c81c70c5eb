"""A model learns a domain, Python's own documentation: with an n-gram memory, with LoRA, and with both, at equal trainable bytes.

    python examples/domain_memory.py               # SmolLM2-135M-Instruct, some minutes on two cores
    python examples/domain_memory.py --steps 10    # a quick look
    python examples/domain_memory.py --bf16        # half the time on CPUs that multiply in bfloat16

Prints the loss on documentation held out and on answers that the model itself gave before, in nats a token, and the size of each
saved adapter. What rises on the model's own answers is what it forgets: the rise is an estimate of the Kullback-Leibler divergence
of the new model from the old one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import command_line, load_model, load_tokenizer
from peft import LoraConfig, PeftModel, get_peft_model
from pretrain_tiny import split_documentation, token_blocks
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_scheduler, set_seed

from engram_peft import NgramMemoryConfig, create_optimizer
from engram_peft.editing.sampling import sample_texts


# (slots per table, rank of LoRA) of each way to learn, about three million trained numbers each
ADAPTERS = {"memory": (5_000, 0), "LoRA": (0, 10), "memory + LoRA": (2_250, 5)}
LEARNING_RATE = 1e-3  # of LoRA and of the memory's projections
TABLE_LR_RATIO = 100.0  # a row is read a few times in so short a training
BATCH_SIZE = 4
EVALUATED = 32  # texts of either kind


def adapted(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, slots: int, rank: int) -> PeftModel:
    """The model with a new memory of tables with `slots` rows, a new LoRA adapter of some rank, or both."""
    peft_model: PeftModel | None = None
    if rank:
        lora = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear")
        peft_model = get_peft_model(model, lora, adapter_name="style")
    if slots:
        memory = NgramMemoryConfig(
            task_type="CAUSAL_LM", layers_to_transform=[1, 14], n_heads=4, head_dim=32, vocab_size=slots
        ).token_map_from(tokenizer)
        peft_model = get_peft_model(peft_model or model, memory, adapter_name="knowledge")
    assert peft_model is not None
    return peft_model


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    blocks: torch.Tensor,
    *,
    steps: int,
    seed: int,
    bf16: bool,
) -> None:
    """Some steps on random batches of `blocks` `(sequences, length)`."""
    generator = torch.Generator().manual_seed(seed)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=steps // 10, num_training_steps=steps)
    model.train()
    for _ in range(steps):
        batch = blocks[torch.randint(len(blocks), (BATCH_SIZE,), generator=generator)]
        with torch.autocast(batch.device.type, torch.bfloat16, enabled=bf16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()


Text = tuple[torch.Tensor, int]  # token ids `(length,)`, and how many of the first are not predicted


@torch.inference_mode()
def nats_per_token(model: torch.nn.Module, texts: Sequence[Text]) -> float:
    """The mean loss of the tokens that count in some texts."""
    total = 0.0
    for ids, given in texts:
        labels = ids.clone()
        labels[:given] = -100
        total += float(model(input_ids=ids[None], labels=labels[None]).loss) * (len(ids) - given)
    return total / sum(len(ids) - given for ids, given in texts)


def own_answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int) -> list[Text]:
    """Answers of a chat model to questions that it asked itself."""
    chats = sample_texts(model, tokenizer, count, max_new_tokens=64, batch_size=count)
    prompts = tokenizer.apply_chat_template([chat[:-1] for chat in chats], add_generation_prompt=True)["input_ids"]
    texts = tokenizer.apply_chat_template(chats)["input_ids"]
    return [(torch.tensor(ids), len(prompt)) for ids, prompt in zip(texts, prompts, strict=True)]


def trained_numbers(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def saved_megabytes(model: Any) -> float:
    """What `save_pretrained` writes: of adapters, only themselves."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors")) / 2**20


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--bf16", action="store_true", help="train with products in bfloat16")
    args = parser.parse_args()
    tokenizer, model = load_tokenizer(args.model), load_model(args.model)
    training, held_out = (token_blocks(tokenizer, texts) for texts in split_documentation())
    domain = [(ids, 1) for ids in held_out[:EVALUATED]]
    general = own_answers(model, tokenizer, EVALUATED)
    print(f"{'':16}{'trained':>12}{'domain':>9}{'general':>9}{'file, MB':>10}")
    print(f"{'as it was':28}{nats_per_token(model, domain):9.3f}{nats_per_token(model, general):9.3f}")
    for name, (slots, rank) in ADAPTERS.items():
        set_seed(0)
        peft_model = adapted(load_model(args.model), tokenizer, slots, rank)
        trained = trained_numbers(peft_model)
        optimizer = create_optimizer(peft_model, lr=LEARNING_RATE, table_lr_ratio=TABLE_LR_RATIO)
        train(peft_model, optimizer, training, steps=args.steps, seed=0, bf16=args.bf16)
        losses = f"{nats_per_token(peft_model, domain):9.3f}{nats_per_token(peft_model, general):9.3f}"
        print(f"{name:16}{trained:12,}{losses}{saved_megabytes(peft_model):10.1f}", flush=True)


if __name__ == "__main__":
    main()
