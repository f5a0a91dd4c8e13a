"""Saved tensors that are held off the device: copies on their way out and back, and the memory that they are in."""
