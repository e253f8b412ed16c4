"""Nouns and protocols that every other folder speaks; no maths, and no import beyond torch."""
