"""Whole models in plain nnx: ports of classes of `transformers`, compared in core/parity.

Weights and modules keep the original's names, so that few rules carry them over.
"""
