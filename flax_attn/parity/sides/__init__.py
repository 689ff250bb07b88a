"""The two sides of a comparison: how each is run, and which of their taps belong together."""
