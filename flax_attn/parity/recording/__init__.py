"""What torch gave on one machine, written down so that a port is proven on another without it."""
