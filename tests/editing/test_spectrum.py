"""The pseudo-inverse of the reference: cuts, solvers and effective rank."""

from __future__ import annotations

import math

import pytest
import torch

from engram_peft.editing.spectrum import (
    CholeskyInverse,
    InverseOptions,
    SpectralInverse,
    effective_rank,
    fitted_marchenko_pastur_rank,
    invert,
    largest_eigenvalue,
    marchenko_pastur_rank,
)

from .reference import pinv, relative_error, with_spectrum


_NAMES = """rtol svd prec_none cap100 svd_cap100 rank25 rank95 rank95_floor_none energy90 energy99 energy99_rank25 ridge
ridge1e-2 ridge_rank50 mp mp_n mp_rank50 mp_n_rank50"""
CASES = _NAMES.split()


def options_of(settings: dict[str, str], **more) -> InverseOptions:
    """The reference's settings as ours: its SVD and its float64 inversion are what we always do."""
    ours = dict(more)
    for name, value in settings.items():
        if name == "cut":
            ours["cut"] = value
        elif name == "rank_floor":
            assert value == "none"
            ours["condition_cap"] = float("inf")
        elif name not in ("inverse_method", "inverse_precision"):
            ours[name] = float(value)
    return InverseOptions(**ours)


def product(inverse) -> torch.Tensor:
    """`R R^T`."""
    dim = len(inverse.unwhiten(torch.zeros(inverse.rank, 1, dtype=torch.float64)))
    return inverse.unwhiten(inverse.whiten(torch.eye(dim, dtype=torch.float64)))


# ------------------------------------------------------------------------------------------------ known answers


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layer", ["lin24", "lin64"])
def test_projection_equals_the_reference(oracle, layer, case):
    facts = oracle.facts[layer]
    weight, target, total = (oracle.tensors[f"{layer}.{name}"].double() for name in ("W", "C_target", "C_total"))
    inverse = invert(total, facts["N"], options_of(facts["cuts"][case]))
    # the reference records no rank for its SVD, which has to keep what the eigendecomposition keeps
    assert inverse.rank == facts["rank"][{"svd": "rtol", "svd_cap100": "cap100"}.get(case, case)]
    found = inverse.unwhiten(inverse.whiten((weight @ target).mT)).mT
    expected = oracle.tensors[f"{layer}.P.{case}"]
    assert relative_error(found, expected) < oracle.facts["tolerance"][f"{layer}.P.{case}"]


@pytest.mark.parametrize("layer", ["lin24", "lin64"])
def test_all_cases_of_the_reference_are_tested(oracle, layer):
    assert set(CASES) == set(oracle.facts[layer]["cuts"])


@pytest.mark.parametrize("number", range(7))
def test_marchenko_pastur_rank_equals_the_reference(oracle, number):
    spectra = oracle.facts["mp"]
    assert len(spectra) == 7
    eigenvalues = torch.tensor(spectra[number]["eig"], dtype=torch.float64)
    assert marchenko_pastur_rank(eigenvalues, spectra[number]["N"]) == spectra[number]["mp_rank"][0]
    assert fitted_marchenko_pastur_rank(eigenvalues) == spectra[number]["mp_rank_fitted"][0]


@pytest.mark.parametrize("layer", ["lin24", "lin64"])
@pytest.mark.parametrize("which", ["target", "total"])
def test_effective_rank_equals_the_reference(oracle, layer, which):
    covariance = oracle.tensors[f"{layer}.C_{which}"].double()
    assert effective_rank(covariance) == pytest.approx(oracle.facts[layer][f"{which}_erank"], rel=1e-4)


@pytest.mark.parametrize(
    "eigenvalues, expected",
    [([1.0] * 6, 6.0), ([3.0, 0, 0, 0], 1.0), ([0.0] * 4, 0.0), ([0.5, 0.25, 0.25], math.exp(1.5 * math.log(2)))],
)
def test_effective_rank_of_known_spectra(eigenvalues, expected):
    assert effective_rank(with_spectrum(eigenvalues)) == pytest.approx(expected, rel=1e-6)


