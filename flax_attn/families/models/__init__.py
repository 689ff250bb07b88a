"""Whole models of published configs: attention, and what stands beside it.

There are two shapes, a module each: `decoder.py`, from tokens to logits, and `encoder.py`, from
tokens or images to hidden states. `rows.py` has a row of facts for each model type, and `files.py`
reads and writes the folders of transformers.
"""
