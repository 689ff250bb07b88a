"""What a porter may do wrong, done to torch's own module: torch's run with one mistake in it."""
