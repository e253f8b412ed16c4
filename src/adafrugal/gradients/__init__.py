"""Axis 2, gradients: where they come from, behind one protocol."""
