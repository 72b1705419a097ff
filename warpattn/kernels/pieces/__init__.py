"""Device code that knows no architecture: tiles, spans, softmax, masks and scores."""
