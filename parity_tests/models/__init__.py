"""Whole models in plain nnx: ports of classes of `transformers`, proven equal in core/test_models.

Weights and modules keep the original's names, so that few rules carry them over.
"""
