"""What the examples share: the model they run on, its answers, and the command line."""

from __future__ import annotations

import argparse

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


Chat = list[dict[str, str]]


def command_line(doc: str) -> argparse.ArgumentParser:
    """A parser that shows the script's docstring as its help and knows `--model`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub name or local folder; by default SmolLM2-135M-Instruct from PyPI")
    return parser


def load_model(name: str | None) -> PreTrainedModel:
    """The model, in float32: the default one is small enough for it, and a CPU is fastest with it."""
    return AutoModelForCausalLM.from_pretrained(name or _default_folder(), dtype=torch.float32).eval()


def load_tokenizer(name: str | None) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(name or _default_folder())
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _default_folder() -> str:
    from smollm2 import smollm2_folder  # needs packages that another model does not

    return str(smollm2_folder())


def messages(question: str, answer: str) -> Chat:
    """A question and its answer."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


@torch.inference_mode()
def replies(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, chats: list[Chat], max_new_tokens: int = 16
) -> list[str]:
    """What the model says, freely and always by its likeliest token, to chats that end with the user's message."""
    prompts = tokenizer.apply_chat_template(
        chats,
        add_generation_prompt=True,
        padding=True,
        tokenizer_kwargs={"padding_side": "left"},
        return_tensors="pt",
        return_dict=True,
    )
    written = model.generate(
        **prompts, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id
    )
    answers = tokenizer.batch_decode(written[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    return [" ".join(answer.split()) for answer in answers]


def fine_tune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    chats: list[Chat],
    *,
    epochs: int,
    learning_rate: float,
    batch_size: int = 10,
    bf16: bool = False,
    seed: int = 0,
) -> None:
    """Teaches the model the last message of every chat: all of its weights, in place; with `bf16` products are in bfloat16."""
    prompts = tokenizer.apply_chat_template([chat[:-1] for chat in chats], add_generation_prompt=True)["input_ids"]
    texts = tokenizer.apply_chat_template(chats)["input_ids"]
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=epochs * -(-len(chats) // batch_size))
    model.train()
    for epoch in range(1, epochs + 1):
        losses = []
        for chosen in torch.randperm(len(chats), generator=generator).split(batch_size):
            input_ids = pad_sequence([torch.tensor(texts[i]) for i in chosen], batch_first=True)
            labels = torch.full_like(input_ids, -100)  # what the loss does not count: the questions and the padding
            for row, i in enumerate(chosen):
                labels[row, len(prompts[i]) : len(texts[i])] = input_ids[row, len(prompts[i]) : len(texts[i])]
            # padding comes last, where no token that counts attends to it
            with torch.autocast(input_ids.device.type, torch.bfloat16, enabled=bf16):
                loss = model(input_ids=input_ids, labels=labels).loss
            loss.backward()
            optimizer.step()
            decay.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}", flush=True)
    model.eval()
