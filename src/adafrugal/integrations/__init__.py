"""Adapters to other libraries ' training loops; each module needs its own extra and is imported by name."""
