"""Which tensor goes where: the rules by which weights are named and laid out."""
