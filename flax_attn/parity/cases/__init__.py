"""Cases: lists of module pairs to compare; finding, recording, running and reporting them."""
