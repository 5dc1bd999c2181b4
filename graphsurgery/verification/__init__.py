"""Proof that a rewritten model gives the outputs of the original."""
