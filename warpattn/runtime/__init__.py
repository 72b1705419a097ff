"""Runs calls as launches on a card or in the simulator, with the caches that make a second call cheap."""
