"""The model card of a saved adapter, and pushing one to the hub."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import EntryNotFoundError
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file

from engram_peft import EngramConfig

from ..conftest import WORDS
from .adapters import FORGET, FORGET_OTHER, RETAIN, edited, fill, logits, same_tensors


def card_of(model, folder) -> str:
    model.save_pretrained(folder)
    return (folder / "README.md").read_text()


def test_the_card_says_what_was_forgotten_and_from_how_much(tiny_model, tokenizer, tmp_path):
    model = edited(tiny_model("llama"), tokenizer, description="Two capitals of the south.", alpha=0.5)
    model.set_scale("default", 3)
    card = card_of(model, tmp_path)
    rows = [sum(len(text.split()) for text in texts) for texts in (FORGET, RETAIN)]
    assert "Two capitals of the south." in card
    assert f"{len(FORGET)} texts, {rows[0]} tokens" in card
    assert f"{len(FORGET) + len(RETAIN)} texts, {sum(rows)} tokens ({rows[0] / sum(rows):.1%} of them" in card
    assert "alpha 1.5, scale uniform, cut rtol" in card


def test_the_card_tells_how_to_load_the_adapter(tiny_model, tokenizer, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "base")
    base = tiny_model("llama").from_pretrained(tmp_path / "base")
    card = card_of(edited(base, tokenizer), tmp_path / "adapter")
    code = card.partition("```python\n")[2].partition("```")[0]
    assert "import engram_peft\n" in code and "pip install engram-adapters" in card
    code = code.replace("path of this adapter", str(tmp_path / "adapter"))
    names: dict = {}
    exec(code, names)
    assert isinstance(names["model"], PeftModel)
    assert names["model"].peft_config["default"].peft_type.value == "ENGRAM"


def test_the_card_is_tagged(tiny_model, tokenizer, tmp_path):
    card_of(edited(tiny_model("llama"), tokenizer), tmp_path)
    data = ModelCard.load(tmp_path / "README.md").data
    assert {"engram", "unlearning"} <= set(data.tags)
    assert data.library_name == "peft"


def test_no_text_of_the_data_is_written(tiny_model, tokenizer, tmp_path):
    edited(tiny_model("llama"), tokenizer).save_pretrained(tmp_path)
    rare = [word for word in {*" ".join(FORGET).split()} if len(word) > 4]
    assert "france" in rare and set(rare) <= set(WORDS)
    for name in ("README.md", "adapter_config.json"):
        text = (tmp_path / name).read_text().lower()
        assert not [word for word in rare if word in text], name


def test_an_unfilled_adapter_says_so(tiny_model, tmp_path):
    assert "not filled" in card_of(get_peft_model(tiny_model("llama"), EngramConfig()), tmp_path)


def test_saving_twice_keeps_one_section(tiny_model, tokenizer, tmp_path):
    model = edited(tiny_model("llama"), tokenizer, description="The first.")
    first = card_of(model, tmp_path)
    assert card_of(model, tmp_path) == first
    model.peft_config["default"].description = "The second."
    second = card_of(model, tmp_path)
    assert second == first.replace("The first.", "The second.")


def test_what_a_user_wrote_around_the_section_stays(tiny_model, tokenizer, tmp_path):
    model = edited(tiny_model("llama"), tokenizer, description="The first.")
    card = card_of(model, tmp_path)
    begin, end = card.index("<!-- engram -->"), card.index("<!-- /engram -->") + len("<!-- /engram -->")
    mine = card[:begin] + "Written before.\n\n" + card[begin:end] + "\n\nWritten after.\n" + card[end:]
    (tmp_path / "README.md").write_text(mine)
    model.peft_config["default"].description = "The second."
    assert card_of(model, tmp_path).split() == mine.replace("The first.", "The second.").split()


def test_a_card_of_the_users_own_gets_the_section_and_keeps_its_text(tiny_model, tokenizer, tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# My model\n\nAll about it.\n")
    card = card_of(edited(tiny_model("llama"), tokenizer), tmp_path)
    assert "# My model\n\nAll about it." in card and card.count("<!-- engram -->") == 1
    assert ModelCard.load(tmp_path / "README.md").data.license == "mit"


def test_the_blank_form_of_the_hub_is_not_left_in(tiny_model, tokenizer, tmp_path):
    card = card_of(edited(tiny_model("llama"), tokenizer), tmp_path)
    assert "[More Information Needed]" not in card and "- PEFT " in card


def test_several_adapters_are_each_described_in_a_card(tiny_model, tokenizer, tmp_path):
    model = edited(tiny_model("llama"), tokenizer, "first", description="The first.")
    model.add_adapter("second", EngramConfig(description="The second."))
    fill(model, tokenizer, "second", FORGET_OTHER)
    model.save_pretrained(tmp_path)
    cards = [path.read_text() for path in tmp_path.rglob("README.md")]
    for own in ("The first.", "The second."):
        assert any(own in card and "import engram_peft" in card for card in cards), own


# ------------------------------------------------------------------------------------------------ the hub


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that keeps what it is handed in a folder; no network is used."""
    folder = tmp_path / "hub"

    def create_repo(self, repo_id, **kwargs):
        folder.mkdir(exist_ok=True)
        return SimpleNamespace(repo_id=repo_id)

    def create_commit(self, repo_id, operations, **kwargs):
        for operation in operations:
            with operation.as_file() as file:
                (folder / operation.path_in_repo).write_bytes(file.read())
        return f"committed to {repo_id}"

    def no_card(repo_id, **kwargs):
        raise EntryNotFoundError("there is no card yet")

    load = ModelCard.load
    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "create_commit", create_commit)
    monkeypatch.setattr(
        ModelCard, "load", lambda path, **kw: no_card(path) if str(path) == "me/forgetful" else load(path, **kw)
    )
    return folder


def test_pushing_hands_over_config_weights_and_card(tiny_model, tokenizer, ids, tmp_path, hub):
    model = edited(tiny_model("gpt2"), tokenizer, description="Two capitals.")
    assert model.push_to_hub("me/forgetful") == "committed to me/forgetful"
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= {file.name for file in hub.iterdir()}
    model.save_pretrained(tmp_path / "local")
    file = "adapter_model.safetensors"
    assert same_tensors(load_file(hub / file), load_file(tmp_path / "local" / file))
    loaded = PeftModel.from_pretrained(tiny_model("gpt2"), hub)
    assert torch.equal(logits(loaded, ids), logits(model, ids))
