"""All cases, by name."""

from benchmarks.compatibility.case import CASES
from benchmarks.compatibility.cases import (
    adversaries,
    copies,
    data,
    freezing,
    gradients,
    groups,
    models,
    optimizers,
    precision,
    saving,
    scaling,
    schedules,
)

__all__ = [
    "CASES",
    "adversaries",
    "copies",
    "data",
    "freezing",
    "gradients",
    "groups",
    "models",
    "optimizers",
    "precision",
    "saving",
    "scaling",
    "schedules",
]
