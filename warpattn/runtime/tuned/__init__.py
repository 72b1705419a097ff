"""Tuned choices: configurations measured on this machine's card, their file, and how a plan finds them."""
