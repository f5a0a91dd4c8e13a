"""Policies in other libraries: one file for each of them."""
