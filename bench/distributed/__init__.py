"""Several cards, and a model of more."""
