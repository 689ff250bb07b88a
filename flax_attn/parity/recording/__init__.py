"""Records torch's results on one machine, to check a port on another without torch."""
