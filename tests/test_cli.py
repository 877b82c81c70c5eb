"""The command line: what it writes is what the library makes, and what it cannot use it says in one line."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
from typer.testing import CliRunner

import engram_peft
from engram_peft import (
    EngramConfig,
    Statistics,
    collect_statistics,
    html_report,
    merge_statistics,
    recipes,
    tune_alpha,
    unlearn,
)
from engram_peft.cli import app
from engram_peft.cli.adapters import describe_adapter
from engram_peft.cli.application import BadInput
from engram_peft.cli.rows import items_of, read_rows
from engram_peft.editing.tuning import scale_curve
from engram_peft.evaluation import Probe, Suite, evaluate

from .conftest import WORDS


FORGET = [
    {"name": "france", "prompt": "the capital of france is", "answer": "paris ."},
    {"name": "italy", "question": "the capital of italy is", "answer": "rome ."},
    {"name": "france", "prompt": "what is the capital of france ?", "answer": "paris ."},
]
RETAIN = [
    {"prompt": "the capital of germany is", "answer": "berlin ."},
    {"prompt": "the capital of spain is", "answer": "madrid ."},
    {"text": "the old king lived near the deep ocean ."},
    {"text": "a small bird lies on the long road ."},
]
NAMED = {"france": [FORGET[0], FORGET[2]], "italy": [FORGET[1]]}
SUITE = Suite(
    forget=[Probe("the capital of france is", "paris", suffix=" .")],
    retain=[Probe("the capital of spain is", "madrid", suffix=" .")],
    general=["the old king lived near the deep ocean ."],
)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Relative names in a test are in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def saved(tiny_model, tiny_tokenizer, tmp_path_factory):
    """`saved(kind="llama", chat=False)`: the folder of a tiny model with its tokenizer."""

    def save(kind: str = "llama", chat: bool = False) -> str:
        folder = tmp_path_factory.getbasetemp() / f"{kind}-{chat}"
        if not folder.exists():
            tiny_model(kind).save_pretrained(folder)
            tiny_tokenizer(chat=chat).save_pretrained(folder)
        return str(folder)

    return save


@pytest.fixture
def model(saved):
    return saved()


@pytest.fixture
def files(here):
    write_lines("forget.jsonl", FORGET)
    write_lines("retain.jsonl", RETAIN)
    SUITE.save("suite.json")


@pytest.fixture
def adapter(model, files, tmp_path_factory):
    """An adapter from the command line, made once."""
    folder = tmp_path_factory.getbasetemp() / "adapter"
    if not folder.exists():
        succeed("unlearn", *unlearning(model, folder))
    return str(folder)


def write_lines(path: str, rows: list) -> None:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def unlearning(model: str, output: str | Path = "adapter", *more: str) -> list[str]:
    return ["--model", model, "--forget", "forget.jsonl", "--retain", "retain.jsonl", "--output", str(output), *more]


def run(*args: str):
    return CliRunner().invoke(app, [str(arg) for arg in args], prog_name="engram-peft")


def succeed(*args: str):
    result = run(*args)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def document(*args: str):
    """The JSON that a command prints, with nothing beside it."""
    result = succeed(*args, "--json")
    assert "%|" not in result.stderr
    return json.loads(result.stdout, parse_constant=lambda name: pytest.fail(name))


def error(*args: str, code: int = 2) -> str:
    """The line that a command fails with."""
    result = run(*args)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line and "%|" not in line]
    assert line.startswith("Error: ") and line.endswith(".")
    return line.removeprefix("Error: ")


def loaded(folder: str) -> tuple:
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def with_adapter(folder: str, adapter: str | Path) -> PeftModel:
    return PeftModel.from_pretrained(loaded(folder)[0], str(adapter)).eval()


def forgotten(folder: str, config: EngramConfig | None = None, **options) -> PeftModel:
    return unlearn(*loaded(folder), NAMED, RETAIN, config, **options)


@torch.no_grad()
def logits(model, token_ids) -> torch.Tensor:
    return model(input_ids=token_ids(3, 9)).logits


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "adapter_model.safetensors")


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


# ---------------------------------------------------------------------------------------------------- unlearn


def test_unlearn_writes_what_the_library_makes(model, files, token_ids):
    found = document("unlearn", *unlearning(model))
    library = forgotten(model)
    library.save_pretrained("library")

    assert same(weights("adapter"), weights("library"))
    mine, theirs = (json.loads(Path(name, "adapter_config.json").read_text()) for name in ("adapter", "library"))
    for config in (mine, theirs):  # a set's order is nobody's business
        config["target_modules"] = sorted(config["target_modules"])
    assert mine == theirs

    restored = with_adapter(model, "adapter")
    assert torch.equal(logits(restored, token_ids), logits(library.eval(), token_ids))
    report = library.base_model.reports["default"]
    strengths = restored.base_model.item_strengths()
    assert [item["name"] for item in found["items"]] == ["france", "italy"] == list(strengths)
    for item, outcome in zip(found["items"], report.items, strict=True):
        assert item == {**vars(outcome), "resists": outcome.resists}
        assert strengths[item["name"]] == pytest.approx(outcome.strength, rel=1e-6)
    assert found["layer_effects"] == report.layer_effects and found["rounds"] == report.rounds
    assert (found["model"], found["output"], found["method"]) == (model, "adapter", "items")
    assert found["curve"] is found["evaluation"] is found["report"] is None


def test_unlearn_prints_the_table_and_where_the_adapter_is(model, files):
    result = succeed("unlearn", *unlearning(model))
    assert str(forgotten(model).base_model.reports["default"]) in result.stdout
    assert "of 2 items forgotten" in result.stdout and "Adapter: adapter (" in result.stdout
    assert "Extracting" in result.stderr  # the progress bar


def test_long_tables_are_cut(model, files):
    write_lines(
        "forget.jsonl", [{"text": f"the {first} {second}"} for first in WORDS[40:45] for second in WORDS[50:57]]
    )
    out = succeed("unlearn", *unlearning(model)).stdout
    assert "... and 5 more" in out and "of 35 items" in out


def test_quiet_prints_nothing(model, files):
    bars = logging.is_progress_bar_enabled()
    result = succeed("unlearn", *unlearning(model, "adapter", "--quiet"))
    assert result.stdout == "" and "%|" not in result.stderr
    assert logging.is_progress_bar_enabled() == bars


def test_options_of_items_reach_the_library(model, files):
    options = {"forget_probability": 0.001, "retain_weight": 5.0, "replacement": "london"}
    args = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    succeed("unlearn", *unlearning(model, "adapter", *args, "--layers=0", "--target-modules=o_proj,down_proj"))
    config = EngramConfig(task_type="CAUSAL_LM", target_modules=["o_proj", "down_proj"], layers_to_transform=[0])
    library = forgotten(model, config, **options)
    library.save_pretrained("library")
    assert same(weights("adapter"), weights("library"))
    extraction = with_adapter(model, "adapter").peft_config["default"].extraction
    assert options.items() <= extraction.items()


def test_the_paper_s_method(model, files, token_ids):
    args = ["--method", "paper", "--alpha", "0.5", "--layers", "0-1", "--target-modules", "down_proj"]
    found = document("unlearn", *unlearning(model, "adapter", *args))
    config = EngramConfig.paper(
        task_type="CAUSAL_LM", alpha=0.5, target_modules=["down_proj"], layers_to_transform=[0, 1]
    )
    library = forgotten(model, config)
    assert torch.equal(logits(with_adapter(model, "adapter"), token_ids), logits(library.eval(), token_ids))
    layers = library.base_model.reports["default"].layers
    assert found["alpha"] == 0.5 and found["layers"].keys() == layers.keys()
    for name, layer in found["layers"].items():
        assert layer["rank"] == layers[name].rank
        assert layer["relative_strength"] == pytest.approx(layers[name].relative_strength)
    assert str(library.base_model.reports["default"]) in succeed("unlearn", *unlearning(model, "two", *args)).stdout


def test_alpha_auto_saves_the_scale_and_shows_the_curve(model, files):
    found = document("unlearn", *unlearning(model, "adapter", "--alpha", "auto"))
    curve = tune_alpha(library := forgotten(model), loaded(model)[1], NAMED, RETAIN)
    assert found["curve"] == json.loads(json.dumps({**vars(curve), "points": [vars(p) for p in curve.points]}))
    saved = json.loads(Path("adapter/adapter_config.json").read_text())["scale"]
    assert saved == found["scale"] == curve.chosen == library.peft_config["default"].scale


def test_a_suite_is_measured_before_and_after(model, files):
    found = document("unlearn", *unlearning(model, "adapter", "--suite", "suite.json", "--no-generate"))
    base, tokenizer = loaded(model)
    before = evaluate(base, tokenizer, SUITE, generate=False)
    after = evaluate(with_adapter(model, "adapter"), tokenizer, SUITE, generate=False)
    assert found["evaluation"] == {"before": before.to_dict(), "after": after.to_dict()}
    out = succeed("unlearn", *unlearning(model, "two", "--suite", "suite.json", "--no-generate")).stdout
    assert after.compare(before) in out


def test_chat_is_the_same_as_messages(saved, files):
    model = saved(chat=True)
    note = succeed("unlearn", *unlearning(model, "plain")).stderr
    assert "--chat" in note
    assert "--chat" not in succeed("unlearn", *unlearning(model, "chat", "--chat")).stderr
    for path, rows in (("forget.jsonl", FORGET), ("retain.jsonl", RETAIN)):
        write_lines(path, [as_messages(row) for row in rows])
    succeed("unlearn", *unlearning(model, "messages"))
    assert same(weights("chat"), weights("messages"))
    assert not same(weights("chat"), weights("plain"))


def as_messages(row: dict) -> dict:
    if "text" in row:
        return row
    content = (("user", row.get("prompt") or row.get("question")), ("assistant", row["answer"]))
    name = {"name": row["name"]} if "name" in row else {}
    return {**name, "messages": [{"role": role, "content": text} for role, text in content]}


def test_a_span_is_what_is_forgotten(model, files):
    write_lines(
        "forget.jsonl", [{"prompt": "the capital of france is", "answer": "paris on the river .", "span": "river"}]
    )
    succeed("unlearn", *unlearning(model))
    assert describe_adapter(Path("adapter"))["items"]["0"]["rows"] == 1


# ---------------------------------------------------------------------------------------------------- input


def test_names_that_repeat_are_one_item():
    assert items_of(FORGET, Path("forget.jsonl")) == NAMED
    assert items_of(RETAIN, Path("retain.jsonl")) == RETAIN


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"text": "one ."}\n\n"two ."\n'),
        ("a.jsonl", '\ufeff{"text": "one ."}\r\n{"text": "two ."}'),
        ("a.json", '["one .", {"text": "two ."}]'),
        ("a.txt", "one .\n\n  two .  \n"),
    ],
)
def test_every_kind_of_file(name, content):
    Path(name).write_text(content, encoding="utf-8", newline="")
    assert read_rows(Path(name)) == [{"text": "one ."}, {"text": "two ."}]


def test_json_of_names():
    pairs = [{"prompt": "a", "answer": "b"}, {"prompt": "c", "answer": "d"}]
    Path("a.json").write_text(json.dumps({"first": pairs, "second": "one ."}))
    rows = read_rows(Path("a.json"))
    assert items_of(rows, Path("a.json")) == {
        "first": [{**pair, "name": "first"} for pair in pairs],
        "second": [{"text": "one .", "name": "second"}],
    }


def test_lines_end_at_newlines_only():
    text = "one\u2028two"
    Path("a.jsonl").write_text(json.dumps({"text": text}, ensure_ascii=False), encoding="utf-8")
    assert read_rows(Path("a.jsonl")) == [{"text": text}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "one"}\n{"text": ', r"a\.jsonl, line 2 is not JSON"),
        ("a.jsonl", '\n{"txt": "one"}', r"a\.jsonl, line 2 has the columns \['txt'\]"),
        ("a.jsonl", '{"prompt": "one"}', "Expected `text`"),
        ("a.jsonl", '{"prompt": "one", "answer": 7}', "line 1: 'answer' must be a text"),
        ("a.jsonl", '{"prompt": "one", "answer": "  "}', "line 1: 'answer' is empty"),
        ("a.jsonl", '{"messages": "hello"}', "'messages' must be a list of messages"),
        ("a.jsonl", '{"text": "one", "name": 3}', "'name' must be a text"),
        ("a.jsonl", "[1, 2]", "line 1 is no JSON object"),
        ("a.jsonl", "\n \n", "holds no texts"),
        ("a.txt", "", "holds no texts"),
        ("a.json", "{", r"a\.json is not JSON"),
        ("a.json", "3", "must hold a list"),
        ("a.json", '[{"text": "one"}, 7]', "entry 2 is no JSON object"),
        ("a.json", '{"x": 7}', "item 'x' is no JSON object"),
        ("a.csv", "one", "unknown ending"),
    ],
)
def test_files_that_cannot_be_used(name, content, message):
    Path(name).write_text(content)
    with pytest.raises(BadInput, match=message):
        read_rows(Path(name))


def test_text_in_another_encoding():
    Path("a.txt").write_bytes("déjà".encode("latin-1"))
    with pytest.raises(BadInput, match="not UTF-8"):
        read_rows(Path("a.txt"))


# ---------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--forget", "none.jsonl"], r"'--forget'.*none\.jsonl.* does not exist"),
        (["--forget", "broken.jsonl"], r"broken\.jsonl, line 1 is not JSON"),
        (["--forget", "mixed.jsonl"], "1 of 2 items in mixed.jsonl have a 'name'"),
        (["--forget", "copied.jsonl"], "'x' of --forget has no secret"),
        (["--retain", "long.jsonl", "--max-length", "4"], "of --retain has a prompt .* --max-length 4.*or raise --max-length"),
        (["--model", "./none"], "no folder ./none"),
        (["--model", "empty"], "Cannot load the model empty"),
        (["--alpha", "strong"], "--alpha must be a number or auto, got 'strong'"),
        (["--alpha", "nan"], "--alpha"),
        (["--layers", "9-4"], "--layers 9-4 is no list"),
        (["--layers", "a"], "--layers a is no list"),
        (["--layers", "0,7"], r"--layers lists \[7\], but the model has layers 0 to 1"),
        (["--target-modules", ","], "--target-modules names no module"),
        (["--target-modules", "down_prj"], "nearest names are.*down_proj"),
        (["--forget-probability", "2"], r"--forget-probability must be in \(0, 1\)"),
        (["--retain-weight", "-1"], "--retain-weight must be a positive number"),
        (["--replacement", " "], "--replacement is empty"),
        (["--method", "paper", "--retain-weight", "2"], "--retain-weight: only --method items"),
        (["--method", "other"], "'--method'.*'items'"),
        (["--batch-size", "0"], "'--batch-size'"),
        (["--batch-size", "x"], "'--batch-size'"),
        (["--device", "nowhere"], "Cannot use --device nowhere"),
        (["--chat"], "--chat needs a tokenizer with a chat template"),
        (["--suite", "broken.jsonl"], "broken.jsonl is no suite"),
        (["--suite", "wrong.json"], "wrong.json is no suite.*unknown keys"),
        (["--output", "empty"], "empty exists already.*--overwrite"),
        (["--output", "forget.jsonl", "--overwrite"], "holds neither an adapter nor a model"),
        (["--output", "forget.jsonl/adapter"], "Cannot write to"),
        (["--report", "suite.json"], "suite.json exists already"),
        (["--report", "empty", "--overwrite"], "empty is a folder"),
        (["--nonsense"], "No such option"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_nothing_is_written(model, files, here, more, message):
    Path("empty").mkdir()
    Path("broken.jsonl").write_text("{")
    Path("wrong.json").write_text('{"forgot": []}')
    write_lines("mixed.jsonl", [FORGET[0], RETAIN[0]])
    write_lines("copied.jsonl", [{"name": "x", "prompt": "paris is", "answer": "paris"}])
    write_lines("long.jsonl", [{"prompt": "the capital of germany is", "answer": "berlin"}])
    before = sorted(here.rglob("*"))
    line = error("unlearn", *unlearning(model, "adapter", *more))
    assert re.search(message, line), line
    assert sorted(here.rglob("*")) == before


def test_a_missing_option_says_so():
    assert error("unlearn", "--model", "x").startswith("Missing option '--forget'. See `engram-peft unlearn --help`.")
    assert "No such command" in error("forget")


def test_a_model_that_the_hub_does_not_have(files, monkeypatch):
    def nothing(*args, **kwargs):
        raise OSError("no/such is not a local folder\nand is not on the Hub.")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", nothing)
    line = error("unlearn", *unlearning("no/such"))
    assert line == "Cannot load the model no/such: no/such is not a local folder and is not on the Hub."


def test_a_failure_is_one_line_and_debug_has_its_traceback(model, files, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("a bug\nin two lines")

    monkeypatch.setattr(recipes, "unlearn", fail)
    assert error("unlearn", *unlearning(model), code=1) == "RuntimeError: a bug in two lines. --debug shows where."
    result = run("unlearn", *unlearning(model, "adapter", "--debug"))
    assert result.exit_code == 1 and isinstance(result.exception, RuntimeError)
    assert not Path("adapter").exists()


def test_an_operation_gone_wrong_is_no_bad_input(model, files, monkeypatch):
    monkeypatch.setattr(recipes, "unlearn", lambda *args, **kwargs: 1 - "one")
    assert error("unlearn", *unlearning(model), code=1).startswith("TypeError: unsupported operand")


def test_running_out_of_memory_says_what_helps(model, files, monkeypatch):
    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(recipes, "unlearn", fail)
    assert "Lower --batch-size" in error("unlearn", *unlearning(model), code=1)


def test_an_interrupted_write_leaves_the_old_adapter(model, files, adapter, monkeypatch, here):
    succeed("unlearn", *unlearning(model))
    old = weights("adapter")

    def fail(self, folder, **kwargs):
        Path(folder, "adapter_config.json").write_text("{}")
        raise OSError("the disk is full")

    monkeypatch.setattr(PeftModel, "save_pretrained", fail)
    assert "the disk is full" in error("unlearn", *unlearning(model, "adapter", "--overwrite", "--quiet"), code=1)
    assert same(weights("adapter"), old)
    assert not list(here.glob(".*"))


def test_overwrite_replaces_the_folder(model, files):
    succeed("unlearn", *unlearning(model))
    Path("adapter/stale.txt").write_text("old")
    succeed("unlearn", *unlearning(model, "adapter", "--overwrite", "--alpha", "0.5"))
    assert not Path("adapter/stale.txt").exists()
    assert json.loads(Path("adapter/adapter_config.json").read_text())["alpha"] == 0.5


def test_overwrite_spares_what_is_no_adapter(model, files):
    Path("precious").mkdir()
    Path("precious/thesis.txt").write_text("years")
    error("unlearn", *unlearning(model, "precious", "--overwrite"))
    assert Path("precious/thesis.txt").read_text() == "years"
    assert "is what is read from" in error("unlearn", *unlearning(model, model, "--overwrite"))


# ---------------------------------------------------------------------------------------------------- evaluate


@pytest.mark.parametrize("edited", [False, True])
def test_evaluate(model, adapter, edited):
    args = ["--suite", "suite.json", "--model", model, *(["--adapter", adapter] if edited else [])]
    found = document("evaluate", *args, "--samples", "2", "--output", "new/results.json")
    tokenizer = loaded(model)[1]
    library = evaluate(with_adapter(model, adapter) if edited else loaded(model)[0], tokenizer, SUITE, samples=2)
    assert found == library.to_dict() == json.loads(Path("new/results.json").read_text())
    library = evaluate(with_adapter(model, adapter) if edited else loaded(model)[0], tokenizer, SUITE, generate=False)
    assert succeed("evaluate", *args, "--no-generate").stdout == f"{library}\n"


def test_evaluate_finds_the_model_that_the_adapter_names(model, adapter):
    args = ["evaluate", "--suite", "suite.json", "--no-generate", "--adapter", adapter]
    assert document(*args) == document(*args, "--model", model)


def test_infinity_is_null_in_json(model, files, monkeypatch):
    from engram_peft import evaluation

    monkeypatch.setattr(evaluation, "evaluate", lambda *a, **k: evaluation.Evaluation({}, perplexity=float("inf")))
    assert document("evaluate", "--suite", "suite.json", "--model", model)["perplexity"] is None


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "pass --model, --adapter, or both"),
        (["--adapter", "none/"], "no folder none"),
        (["--adapter", "."], "has no adapter_config.json"),
        (["--samples", "-1"], "'--samples'"),
        (["--suite", "empty.json", "--model", "MODEL"], "--suite is empty"),
        (["--output", "suite.json", "--model", "MODEL"], "suite.json exists already"),
        (["--model", "OTHER", "--adapter", "ADAPTER"], "Cannot load the adapter"),
    ],
)
def test_evaluate_says_what_is_wrong(model, adapter, saved, args, message):
    Path("empty.json").write_text("{}")
    names = {"MODEL": model, "ADAPTER": adapter, "OTHER": saved("gpt2")}
    assert re.search(message, error("evaluate", "--suite", "suite.json", *(names.get(arg, arg) for arg in args), "-q"))


def test_generating_needs_rouge(model, files, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pass --no-generate" in error("evaluate", "--suite", "suite.json", "--model", model)


# ---------------------------------------------------------------------------------------------------- merge, lora


def test_merge(model, adapter, token_ids):
    found = document("merge", "--adapter", adapter, "--output", "merged")
    assert found == {"adapter": adapter, "output": "merged"}
    merged, tokenizer = loaded("merged")
    expected = logits(with_adapter(model, adapter), token_ids)
    assert torch.allclose(logits(merged, token_ids), expected, atol=1e-5)
    assert not torch.allclose(logits(loaded(model)[0], token_ids), expected, atol=1e-3)
    assert tokenizer("the king")["input_ids"] == loaded(model)[1]("the king")["input_ids"]
    assert "exists already" in error("merge", "--adapter", adapter, "--output", "merged")
    assert "is what is read from" in error("merge", "--adapter", adapter, "--output", adapter, "--overwrite")


def test_merge_in_another_dtype(model, adapter):
    succeed("merge", "--adapter", adapter, "--output", "merged", "--dtype", "bfloat16", "--no-safe-merge")
    assert AutoModelForCausalLM.from_pretrained("merged").dtype == torch.bfloat16


def test_merging_a_tied_head_has_to_be_allowed(saved, files, token_ids):
    model = saved("qwen3")
    succeed("unlearn", *unlearning(model, "tied", "--method", "paper", "--target-modules", "lm_head"))
    assert "pass --untie" in error("merge", "--adapter", "tied", "--output", "merged").replace("Pass", "pass")
    assert not Path("merged").exists()
    succeed("merge", "--adapter", "tied", "--output", "merged", "--untie")
    expected = logits(with_adapter(model, "tied"), token_ids)
    assert torch.allclose(logits(loaded("merged")[0], token_ids), expected, atol=1e-5)


def test_export_lora(model, adapter, token_ids):
    document("export-lora", "--adapter", adapter, "--output", "lora")
    lora = with_adapter(model, "lora")
    assert lora.peft_type == "LORA"
    assert torch.allclose(logits(lora, token_ids), logits(with_adapter(model, adapter), token_ids), atol=1e-5)


@pytest.mark.parametrize("command", ["merge", "export-lora"])
def test_other_adapters_are_refused(model, command):
    get_peft_model(loaded(model)[0], LoraConfig(target_modules=["o_proj"])).save_pretrained("lora")
    assert "is a LORA adapter" in error(command, "--adapter", "lora", "--output", "out")
    assert not Path("out").exists()


# ---------------------------------------------------------------------------------------------------- inspect


def test_inspect(model, adapter):
    found = document("inspect", adapter)
    restored = with_adapter(model, adapter)
    tuner, config = restored.base_model, restored.peft_config["default"]
    assert {name: item["strength"] for name, item in found["items"].items()} == tuner.item_strengths()
    assert {name: item["rows"] for name, item in found["items"].items()} == config.items
    assert found["layers"] == {
        name: len(layer.factors("default")[0]) for name, layer in tuner.engram_layers("default").items()
    }
    parameters = sum(p.numel() for name, p in restored.named_parameters() if "engram_" in name)
    assert found["parameters"] == parameters
    assert found["bytes"] == Path(adapter, "adapter_model.safetensors").stat().st_size
    assert (found["model"], found["alpha"], found["method"]) == (model, 1.0, "items")
    assert found["extraction"] == config.extraction
    out = succeed("inspect", adapter).stdout
    assert "3 texts to forget, 4 to keep" in out and re.search(r"italy +1 +[\d.]+", out)


def test_items_keep_their_strengths_whatever_their_names(model, files):
    write_lines(
        "forget.jsonl", [{**FORGET[0], "name": "zebra"}, {**FORGET[1], "name": "ant", "answer": "rome lies near ."}]
    )
    found = document("unlearn", *unlearning(model))
    strengths = {item["name"]: item["strength"] for item in found["items"]}
    assert list(strengths) == ["zebra", "ant"] and strengths["zebra"] != strengths["ant"]
    restored = with_adapter(model, "adapter").base_model.item_strengths()
    assert restored == pytest.approx(strengths, rel=1e-6)
    shown = document("inspect", "adapter")["items"]
    assert [(name, item["strength"]) for name, item in shown.items()] == list(restored.items())


def test_inspect_needs_no_model(adapter, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("a model was loaded"))
    succeed("inspect", adapter)


def test_inspect_of_the_paper_s_method_and_of_whole_layers(model, files):
    Path("retain.jsonl").write_text("".join(json.dumps({"text": f"{word} ."}) + "\n" for word in ("paris", "rome")))
    write_lines("forget.jsonl", [{"text": " ".join(words)} for words in zip(*[iter(WORDS)] * 8, strict=False)])
    succeed("unlearn", *unlearning(model, "paper", "--method", "paper", "--target-modules", "o_proj,down_proj"))
    found = document("inspect", "paper")
    pattern = json.loads(Path("paper/adapter_config.json").read_text())["rank_pattern"]
    assert {f"^{name}": rank or 0 for name, rank in found["layers"].items()} == pattern
    assert 0 in pattern.values()
    out = succeed("inspect", "paper").stdout
    assert "whole" in out and "item" not in out.split("layer")[1]


def test_inspect_says_what_is_wrong(model, adapter, here):
    assert "no folder none" in error("inspect", "none")
    assert "no adapter_config.json" in error("inspect", str(here))
    get_peft_model(loaded(model)[0], LoraConfig(target_modules=["o_proj"])).save_pretrained("lora")
    assert "is a LORA adapter" in error("inspect", "lora")
    get_peft_model(loaded(model)[0], EngramConfig(target_modules=["o_proj"])).save_pretrained("blank")
    assert "filled    no" in succeed("inspect", "blank").stdout
    Path("blank/adapter_model.safetensors").unlink()
    assert "has no adapter_model.safetensors" in error("inspect", "blank")
    Path("blank/adapter_model.safetensors").write_bytes(b"nothing")
    assert "truncated" in error("inspect", "blank")
    Path("blank/adapter_config.json").write_text("{")
    assert "Cannot read the adapter" in error("inspect", "blank")
    Path("mixed").mkdir()
    Path("mixed/adapter_model.safetensors").write_bytes(Path(adapter, "adapter_model.safetensors").read_bytes())
    config = json.loads(Path(adapter, "adapter_config.json").read_text())
    Path("mixed/adapter_config.json").write_text(json.dumps({**config, "items": {"one": 77}}))
    assert "does not fit" in error("inspect", "mixed")


# ---------------------------------------------------------------------------------------------------- statistics


def same_statistics(first: Statistics, second: Statistics) -> bool:
    return (
        first.counts == second.counts
        and first.provenance == second.provenance
        and all(
            torch.allclose(first.moments[name].dense(), second.moments[name].dense(), atol=1e-5)
            for name in first.moments
        )
    )


def collecting(model: str, data: str, output: str, *more: str) -> list[str]:
    return ["statistics", "collect", "--model", model, "--data", data, "--output", output, *more]


def test_statistics_collect(model, files):
    args = ["--target-modules", "down_proj", "--layers", "1", "--token-position", "predict"]
    found = document(*collecting(model, "retain.jsonl", "new/s.safetensors", *args))
    base, tokenizer = loaded(model)
    library = collect_statistics(
        base, RETAIN, tokenizer=tokenizer, target_modules=["down_proj"], layers_to_transform=[1], token_position="predict"
    )  # fmt: skip
    assert same_statistics(Statistics.load("new/s.safetensors"), library)
    assert found["moments"] == [{"layers": ["model.layers.1.mlp.down_proj"], "width": 48, "rows": 20}]
    assert found["provenance"] == vars(library.provenance)
    assert document("statistics", "info", "new/s.safetensors") == found


def test_statistics_merge_is_collecting_all(model, files):
    write_lines("all.jsonl", [*FORGET, *RETAIN])
    for name in ("forget", "retain", "all"):
        succeed(*collecting(model, f"{name}.jsonl", f"{name}.safetensors", "--quiet"))
    found = document("statistics", "merge", "forget.safetensors", "retain.safetensors", "--output", "both.safetensors")
    both = Statistics.load("both.safetensors")
    assert same_statistics(both, Statistics.load("all.safetensors"))
    assert same_statistics(
        both, merge_statistics(*(Statistics.load(f"{n}.safetensors") for n in ("forget", "retain")))
    )
    assert len(found["moments"]) == 8  # q, k and v share one, so do gate and up
    out = succeed("statistics", "info", "both.safetensors").stdout
    assert re.search(r"layers\.0\.mlp\.down_proj +48 +28", out) and "7, rows: answer" in out


def test_statistics_say_what_is_wrong(model, saved, files):
    succeed(*collecting(model, "retain.jsonl", "a.safetensors", "--quiet"))
    succeed(*collecting(model, "retain.jsonl", "p.safetensors", "--token-position", "predict", "--quiet"))
    merging = ["statistics", "merge", "a.safetensors", "p.safetensors", "--output"]
    assert "exists already" in error(*collecting(model, "retain.jsonl", "a.safetensors"))
    assert "exists already" in error(*merging, "a.safetensors")
    assert "different mask rules" in error(*merging, "b.safetensors")
    assert "not a safetensors file" in error("statistics", "info", "retain.jsonl")
    assert "does not exist" in error("statistics", "info", "none.safetensors")
    assert "nearest names" in error(
        *collecting(model, "retain.jsonl", "b.safetensors", "--target-modules", "dwn_proj")
    )
    assert not Path("b.safetensors").exists()


# ---------------------------------------------------------------------------------------------------- the report


class Page(HTMLParser):
    """Checks that tags are closed in order, and keeps what a test wants to look at."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text += data

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


