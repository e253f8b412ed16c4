"""Axis 1, optimizer states: one engine, small rules, small subspaces, and the methods as presets of them."""
