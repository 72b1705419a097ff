"""Results over parts of the keys: `states` merges them; `cascade` splits off pages that all sequences share."""