def check_stands_alone(page: Page, source: str) -> None:
    assert not re.search(r"https?://|@import|url\(", source)
    for tag, attrs in page.tags:
        assert tag not in ("script", "link", "img", "iframe")
        assert not {"src", "href"} & attrs.keys()


def test_the_report(model, files):
    args = ["--report", "new/report.html", "--suite", "suite.json", "--no-generate"]
    found = document("unlearn", *unlearning(model, "adapter", *args))
    source = Path("new/report.html").read_text(encoding="utf-8")
    page = Page(source)
    check_stands_alone(page, source)
    for item in found["items"]:
        assert item["name"] in page.text
        for key in ("before", "after", "goal", "strength"):
            assert f"{item[key]:.3g}" in page.text
    assert page.text.count("resists") == 1 + sum(item["resists"] for item in found["items"])  # once in the note
    assert model in page.text and "3 texts, 3 tokens" in page.text
    assert "paris" not in page.text and "the capital of" not in page.text  # names only
    assert "restore_item('france'" in page.text
    assert all("scope" in attrs for attrs in page.all("th"))
    assert len(page.all("caption")) == len(page.all("table")) >= 5
    assert page.all("html") == [{"lang": "en"}] and any(attrs.get("name") == "viewport" for attrs in page.all("meta"))
    (svg,) = page.all("svg")
    assert svg["role"] == "img" and svg["aria-labelledby"] == "curve-title"
    curve = scale_curve(forgotten(model), loaded(model)[1], NAMED, RETAIN)
    assert (found["curve"]["chosen"], found["curve"]["reason"]) == (curve.chosen, curve.reason)
    for mine, theirs in zip(found["curve"]["points"], curve.points, strict=True):
        assert mine == pytest.approx(vars(theirs), abs=1e-6)
    assert len(page.all("circle")) == 2 * len(curve.points)
    after = found["evaluation"]["after"]
    assert f"{after['perplexity']:.3g}" in page.text
    assert "exists already" in error("unlearn", *unlearning(model, "other", *args, "-q"))


