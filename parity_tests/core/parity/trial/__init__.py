"""The fourth trial: faults that a generator makes in the source of ports, and what is said."""
