"""Small models of many architectures with random weights, each with a loss and batches: what `models.py` tries."""

from __future__ import annotations

from _models_classic import CLASSIC
from _models_fields import FIELDS
from _models_kit import Make
from _models_layers import LAYERS
from _models_learning import LEARNING
from _models_made import MADE
from _models_more import MORE
from _models_series import SERIES
from _models_space import SPACE
from _models_tables import TABLES
from _models_transformers import LIBRARY

NEW: dict[str, Make] = {**SPACE, **FIELDS, **SERIES, **TABLES, **LEARNING, **MADE, **LAYERS, **MORE}
"""Models that no other test has."""
MODELS: dict[str, Make] = {**LIBRARY, **CLASSIC, **NEW}
"""Makers of models, by name."""
