"""Results over parts of the keys: merged into one (`states`), and made of a prefix that sequences share (`cascade`)."""
