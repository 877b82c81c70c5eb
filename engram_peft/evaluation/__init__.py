"""Has a model forgotten, and what did it cost? Probes, a report, an attack, and two public benchmarks."""

from .muse import MuseData, MuseMetrics, load_muse, muse_metrics
from .probes import Probe, ProbeScore, score_probes
from .relearning import RelearningCurve, relearning_curve
from .report import Evaluation, GroupScores
from .suite import Suite, evaluate
from .texts import perplexity
from .tofu import TofuData, TofuMetrics, TofuScores, load_tofu, tofu_metrics


__all__ = [
    "Evaluation",
    "GroupScores",
    "MuseData",
    "MuseMetrics",
    "Probe",
    "ProbeScore",
    "RelearningCurve",
    "Suite",
    "TofuData",
    "TofuMetrics",
    "TofuScores",
    "evaluate",
    "load_muse",
    "load_tofu",
    "muse_metrics",
    "perplexity",
    "relearning_curve",
    "score_probes",
    "tofu_metrics",
]