# ------------------------------------------------------------------------------------------------ cuts


def test_cut_by_rtol_is_the_pseudo_inverse():
    covariance = with_spectrum([4.0, 1.0, 1e-3, 1e-9, 0.0, 0.0])
    inverse = invert(covariance, 100, InverseOptions())
    assert inverse.rank == 3
    assert relative_error(product(inverse), pinv(covariance)) < 1e-9


@pytest.mark.parametrize("cap, kept", [(100.0, 4), (10.0, 3), (3.9, 2), (1e9, 6), (float("inf"), 6)])
def test_condition_cap_keeps_what_is_within_the_cap(cap, kept):
    covariance = with_spectrum([4.0, 2.0, 1.0, 0.05, 1e-3, 1e-6])
    assert invert(covariance, 100, InverseOptions(condition_cap=cap)).rank == kept


@pytest.mark.parametrize("fraction, kept", [(0.3, 1), (0.41, 2), (0.71, 3), (0.93, 4), (0.96, 5)])
def test_energy_keeps_the_first_directions_that_carry_the_share(fraction, kept):
    covariance = with_spectrum([4.0, 3.0, 2.0, 0.5, 0.5, 0.0])
    options = InverseOptions(cut="energy", energy_fraction=fraction, solver="eigh")
    assert invert(covariance, 100, options).rank == kept


def test_ridge_inverts_every_positive_direction_damped():
    covariance = with_spectrum([4.0, 1.0, 0.25])
    inverse = invert(covariance, 100, InverseOptions(cut="ridge", ridge_delta=0.01))
    expected = torch.linalg.inv(covariance + 0.04 * torch.eye(3, dtype=torch.float64))
    assert relative_error(product(inverse), expected) < 1e-12


@pytest.mark.parametrize("cut", ["mp", "mp_n"])
def test_marchenko_pastur_keeps_at_least_one_direction(cut):
    assert invert(with_spectrum([1.0] * 20), 100, InverseOptions(cut=cut)).rank == 1


@pytest.mark.parametrize("fraction, kept", [(1e-6, 1), (0.25, 6), (0.26, 7), (1.0, 24)])
def test_rank_fraction_is_rounded_up(fraction, kept):
    covariance = with_spectrum(torch.linspace(1, 3, 24))
    assert invert(covariance, 100, InverseOptions(rank_fraction=fraction)).rank == kept


@pytest.mark.parametrize("cut", ["rtol", "energy", "ridge", "mp", "mp_n"])
def test_inverse_of_a_multiple_is_the_inverse_divided(cut):
    covariance = with_spectrum(torch.logspace(0, -8, 20))
    options = InverseOptions(cut=cut)
    once, scaled = invert(covariance, 50, options), invert(1e6 * covariance, 50, options)
    assert once.rank == scaled.rank
    assert relative_error(1e6 * product(scaled), product(once)) < 1e-6


# ------------------------------------------------------------------------------------------------ solvers


def test_cholesky_equals_eigendecomposition_where_nothing_is_cut():
    covariance = with_spectrum(torch.logspace(0, -3, 40))
    fast, exact = invert(covariance, 90, InverseOptions()), invert(covariance, 90, InverseOptions(solver="eigh"))
    assert isinstance(fast, CholeskyInverse)
    assert isinstance(exact, SpectralInverse)
    assert fast.rank == exact.rank == 40
    assert relative_error(product(fast), product(exact)) < 1e-10


@pytest.mark.parametrize("above, kept", [(0.0, 39), (-1e-12, 39), (0.9, 39), (1.2, 40), (1.9, 40), (3.0, 40)])
def test_default_solver_cuts_what_the_eigendecomposition_cuts(above, kept):
    """The smallest eigenvalue is `above` times the cut."""
    rtol = 40 * 2.0**-23
    eigenvalues = torch.cat([torch.linspace(1, 0.1, 39, dtype=torch.float64), torch.tensor([above * rtol])])
    covariance = with_spectrum(eigenvalues)
    assert invert(covariance, 90, InverseOptions()).rank == kept
    assert invert(covariance, 90, InverseOptions(solver="eigh")).rank == kept


