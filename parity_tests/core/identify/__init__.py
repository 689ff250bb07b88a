"""`identify`: modules by hand and of transformers, drawn by a seed."""
