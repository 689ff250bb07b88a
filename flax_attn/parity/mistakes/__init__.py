"""Typical porting mistakes, applied to torch's own module one at a time."""