def test_texts_are_shown_only_when_asked_for(model, files):
    write_lines("forget.jsonl", [{"name": "<b>&", "prompt": "the capital of <i> france is", "answer": "paris ."}])
    succeed("unlearn", *unlearning(model, "adapter", "--report", "report.html", "--report-texts"))
    source = Path("report.html").read_text(encoding="utf-8")
    page = Page(source)
    assert "the capital of <i> france is → paris ." in page.text and "<b>&" in page.text
    assert not page.all("b") and not page.all("i")
    check_stands_alone(page, source)


def test_the_report_of_the_paper_s_method_and_of_a_tuned_strength(model, files):
    args = ["--method", "paper", "--alpha", "auto", "--report", "report.html"]
    found = document("unlearn", *unlearning(model, "adapter", *args))
    page = Page(Path("report.html").read_text(encoding="utf-8"))
    assert len(page.all("circle")) == 2 * len(found["curve"]["points"])
    assert found["curve"]["reason"] in ("goal", "budget") and "chosen:" in page.text
    for name in found["layers"]:
        assert name in page.text
    assert "restore_item" not in page.text


def test_a_report_of_an_adapter_of_unknown_origin(model, adapter):
    with pytest.raises(ValueError, match="Nothing is known about the adapter 'default'"):
        html_report.html_report(with_adapter(model, adapter))


# ---------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize(
    "command",
    ["", "unlearn", "evaluate", "merge", "export-lora", "inspect", "statistics", "statistics collect", "statistics merge",
     "statistics info", "table", "table export", "table verify", "table info", "table bench"],
)  # fmt: skip
def test_help_has_examples(command):
    out = succeed(*command.split(), "--help").stdout
    assert "Examples:" in out and f"engram-peft {command}".strip() in " ".join(out.split())


def test_alone_it_shows_its_help():
    assert "unlearn" in succeed().stdout and "collect" in succeed("statistics").stdout


def test_version():
    assert succeed("--version").stdout == f"engram-peft {engram_peft.__version__}\n"
