"""Factors a layer, against the reference and in closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from engram_peft import compose, count_ratio, effective_rank, uniform, weight_norm
from engram_peft.editing.scaling import resolve_scaling


@dataclass
class Facts:
    target_count: int = 3
    total_count: int = 12
    weight_norm: float = 2.0
    projection_norm: float = 1.0
    target_effective_rank: float = 2.0
    total_effective_rank: float = 4.0


SCALINGS = {
    "count_ratio(1)": count_ratio(1),
    "count_ratio(0.5)": count_ratio(0.5),
    "weight_norm(1)": weight_norm(1),
    "weight_norm(2)": weight_norm(2),
    "effective_rank(1)": effective_rank(1),
    "effective_rank(2)": effective_rank(2),
    "uniform": uniform(),
    "compose(count_ratio(1),weight_norm(1))": compose(count_ratio(1), weight_norm(1)),
}


def facts_of(info: dict) -> Facts:
    rows, columns = info["shape"]
    return Facts(
        info["n"], info["N"], info["weight_fro"], info["P_entry"] * math.sqrt(rows * columns),
        info["target_erank"], info["total_erank"],
    )  # fmt: skip


@pytest.mark.parametrize("name", SCALINGS)
def test_factors_equal_the_reference(oracle, name):
    """Layers without target rows, without any rows and with a zero weight are among them."""
    section = oracle.facts["scaling"]
    layers = {layer: facts_of(info) for layer, info in section["infos"].items()}
    assert SCALINGS[name](layers) == pytest.approx(section["expect"][name], rel=1e-6, abs=1e-12)


def test_all_scalings_of_the_reference_are_tested(oracle):
    assert set(SCALINGS) == set(oracle.facts["scaling"]["expect"])


def test_weight_norm_of_nothing_but_zero_projections_is_zero(oracle):
    assert weight_norm(1)({"q": Facts(projection_norm=0.0)}) == oracle.facts["scaling"]["all_zero_P"]


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_no_layers_have_no_factors(scaling):
    assert scaling({}) == {}


@pytest.mark.parametrize(
    "name, same_as",
    [
        ("count_ratio", count_ratio(1)),
        ("weight_norm", weight_norm(1)),
        ("effective_rank", effective_rank(1)),
        ("uniform", uniform()),
        ("adaptive", compose(count_ratio(1), weight_norm(1))),
    ],
)
def test_names_stand_for_exponent_one(name, same_as):
    layers = {"a": Facts(), "b": Facts(target_count=5, projection_norm=0.3, target_effective_rank=1.5)}
    recorded, scaling = resolve_scaling(name)
    assert recorded == name
    assert scaling(layers) == same_as(layers)


def test_compose_multiplies():
    layers = {"a": Facts(), "b": Facts(target_count=6)}
    assert compose(count_ratio(1), effective_rank(1), lambda ls: dict.fromkeys(ls, 3.0))(layers) == {
        "a": pytest.approx(0.25 * 0.5 * 3),
        "b": pytest.approx(0.5 * 0.5 * 3),
    }


def test_compose_of_nothing_is_uniform():
    assert compose()({"a": Facts()}) == {"a": 1.0}


def test_own_function_is_taken_as_it_is():
    def by_rows(layers):
        return {name: facts.target_count / 10 for name, facts in layers.items()}

    name, scaling = resolve_scaling(by_rows)
    assert scaling is by_rows
    assert scaling({"a": Facts(target_count=7)}) == {"a": 0.7}
    assert isinstance(name, str) and name


def test_library_functions_are_recorded_under_their_names():
    assert resolve_scaling(count_ratio(0.5))[0] == "count_ratio"


@pytest.mark.parametrize("scale", ["counts", "", None, 3])
def test_unknown_scaling_is_refused_with_the_known_ones(scale):
    with pytest.raises(ValueError, match="scale.*adaptive.*count_ratio"):
        resolve_scaling(scale)
