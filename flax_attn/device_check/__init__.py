"""`flax-attn check-device`: is this library right on this machine, and how fast is it?

Each part is a process of its own, which leaves its file as soon as a row is known, so a part that
crashes or runs out of time loses nothing of the others. The command itself computes nothing, so
every part has the whole device.
"""
