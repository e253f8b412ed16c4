"""Curves and counts as pure functions of numbers: FLOP formulas; they serve planning and governing alike."""
