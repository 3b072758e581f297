"""Finds shardings over `tensor` for models without names."""
