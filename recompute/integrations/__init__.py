"""Policies in other libraries: what each of them needs, one file each."""
