"""The backward on NVIDIA cards: all of it but the products of the main kernel."""
