"""From a checked call to launches on a card or in the simulator, and the caches that make a second call cheap."""
