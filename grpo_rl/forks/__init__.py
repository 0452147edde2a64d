"""Exact forks of one env: what its state is, layer by layer, and whether that is all of it."""
