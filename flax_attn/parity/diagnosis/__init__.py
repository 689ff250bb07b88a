"""After a failure: which step introduced it, and what it looks like."""
