"""Statistics of ai-engram."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file
from torch import nn

from engram_peft import EngramConfig, extract_engram
from engram_peft.interop.ai_engram import load_statistics

from ..editing.reference import relative_error


FIXTURES = Path(__file__).parents[1] / "fixtures" / "ai_engram_oracle"
FORMATS = [2, 3, 4]


@pytest.fixture(scope="module")
def oracle() -> dict[str, torch.Tensor]:
    return load_file(FIXTURES / "ai_engram_oracle.safetensors")


@pytest.mark.parametrize("number", FORMATS)
def test_the_files_of_ai_engram_hold_sums_and_counts(oracle, number, caplog):
    found = load_statistics(FIXTURES / f"stats_format{number}.pt")
    names = ["q", "asym"] if number == 3 else ["q", "k", "o", "asym"]
    assert list(found.moments) == names
    assert found.counts == {"q": 7, "k": 7, "o": 7, "asym": 1} if number != 3 else {"q": 7, "asym": 1}
    for name in names[:-1]:
        assert torch.equal(found.moments[name].dense(), 7 * oracle[f"packed.{name}"].double())
        assert torch.allclose(found.covariance(name), oracle[f"packed.{name}"].double(), rtol=1e-15)
    asym = oracle["packed.asym"].double()
    assert torch.equal(found.covariance("asym"), (asym + asym.T) / 2)
    assert (found.moments["q"] is found.moments.get("k")) == (number == 4)


def test_the_upper_triangle_is_row_by_row(oracle, tmp_path):
    packed = {"packed": oracle["packed.q_upper_rowmajor"], "dim": torch.tensor(8)}
    torch.save({"format": 3, "cov_packed": {"q": packed}, "count": {"q": 7}}, tmp_path / "q.pt")
    assert torch.equal(load_statistics(tmp_path / "q.pt").covariance("q"), 7 * oracle["packed.q"].double() / 7)


@pytest.mark.parametrize("cut, name", [("rtol", "rtol"), ("energy", "energy99"), ("mp", "mp")])
def test_an_edit_from_its_statistics_is_its_edit(oracle, tmp_path, cut, name):
    """`W C_t pinv(C_a)` of the known answers, by way of files in its format."""
    for role, count in (("target", 40), ("total", 240)):
        content = {"format": 2, "cov": {"fc": oracle[f"lin24.C_{role}"]}, "count": {"fc": count}}
        torch.save(content, tmp_path / f"{role}.pt")
    plain = nn.Sequential()
    plain.add_module("fc", nn.Linear(24, 10, bias=False))
    plain.fc.weight.data = oracle["lin24.W"].clone()
    model = get_peft_model(plain, EngramConfig(target_modules=["fc"]))
    extract_engram(
        model, *(load_statistics(tmp_path / f"{role}.pt") for role in ("target", "total")), cut=cut, scale="uniform"
    )
    change = model.base_model.model.fc.get_delta_weight("default")
    assert relative_error(-change, oracle[f"lin24.P.{name}"]) < 1e-4


def saved(tmp_path: Path, **changes: object) -> Path:
    """A file of format 4 with some entries replaced; `None` leaves one out."""
    eye = {"packed": torch.eye(3)[torch.ones(3, 3).triu().bool()], "dim": torch.tensor(3)}
    content = {"format": 4, "cov_packed": {"q": eye}, "count": {"q": 2, "k": 2}, "alias": {"k": "q"}, **changes}
    torch.save({key: value for key, value in content.items() if value is not None}, tmp_path / "file.pt")
    return tmp_path / "file.pt"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"format": 5}, "format 5"),
        ({"format": None}, "format None"),
        ({"count": None}, "no counts"),
        ({"cov_packed": None}, "no covariances"),
        ({"alias": {"k": "nobody"}}, "k shares the covariance of nobody"),
        ({"alias": {"q": "q"}}, "q shares the covariance of q"),
        ({"count": {"q": 2, "k": 3}}, "k shares"),
        ({"count": {"q": -1, "k": -1}}, "counts -1 rows of q"),
        ({"count": {"q": 2.5, "k": 2.5}}, "counts 2.5 rows of q"),
        ({"count": {"k": 2}}, "counts None rows of q"),
        ({"count": {"q": 2, "k": 2, "v": 2}}, r"rows of \['v'\]"),
        ({"cov_packed": {"q": {"packed": torch.ones(5), "dim": torch.tensor(3)}}}, "claims width 3 and holds 5"),
        ({"cov_packed": {"q": {"packed": torch.ones(6)}}}, "claims width 0"),
        ({"cov_packed": {"q": {"dense": torch.ones(3, 2)}}}, "not a finite square matrix"),
        ({"cov_packed": {"q": {"dense": torch.full((3, 3), torch.nan)}}}, "not a finite square matrix"),
        ({"cov_packed": {"q": {"dense": torch.ones(3, 3, dtype=torch.int64)}}}, "not a finite square matrix"),
        ({"cov_packed": {"q": {}}}, "not a finite square matrix"),
    ],
)
def test_a_file_that_does_not_hold_what_it_claims_is_refused(tmp_path, changes, message):
    assert list(load_statistics(saved(tmp_path)).moments) == ["q", "k"]
    with pytest.raises(ValueError, match=message):
        load_statistics(saved(tmp_path, **changes))


class Trap:
    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return Path.touch, (Path("trapped"),)


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"format": 2, "cov": {}, "count": {}, "extra": Trap()}, tmp_path / "torch.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Trap()))
    (tmp_path / "text.pt").write_text("no statistics")
    whole = (FIXTURES / "stats_format4.pt").read_bytes()
    (tmp_path / "half.pt").write_bytes(whole[: len(whole) // 2])
    for name in ("torch.pt", "plain.pt", "text.pt", "half.pt"):
        with pytest.raises(ValueError, match=f"{name} is not a statistics file of ai-engram"):
            load_statistics(tmp_path / name)
    assert not (tmp_path / "trapped").exists()
    with pytest.raises(FileNotFoundError, match="no statistics file"):
        load_statistics(tmp_path / "missing.pt")
