"""The main job: train a language model inside a budget, with checkpoints, a log and a report."""
