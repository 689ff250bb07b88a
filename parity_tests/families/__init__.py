"""Small configs of every family, and their attention in transformers."""
