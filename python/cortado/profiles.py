# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Profiles: what one training step of a model is made of, and what links and codecs take (docs/planner.md)."""

from . import _core
from .checked_file import CheckedFile


class Job(CheckedFile):
    """``cortado.job/1``: a model's gradients in the order in which they are ready, and the times of its passes."""

    _kind = "job"
    _canonical = staticmethod(_core.canonical_job)
    _save = staticmethod(_core.save_job)


class Cluster(CheckedFile):
    """``cortado.cluster/1``: what collectives and codecs take on some machines."""

    _kind = "cluster"
    _canonical = staticmethod(_core.canonical_cluster)
    _save = staticmethod(_core.save_cluster)