@pytest.mark.parametrize("above, kept", [(0.99, 399), (1.01, 400)])
def test_default_solver_cuts_alike_where_the_spectrum_is_flat_at_the_top(above, kept):
    eigenvalues = torch.linspace(1, 0.98, 400, dtype=torch.float64)
    eigenvalues[-1] = above * 400 * 2.0**-23
    assert invert(with_spectrum(eigenvalues), 900, InverseOptions()).rank == kept


def test_default_solver_falls_back_where_the_reference_is_singular():
    rows = torch.randn(12, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    covariance = rows.mT @ rows / 12
    inverse = invert(covariance, 12, InverseOptions())
    assert isinstance(inverse, SpectralInverse)
    assert inverse.rank == 12
    assert relative_error(product(inverse), torch.linalg.pinv(covariance, hermitian=True)) < 1e-9


@pytest.mark.parametrize("dim", [1, 2, 5, 30, 200])
def test_largest_eigenvalue(dim):
    covariance = with_spectrum(torch.logspace(0, -4, dim), seed=dim)
    assert largest_eigenvalue(covariance) == pytest.approx(1.0, rel=1e-3)


def test_randomized_solver_is_close_to_the_exact_one():
    covariance = with_spectrum(torch.logspace(0, -6, 120))
    exact = invert(covariance, 500, InverseOptions(rank_fraction=0.25))
    fast = invert(covariance, 500, InverseOptions(rank_fraction=0.25, solver="randomized"))
    assert fast.rank == exact.rank == 30
    assert relative_error(product(fast), product(exact)) < 1e-5


def test_randomized_solver_follows_its_seed():
    covariance = with_spectrum(torch.linspace(1, 2, 80))
    options = {"rank_fraction": 0.1, "solver": "randomized"}
    first, again, other = (invert(covariance, 500, InverseOptions(**options, seed=s)).root for s in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_randomized_solver_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    invert(with_spectrum(torch.linspace(1, 2, 20)), 50, InverseOptions(rank_fraction=0.5, solver="randomized"))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("solver", ["auto", "eigh"])
def test_whiten_makes_the_covariance_the_identity(solver):
    covariance = with_spectrum(torch.logspace(0, -2, 15))
    inverse = invert(covariance, 50, InverseOptions(solver=solver))
    whitened = inverse.whiten(inverse.whiten(covariance).mT)
    assert relative_error(whitened, torch.eye(15)) < 1e-10


# ------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    "options, named",
    [
        ({"cut": "svd"}, "cut"),
        ({"solver": "qr"}, "solver"),
        ({"rank_fraction": 0.0}, "rank_fraction"),
        ({"rank_fraction": 1.5}, "rank_fraction"),
        ({"rank_fraction": math.nan}, "rank_fraction"),
        ({"solver": "randomized"}, "rank_fraction"),
        ({"condition_cap": 1.0}, "condition_cap"),
        ({"condition_cap": -5.0}, "condition_cap"),
        ({"condition_cap": math.nan}, "condition_cap"),
        ({"energy_fraction": 0.0}, "energy_fraction"),
        ({"energy_fraction": 1.1}, "energy_fraction"),
        ({"energy_fraction": math.nan}, "energy_fraction"),
        ({"ridge_delta": 0.0}, "ridge_delta"),
        ({"ridge_delta": math.nan}, "ridge_delta"),
    ],
)
def test_bad_options_are_refused_by_name(options, named):
    with pytest.raises(ValueError, match=named):
        InverseOptions(**options)


def test_default_cut_depends_on_the_width_alone():
    assert InverseOptions().rtol(576) == 576 * 2.0**-23
