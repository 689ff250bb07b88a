"""Tells what an attention module of torch computes, from one recorded run: who plays which role."""
