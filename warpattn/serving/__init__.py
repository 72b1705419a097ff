"""Serving: plans that keep the launches of a step, and the launches that append new keys and values to a cache."""

from warpattn.runtime.captures import outside_captures
from warpattn.serving.append import append_paged
from warpattn.serving.plans import DecodePlan, PrefillPlan
from warpattn.serving.slots import append_slots
from warpattn.serving.step_plan import StepPlan
from warpattn.serving.workspace import StepWorkspace, reserve_workspace

__all__ = [
    "DecodePlan", "PrefillPlan", "StepPlan", "StepWorkspace", "append_paged", "append_slots", "outside_captures",
    "reserve_workspace",
]  # fmt: skip
