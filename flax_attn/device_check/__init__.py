"""`flax-attn check-device`: checks correctness and speed of this library on this machine.

Each part is a separate process that writes each row to its file as soon as it is known, so a crash
or a timeout in one part does not affect the others. The command itself computes nothing, so that
every part can use the whole device.
"""
