"""Every test of the engine starts clean and leaves its thread clean."""

from engine_testing import clean_thread  # noqa: F401  # around every test here
