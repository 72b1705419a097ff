"""Serving: plans that keep the launches of a step, and the launch that appends new keys and values to a cache."""

from warpattn.serving.append import append_paged
from warpattn.serving.plans import DecodePlan, PrefillPlan

__all__ = ["DecodePlan", "PrefillPlan", "append_paged"]
