"""Internal utilities: frozen types, arrays, checks, and printing."""
