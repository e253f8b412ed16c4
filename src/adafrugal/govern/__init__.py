"""During the run: watch what the next FLOP buys, move resources, and end when nothing that is left pays."""
