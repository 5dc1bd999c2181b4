"""Adapters at the edge: other libraries' graphs in and out."""
