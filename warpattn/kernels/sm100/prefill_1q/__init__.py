"""Prefill on Blackwell with one query tile a CTA, keys split over CTAs where tiles are few."""
